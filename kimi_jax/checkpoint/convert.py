"""From a released checkpoint to a converted one (see `converted`), a part at a time."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from kimi_jax.checkpoint import names
from kimi_jax.checkpoint.converted import ARRAYS, FORMAT, SOURCE, array_entry, array_info, checksum
from kimi_jax.checkpoint.header import TensorInfo
from kimi_jax.checkpoint.index import INDEX_NAME
from kimi_jax.checkpoint.load import FolderReader, Progress, free, place, silent
from kimi_jax.checkpoint.reader import CheckpointFolder
from kimi_jax.checkpoint.shards import SHARDS_NAME, describe_shards
from kimi_jax.checkpoint.whole import MARKER, copy_side_files, whole_folder
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.layout import Layout, validate

PART_BYTES = 512 << 20


class Written(NamedTuple):
    """What a conversion wrote: arrays or tensors, and their bytes."""

    arrays: int
    bytes: int


def convert(
    source: Path,
    destination: Path,
    stored: Mapping[str, ArraySpec],
    layout: Layout,
    mesh: Mesh,
    *,
    tied_head: bool = False,
    part_bytes: int = PART_BYTES,
    progress: Progress = silent,
) -> Written:
    """Writes every tensor of the released checkpoint ``source`` into the new folder ``destination``.

    Each part passes over the mesh as the layout cuts it; what a reader gets back does not depend on that. One part is
    held at a time: the mesh holds ``part_bytes`` or the largest parameter (4.9 GB in Kimi-K3), whichever is more, and
    orbax keeps up to as much again on the host while it writes.

    Args:
      source: the released folder.
      destination: must not exist; appears whole or not at all.
      stored: parameters by dotted path with the checkpoint's dtypes.
      layout: cuts the arrays on their way; dimensions that it would pad stay whole.
      mesh: of the layout.
      tied_head: the configuration says that the output head is the embedding, so the source may hold none.
      part_bytes: arrays that are written together.
      progress: called after each part with its last array.

    Raises:
      CheckpointError: the source does not hold exactly its tensors, or the destination exists or cannot be written.
      LayoutError: the layout does not fit the arrays.
    """
    with CheckpointFolder.open(source) as opened, whole_folder(destination) as partial:
        wanted = names.sources(stored)
        if tied_head and wanted[names.HEAD].names[0] not in opened:
            del wanted[names.HEAD]
        for name in names.absent_key_biases(wanted, opened.names()):
            del wanted[name]
        skipped = names.check({name: opened.info(name) for name in opened.names()}, wanted, str(source))
        plan = _Plan(opened, wanted, {name: stored[name] for name in wanted}, layout)
        validate(layout, plan.specs, str(source))
        copy_side_files(source, partial)
        infos = {**plan.infos, **{name: opened.info(name) for name in skipped}}
        arrays: dict[str, TensorInfo] = {}
        done, total = 0, sum(info.nbytes for info in infos.values())
        for number, batch in enumerate(_batches(infos, part_bytes)):
            part = f"{ARRAYS}/{number:04d}"
            _write_part(partial / part, batch, plan, mesh)
            arrays |= {name: array_info(name, infos[name].stored_dtype, infos[name].shape, part) for name in batch}
            done += sum(infos[name].nbytes for name in batch)
            progress(batch[-1], done, total)
        _write_source(partial / SOURCE, opened)
        _write_marker(partial, arrays)
    return Written(len(arrays), total)


class _Plan:
    """How each parameter passes over the mesh: in its stored shape, ``A_log`` too, without padding by the layout."""

    def __init__(
        self,
        opened: CheckpointFolder,
        wanted: Mapping[str, names.Source],
        stored: Mapping[str, ArraySpec],
        layout: Layout,
    ) -> None:
        self.layout, self.opened = layout, opened
        self.specs: dict[str, ArraySpec] = {}
        sources: dict[str, names.Source] = {}
        for name, source in wanted.items():
            spec = stored[name]
            if source.padded:
                shape = opened.info(source.names[0]).shape
                spec = ArraySpec(shape, spec.dtype, (None,))
                source = dataclasses.replace(source, shape=shape, padded=False)
            axes = tuple(None if _pads(layout, spec, dim) else axis for dim, axis in enumerate(spec.axes))
            self.specs[name], sources[name] = dataclasses.replace(spec, axes=axes), source
        self.read = FolderReader(opened, sources)
        self.infos = {name: array_info(name, sources[name].dtype, spec.shape, "") for name, spec in self.specs.items()}


def _pads(layout: Layout, spec: ArraySpec, dim: int) -> bool:
    try:
        return layout.split(spec, dim) is not None
    except ValueError:  # a size that cannot be cut at all: `validate` says so for all arrays together
        return False


def _batches(infos: Mapping[str, TensorInfo], limit: int) -> Iterator[list[str]]:
    """Neighbours of together at most ``limit`` bytes; a larger array alone."""
    batch: list[str] = []
    held = 0
    for name, info in infos.items():
        if batch and held + info.nbytes > limit:
            yield batch
            batch, held = [], 0
        batch.append(name)
        held += info.nbytes
    if batch:
        yield batch


def _write_part(path: Path, batch: list[str], plan: _Plan, mesh: Mesh) -> None:
    from kimi_jax.checkpoint import parts

    specs = {name: plan.specs[name] for name in batch if name in plan.specs}
    placed = place(plan.layout, mesh, specs, plan.read)
    try:
        others = {name: np.array(plan.opened.read(name)) for name in batch if name not in specs}
        parts.save(path, {**placed, **others})
    finally:
        free(placed)


def _write_source(folder: Path, opened: CheckpointFolder) -> None:
    folder.mkdir()
    (folder / SHARDS_NAME).write_text(json.dumps(describe_shards(opened), separators=(",", ":")))
    index = opened.path / INDEX_NAME
    if index.exists():
        (folder / INDEX_NAME).write_bytes(index.read_bytes())


def _write_marker(folder: Path, arrays: Mapping[str, TensorInfo]) -> None:
    """Makes sure that every file is on disk, then writes what they are."""
    files: dict[str, Any] = {}
    for section in (ARRAYS, SOURCE):
        for path in sorted((folder / section).rglob("*")):
            if path.is_file():
                files[path.relative_to(folder).as_posix()] = checksum(path)
                _sync(path)
    marker = {
        "format": FORMAT,
        "arrays": {name: array_entry(info) for name, info in arrays.items()},
        "files": files,
    }
    (folder / MARKER).write_text(json.dumps(marker, indent=1))
    _sync(folder / MARKER)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
