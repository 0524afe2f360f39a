"""Which checkpoint tensors make each parameter: strip a prefix, stack the experts, narrow the padded ``A_log``, part ``wqkv``.

The module tree mirrors the released names, so this is all there is to say (text-model section 8).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kimi_jax.checkpoint.header import CheckpointError, TensorInfo
from kimi_jax.checkpoint.strict_json import limited, shown
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.blocks import Slices
from kimi_jax.precision import BFLOAT16

TEXT_PREFIX = "language_model."

VISION_PREFIXES = ("vision_tower.", "mm_projector.")
"""Tensors that keep their whole name, and that a text-only load leaves in their file by declaration."""

STORED = {BFLOAT16: "BF16", np.dtype(np.float32): "F32", np.dtype(np.uint8): "U8"}

_PADDED = ".A_log"
_PARTED = ".wqkv.weight"
_STACKED = re.compile(r"\.experts\.(?=w\d\.)")
_KEY_BIAS = ".indexer.k_norm.bias"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Source:
    """Where one parameter comes from.

    Attributes:
      names: the tensor, or one tensor per expert in order; experts are stacked along a new first dimension.
      shape: of each tensor.
      dtype: stored dtype of each tensor, a safetensors name.
      stacked: whether there is one tensor per expert.
      padded: the stored first dimension may be longer; only its first entries are values.
      parts: the stored first dimension is this many behind one another, which are the parameter's own first dimension.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    stacked: bool = False
    padded: bool = False
    parts: int = 1

    def fits(self, info: TensorInfo) -> bool:
        """Whether a stored tensor has the right shape."""
        if self.padded and len(info.shape) == 1:
            return info.shape[0] >= self.shape[0]
        return info.shape == self.shape

    def part(self, tensor: np.ndarray, index: Slices) -> np.ndarray:
        """Entries of a parameter of several parts, at slices of its own shape, out of the whole stored tensor."""
        return tensor.reshape(self.parts, -1, *tensor.shape[1:])[index]


def sources(stored: Mapping[str, ArraySpec]) -> dict[str, Source]:
    """The source of every parameter.

    Args:
      stored: parameters by dotted path with the checkpoint's own dtypes and whole shapes.
    """
    return {name: _source(name, spec) for name, spec in stored.items()}


def _source(parameter: str, spec: ArraySpec) -> Source:
    dtype = STORED[spec.dtype]
    if parameter.startswith(VISION_PREFIXES):
        return _vision_source(parameter, spec)
    name = TEXT_PREFIX + parameter
    if _STACKED.search(parameter):
        before, after = _STACKED.split(name)
        names = tuple(f"{before}.experts.{expert}.{after}" for expert in range(spec.shape[0]))
        return Source(names, spec.shape[1:], dtype, stacked=True)
    return Source((name,), spec.shape, dtype, padded=parameter.endswith(_PADDED))


def _vision_source(parameter: str, spec: ArraySpec) -> Source:
    """The tower's and the projector's, which a converted checkpoint holds as the released one does."""
    dtype = STORED[spec.dtype]
    if not parameter.endswith(_PARTED):
        return Source((parameter,), spec.shape, dtype)
    parts, rows, *rest = spec.shape
    return Source((parameter,), (parts * rows, *rest), dtype, parts=parts)


def whole_sources(stored: Mapping[str, ArraySpec]) -> dict[str, Source]:
    """The same for a converted checkpoint, where every parameter is one array under its own dotted path."""
    return {
        name: _vision_source(name, spec)
        if name.startswith(VISION_PREFIXES)
        else Source((name,), spec.shape, STORED[spec.dtype], padded=name.endswith(_PADDED))
        for name, spec in stored.items()
    }


def with_tied_head(found: dict[str, Source], present: Iterable[str]) -> dict[str, Source]:
    """Reads the output head from the embedding where the file holds no head of its own (PF-33)."""
    head = found[HEAD]
    if head.names[0] in set(present):
        return found
    return {**found, HEAD: found[EMBEDDING]}


def absent_key_biases(found: Mapping[str, Source], present: Iterable[str]) -> tuple[str, ...]:
    """Parameters that a checkpoint may leave out, where it does: the biases of the index keys' norms, all of them or none.

    Public sources count four or five tensors per indexer (K3.1 Pro notes, section 3); without a bias nothing is added.
    """
    biases = tuple(name for name in found if name.endswith(_KEY_BIAS))
    there = set(present)
    return () if any(found[name].names[0] in there for name in biases) else biases


def check(infos: Mapping[str, TensorInfo], wanted: Mapping[str, Source], where: str) -> tuple[str, ...]:
    """Checks that every parameter has its tensors and every tensor its use.

    Args:
      infos: the tensors that are there.
      wanted: the source of every parameter.
      where: what errors call the checkpoint.

    Returns:
      Names of the tensors that are skipped by declaration (vision).

    Raises:
      CheckpointError: missing, misshapen, wrong-dtype and unused tensors, all together by name.
    """
    missing, wrong = [], []
    used = set()
    for source in wanted.values():
        for name in source.names:
            used.add(name)
            info = infos.get(name)
            if info is None:
                missing.append(f"{name} is missing; expected {source.dtype} {list(source.shape)}")
                continue
            if info.stored_dtype != source.dtype:
                wrong.append(f"{name} in {info.file} is {info.stored_dtype}; expected {source.dtype}")
            if not source.fits(info):
                more = " or more" if source.padded else ""
                wrong.append(f"{name} in {info.file} has shape {list(info.shape)}; expected {list(source.shape)}{more}")
    rest = [name for name in infos if name not in used]
    # where the tower is wanted, a tensor of it that has no use is as wrong as any other
    may_skip = () if any(name.startswith(VISION_PREFIXES) for name in used) else VISION_PREFIXES
    skipped = tuple(name for name in rest if name.startswith(may_skip))
    extra = [
        f"{shown(name)} in {infos[name].file} belongs to no parameter" for name in rest if not name.startswith(may_skip)
    ]
    problems = [*limited(missing), *limited(wrong), *limited(extra)]
    if problems:
        hint = f"Only {' and '.join(prefix + '*' for prefix in may_skip)} may be left unread." if may_skip else ""
        if not wrong and not extra and all(problem.startswith(VISION_PREFIXES) for problem in missing):
            hint = "Text works without the vision tower: load with vision=False (--no-vision)."
        raise CheckpointError(f"Checkpoint {where} does not match its config.json", problems, hint)
    return skipped
