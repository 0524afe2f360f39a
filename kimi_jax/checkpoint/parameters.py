"""The parameters of a model folder, released or converted, placed on a mesh."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from kimi_jax.checkpoint import names
from kimi_jax.checkpoint.converted import ConvertedFolder, is_converted
from kimi_jax.checkpoint.header import TensorInfo
from kimi_jax.checkpoint.load import Finish, FolderReader, Progress, Reader, free, keep, place, silent
from kimi_jax.checkpoint.names import EMBEDDING, HEAD
from kimi_jax.checkpoint.reader import CheckpointFolder
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.blocks import Slices
from kimi_jax.placement.layout import Layout

BATCH_BYTES = 32 << 20
"""Restored together from a converted checkpoint, as a restore costs 10 ms; a larger parameter goes alone."""

_ROWS = 1024
"""Rows of two heads that are compared at a time."""


def read_parameters(
    folder: Path,
    stored: Mapping[str, ArraySpec],
    specs: Mapping[str, ArraySpec],
    layout: Layout,
    mesh: Mesh,
    *,
    tied_head: bool = False,
    progress: Progress = silent,
    finish: Finish = keep,
) -> dict[str, jax.Array]:
    """Every parameter of a checkpoint folder as an array on the mesh, created with its final sharding.

    Args:
      folder: released safetensors, or what ``convert`` made of them.
      stored: parameters by dotted path with the checkpoint's dtypes.
      specs: the same parameters as they are kept, or as ``finish`` wants them.
      tied_head: the configuration says that the output head is the embedding. A head in the folder is used even so.
      finish: called with each parameter as it lands: what it gives is kept instead.

    Raises:
      CheckpointError: from ``finish``, or the folder does not hold exactly the tensors of its configuration, or cannot be read.
    """
    if is_converted(folder):
        return _read_converted(ConvertedFolder.open(folder), stored, specs, layout, mesh, tied_head, progress, finish)
    with CheckpointFolder.open(folder) as opened:
        wanted = names.sources(stored)
        if tied_head:
            wanted = names.with_tied_head(wanted, opened.names())
        absent = _absent(folder, wanted, opened.names())
        wanted = {name: source for name, source in wanted.items() if name not in absent}
        names.check({name: opened.info(name) for name in opened.names()}, wanted, str(folder))
        reader = ZerosReader(FolderReader(opened, wanted), stored, absent)
        if tied_head:
            _warn_of_own_head(folder, reader, stored[HEAD].shape)
        return place(layout, mesh, specs, reader, progress, finish)


@dataclass(frozen=True)
class ZerosReader:
    """Reads from ``held``; zeros for parameters that the checkpoint leaves out."""

    held: Reader
    stored: Mapping[str, ArraySpec]
    absent: tuple[str, ...]

    def __call__(self, parameter: str, index: Slices) -> np.ndarray[Any, Any]:
        if parameter not in self.absent:
            return self.held(parameter, index)
        spec = self.stored[parameter]
        return np.zeros(
            [len(range(*part.indices(size))) for part, size in zip(index, spec.shape, strict=True)], spec.dtype
        )


@dataclass(frozen=True)
class ArraysReader:
    """Stored entries out of whole arrays on the host, by their stored name."""

    arrays: Mapping[str, np.ndarray[Any, Any]]
    sources: Mapping[str, names.Source]

    def __call__(self, parameter: str, index: Slices) -> np.ndarray[Any, Any]:
        source = self.sources[parameter]
        whole = self.arrays[source.names[0]]
        return source.part(whole, index) if source.parts > 1 else whole[index]


def _read_converted(
    opened: ConvertedFolder,
    stored: Mapping[str, ArraySpec],
    specs: Mapping[str, ArraySpec],
    layout: Layout,
    mesh: Mesh,
    tied_head: bool,
    progress: Progress,
    finish: Finish,
) -> dict[str, jax.Array]:
    """Parameters that are kept as they are stored go straight into their shards; a dtype is converted on the way.

    Only padded expert slices and the narrowed ``A_log`` pass through whole arrays on the host, a batch at a time.
    """
    wanted = names.whole_sources(stored)
    if tied_head:
        wanted = names.with_tied_head(wanted, opened.arrays)
    absent = _absent(opened.path, wanted, opened.arrays)
    wanted = {name: source for name, source in wanted.items() if name not in absent}
    names.check(opened.arrays, wanted, str(opened.path))
    if tied_head:
        heads = {source: opened.read(source) for name in (HEAD, EMBEDDING) for source in wanted[name].names}
        _warn_of_own_head(opened.path, ArraysReader(heads, wanted), stored[HEAD].shape)
        del heads
    infos = {name: opened.arrays[wanted[name].names[0]] for name in specs if name not in absent}
    kept = {name: spec for name, spec in specs.items() if name not in absent}
    direct = {name for name, spec in kept.items() if infos[name].shape == spec.shape == layout.placed_shape(spec)}
    params: dict[str, jax.Array] = {}
    done, total = 0, sum(spec.nbytes for spec in specs.values())

    def landed(arrays: Mapping[str, jax.Array]) -> None:
        nonlocal done
        for name, array in arrays.items():
            params.update(finish(name, array))
            done += specs[name].nbytes
            progress(name, done, total)

    try:
        for batch in _batches([name for name in kept if name in direct], infos):
            landed(_restore(opened, batch, infos, specs, layout, mesh))
        for batch in _batches([name for name in kept if name not in direct], infos):
            whole = opened.read_together([infos[name].name for name in batch])
            landed(place(layout, mesh, {name: specs[name] for name in batch}, ArraysReader(whole, wanted)))
            del whole
        zeros = ZerosReader(ArraysReader({}, wanted), stored, absent)
        landed(place(layout, mesh, {name: specs[name] for name in absent}, zeros))
    except BaseException:
        free(params)
        raise
    return {**{name: params[name] for name in specs if name in params}, **params}


def _restore(
    opened: ConvertedFolder,
    batch: Sequence[str],
    infos: Mapping[str, TensorInfo],
    specs: Mapping[str, ArraySpec],
    layout: Layout,
    mesh: Mesh,
) -> dict[str, jax.Array]:
    from kimi_jax.checkpoint.parts import Target

    targets = {
        infos[name].name: Target(specs[name].shape, specs[name].dtype, NamedSharding(mesh, layout.spec(specs[name])))
        for name in batch
    }
    arrays = opened.restore(targets)
    return {name: jax.block_until_ready(arrays[infos[name].name]) for name in batch}


def _batches(wanted: Sequence[str], infos: Mapping[str, TensorInfo]) -> Iterator[list[str]]:
    """Neighbours in one part, up to ``BATCH_BYTES``; no stored array twice (a tied head is the embedding)."""
    batch: list[str] = []
    for name in wanted:
        info, held = infos[name], [infos[other] for other in batch]
        together = sum(other.nbytes for other in held) + info.nbytes <= BATCH_BYTES
        if held and not (together and held[0].file == info.file and info not in held):
            yield batch
            batch = []
        batch.append(name)
    if batch:
        yield batch


def _absent(folder: Path, wanted: Mapping[str, names.Source], present: Iterable[str]) -> tuple[str, ...]:
    """Says so where the biases of the index keys are left out and taken for zero (K3.1 Pro notes, section 3)."""
    absent = names.absent_key_biases(wanted, present)
    if absent:
        warnings.warn(
            f"{folder}: none of the {len(absent)} indexers has a k_norm.bias: zero is used, and the keys are still centred",
            stacklevel=3,
        )
    return absent


def _warn_of_own_head(folder: Path, read: Reader, shape: Sequence[int]) -> None:
    """Says so where a head that should be the embedding is another matrix (PF-33)."""
    columns = slice(0, shape[1])
    for start in range(0, shape[0], _ROWS):
        rows = (slice(start, min(start + _ROWS, shape[0])), columns)
        if read(HEAD, rows).tobytes() != read(EMBEDDING, rows).tobytes():
            warnings.warn(
                f"{folder}: config.json says that the output head is the embedding, but the checkpoint holds another "
                f"{HEAD}: it is used",
                stacklevel=2,
            )
            return
