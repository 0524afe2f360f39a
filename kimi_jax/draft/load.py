"""A draft checkpoint onto a mesh: strict about names and shapes, and it says what it leaves unread (DSpark notes, section 4)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from kimi_jax.checkpoint.header import TensorInfo
from kimi_jax.checkpoint.load import Progress, place, silent
from kimi_jax.checkpoint.reader import CheckpointFolder
from kimi_jax.checkpoint.strict_json import limited, shown
from kimi_jax.draft.config import DraftConfig, DraftError
from kimi_jax.draft.config_read import DraftSpec
from kimi_jax.draft.dspark import draft_parameters
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.blocks import Slices
from kimi_jax.placement.layout import Layout
from kimi_jax.precision import Precision

IGNORED = re.compile(r"(mask_embedding|t2d|embed_tokens\.weight|(.*\.)?rotary_emb\..*)")
"""Tensors that may be there and mean nothing: the embedding is a copy of the target's."""

STORED = ("BF16", "F32", "F16")
"""Dtypes that a parameter may be stored in."""

CONFIDENCE = "confidence_head.proj.weight"


@dataclass(frozen=True)
class LoadedDraft:
    """A draft in its place.

    Attributes:
      spec: with the confidence head that the checkpoint really holds.
      params: arrays by checkpoint name.
      ignored: tensors that were left unread.
    """

    spec: DraftSpec
    params: dict[str, jax.Array]
    ignored: tuple[str, ...]


def load_draft(
    folder: str | Path, spec: DraftSpec, layout: Layout, mesh: Mesh, precision: Precision, progress: Progress = silent
) -> LoadedDraft:
    """Reads every parameter of a draft.

    Raises:
      DraftError: missing, unknown and misshapen tensors, and a confidence head that contradicts config.json; all at once.
      CheckpointError: the file cannot be read.
    """
    with CheckpointFolder.open(folder) as opened:
        infos = {name: opened.info(name) for name in opened.names()}
        problems: list[str] = []
        sizes = _with_confidence(spec, infos, problems)
        specs = draft_parameters(sizes, precision)
        ignored = tuple(name for name in infos if IGNORED.fullmatch(name))
        problems += _problems(infos, specs, ignored)
        if problems:
            raise DraftError(f"Draft {folder} does not match its config.json", problems)

        def read(parameter: str, index: Slices) -> np.ndarray:
            return opened.read(parameter, index)

        params = place(layout, mesh, specs, read, progress)
    return LoadedDraft(replace(spec, sizes=sizes), params, ignored)


def _with_confidence(spec: DraftSpec, infos: Mapping[str, TensorInfo], problems: list[str]) -> DraftConfig:
    """The sizes with the confidence head as wide as it is stored; the config may only agree."""
    enabled, with_token = spec.confidence
    info = infos.get(CONFIDENCE)
    if info is None or not enabled:
        if enabled:
            problems.append(f"{CONFIDENCE} is missing, and enable_confidence_head is not false")
        elif info is not None:
            problems.append(f"{CONFIDENCE} is there, but enable_confidence_head is false")
        return replace(spec.sizes, confidence="none")
    wide = info.shape == (1, spec.sizes.hidden + spec.sizes.markov_rank)
    if with_token is not None and with_token != wide:
        problems.append(
            f"{CONFIDENCE} has shape {list(info.shape)}, but confidence_head_with_markov is {str(with_token).lower()}"
        )
    return replace(spec.sizes, confidence="hidden and token" if wide else "hidden")


def _problems(infos: Mapping[str, TensorInfo], specs: Mapping[str, ArraySpec], ignored: tuple[str, ...]) -> list[str]:
    missing = [f"{name} is missing; expected {list(spec.shape)}" for name, spec in specs.items() if name not in infos]
    wrong = []
    for name, spec in specs.items():
        info = infos.get(name)
        if info is not None and info.shape != spec.shape:
            wrong.append(f"{name} in {info.file} has shape {list(info.shape)}; expected {list(spec.shape)}")
        if info is not None and info.stored_dtype not in STORED:
            wrong.append(f"{name} in {info.file} is {info.stored_dtype}; expected one of {', '.join(STORED)}")
    confidence = CONFIDENCE.rpartition(".")[0] + "."
    extra = [
        f"{shown(name)} in {infos[name].file} belongs to no parameter"
        for name in infos
        if name not in specs and name not in ignored and not name.startswith(confidence)
    ]
    return [*limited(missing), *limited(wrong), *limited(extra)]
