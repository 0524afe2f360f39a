"""From a converted checkpoint back to a released one: the same tensors, byte for byte, in the same shards."""

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kimi_jax.checkpoint import names
from kimi_jax.checkpoint.convert import Written
from kimi_jax.checkpoint.converted import SOURCE, ConvertedFolder
from kimi_jax.checkpoint.header import CheckpointError
from kimi_jax.checkpoint.index import INDEX_NAME
from kimi_jax.checkpoint.load import Progress, silent
from kimi_jax.checkpoint.shards import SHARDS_NAME, Shard, read_shards
from kimi_jax.checkpoint.strict_json import limited, shown
from kimi_jax.checkpoint.whole import copy_side_files, whole_folder
from kimi_jax.checkpoint.writer import TensorSource, write_checkpoint
from kimi_jax.placement.axes import ArraySpec


class _Piece(NamedTuple):
    """Where a released tensor lies: a whole array, or one row of it (an expert)."""

    array: str
    row: int | None = None


def export(
    folder: Path,
    destination: Path,
    stored: Mapping[str, ArraySpec],
    *,
    tied_head: bool = False,
    progress: Progress = silent,
) -> Written:
    """Writes the converted checkpoint ``folder`` as the released one that it was made of.

    Every tensor is the same byte for byte. A whole file is too if it was written as the official writer and ours do it:
    header in the order of the data, padded to 8 bytes, one text for all shards. The index is a copy.

    An array is read when its first tensor is written and let go after its last: with shards that follow the layers the
    host holds the experts of one layer (15 GB in Kimi-K3).

    Args:
      folder: the converted folder.
      destination: must not exist; appears whole or not at all.
      stored: parameters by dotted path with the checkpoint's dtypes.
      tied_head: as for ``convert``.
      progress: called with each tensor that is written.

    Raises:
      CheckpointError: the folder is damaged or does not match its configuration, or the destination exists or cannot be
        written.
    """
    opened = ConvertedFolder.open(folder)
    wanted = names.whole_sources(stored)
    if tied_head and names.HEAD not in opened.arrays:
        del wanted[names.HEAD]
    for name in names.absent_key_biases(wanted, opened.arrays):
        del wanted[name]
    skipped = names.check(opened.arrays, wanted, str(folder))
    opened.verify(SOURCE)
    shards = read_shards(folder / SOURCE / SHARDS_NAME)
    pieces = _pieces({name: stored[name] for name in wanted}) | {name: _Piece(name) for name in skipped}
    _check_listed(folder, shards, pieces)
    with whole_folder(destination) as new:
        weight_map = {name: shard.file for shard in shards for name in shard.tensors}
        tensors = _tensors(opened, shards, pieces, progress)
        texts = [shard.metadata for shard in shards]
        write_checkpoint(new, tensors, weight_map=weight_map, metadata=texts[0])
        copy_side_files(folder, new)
        if (folder / SOURCE / INDEX_NAME).exists():
            shutil.copyfile(folder / SOURCE / INDEX_NAME, new / INDEX_NAME)
        else:
            (new / INDEX_NAME).unlink()
    return Written(len(weight_map), sum(info.nbytes for info in opened.arrays.values()))


def _pieces(stored: Mapping[str, ArraySpec]) -> dict[str, _Piece]:
    """Released name -> where it lies."""
    pieces = {}
    for array, source in names.sources(stored).items():
        for row, name in enumerate(source.names):
            pieces[name] = _Piece(array, row if source.stacked else None)
    return pieces


def _check_listed(folder: Path, shards: tuple[Shard, ...], pieces: Mapping[str, _Piece]) -> None:
    listed = Counter(name for shard in shards for name in shard.tensors)
    problems = [f"{shown(name)} is in no shard" for name in pieces if name not in listed]
    problems += [f"{shown(name)} belongs to no array" for name in listed if name not in pieces]
    problems += [f"{shown(name)} is listed {count} times" for name, count in listed.items() if count > 1]
    if problems:
        raise CheckpointError(f"{folder / SOURCE / SHARDS_NAME} does not match the arrays", limited(problems))


def _tensors(
    opened: ConvertedFolder, shards: tuple[Shard, ...], pieces: Mapping[str, _Piece], progress: Progress
) -> Iterator[tuple[str, TensorSource]]:
    arrays = _Arrays(opened, Counter(piece.array for piece in pieces.values()))
    done, total = 0, sum(info.nbytes for info in opened.arrays.values())

    def make(name: str, piece: _Piece) -> np.ndarray[Any, Any]:
        nonlocal done
        array = arrays.take(piece)
        done += array.nbytes
        progress(name, done, total)
        return array

    for shard in shards:
        for name in shard.tensors:
            piece = pieces[name]
            info = opened.arrays[piece.array]
            shape = info.shape if piece.row is None else info.shape[1:]
            yield name, TensorSource(info.stored_dtype, shape, partial(make, name, piece))


class _Arrays:
    """Restored arrays, each kept from its first use to its last."""

    def __init__(self, opened: ConvertedFolder, uses: Counter[str]) -> None:
        self._opened, self._uses = opened, uses
        self._held: dict[str, np.ndarray[Any, Any]] = {}

    def take(self, piece: _Piece) -> np.ndarray[Any, Any]:
        name = piece.array
        if name not in self._held:
            self._held[name] = self._opened.read(name)
        self._uses[name] -= 1
        array = self._held[name] if self._uses[name] else self._held.pop(name)
        return array if piece.row is None else array[piece.row]
