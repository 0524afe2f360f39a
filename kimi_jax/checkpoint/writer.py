"""Writes a checkpoint the way the release is laid out: shards of safetensors and an index.

Nothing appears under its final name before every byte of every file is on disk, and the index appears last.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kimi_jax.checkpoint.header import DTYPES, MAX_HEADER_BYTES, PACKED_FP4, CheckpointError
from kimi_jax.checkpoint.index import INDEX_NAME, is_shard_name
from kimi_jax.checkpoint.reader import SINGLE_NAME
from kimi_jax.checkpoint.strict_json import limited, printable, shown

MAX_SHARD_BYTES = 5_000_000_000
_STORED = {dtype: stored for stored, dtype in DTYPES.items() if stored != PACKED_FP4}


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write that is made only when its turn comes.

    Attributes:
      stored_dtype: a key of ``DTYPES``; "F4" for bytes that hold two values each.
      shape: of the array that ``make`` returns; for F4 the packed shape.
      make: returns the array. It is dropped as soon as it is written.
    """

    stored_dtype: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    def __post_init__(self) -> None:
        if self.stored_dtype not in DTYPES:
            raise CheckpointError(
                "Not a dtype of safetensors", [shown(self.stored_dtype)], f"Known: {' '.join(DTYPES)}"
            )
        if self.stored_dtype == PACKED_FP4 and not self.shape:
            raise CheckpointError("Not a shape of packed F4", ["a scalar has no last dimension to pack"])

    @property
    def dtype(self) -> np.dtype:
        """Of the array that ``make`` returns."""
        return DTYPES[self.stored_dtype]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize


Tensors = Mapping[str, np.ndarray | TensorSource] | Iterable[tuple[str, np.ndarray | TensorSource]]


def write_checkpoint(
    folder: str | os.PathLike[str],
    tensors: Tensors,
    *,
    weight_map: Mapping[str, str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Writes ``tensors`` into ``folder``, in the order given; the same input always gives the same bytes.

    Names, shapes and dtypes are taken first, then one tensor at a time is made and written: when all items are
    ``TensorSource``, memory is that of the largest tensor.

    Args:
      folder: made when missing; must not hold a checkpoint yet.
      tensors: name and array, or name and ``TensorSource``; a mapping or pairs.
      weight_map: shard name of every tensor. None fills shards of ``max_shard_bytes`` in order: one shard is
        ``model.safetensors`` without an index, several are ``model-00001-of-0000N.safetensors`` with one.
      max_shard_bytes: of tensor data in a shard; a larger tensor gets a shard of its own.
      metadata: free text for every header; None is ``{"format": "pt"}``, which other loaders ask for.

    Returns:
      Paths of the files, the index last.

    Raises:
      CheckpointError: lists everything that is wrong with the tensors before a byte is written, or says which file
        could not be written. No file of this call is left behind then.
    """
    folder = Path(folder)
    sources, problems = _sources(tensors)
    if weight_map is None:
        shard_of = _fill(sources, max_shard_bytes)
    else:
        shard_of = {name: weight_map[name] for name in sources if name in weight_map}
        problems += _weight_map_problems(weight_map, sources)
    shards: dict[str, dict[str, TensorSource]] = {}
    for name, file in shard_of.items():
        shards.setdefault(file, {})[name] = sources[name]

    text = {"format": "pt"} if metadata is None else dict(metadata)
    if not all(isinstance(part, str) and printable(part) for pair in text.items() for part in pair):
        problems.append(f"metadata must map strings to strings, found {shown(text)}")
    else:
        problems += [
            f"{file}: a header of {size:,} bytes, the limit is {MAX_HEADER_BYTES:,}; use more shards"
            for file, members in shards.items()
            if (size := len(_header_bytes(members, text)) - 8) > MAX_HEADER_BYTES
        ]
    problems += _folder_problems(folder)
    if problems:
        raise CheckpointError(f"Checkpoint {folder} cannot be written", limited(problems))

    files: dict[str, Callable[[BinaryIO], None]] = {
        file: lambda out, members=members: _write_shard(out, members, text) for file, members in shards.items()
    }
    if weight_map is not None or len(shards) > 1:
        total = sum(source.nbytes for source in sources.values())
        index = {"metadata": {"total_size": total}, "weight_map": shard_of}
        files[INDEX_NAME] = lambda out: _write_json(out, index)
    return _publish(folder, files)


def _sources(tensors: Tensors) -> tuple[dict[str, TensorSource], list[str]]:
    """Every tensor as a source, in order, and what cannot be written."""
    sources: dict[str, TensorSource] = {}
    problems = []
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if name in sources:
            problems.append(f"tensor {shown(name)} is given twice")
        elif not isinstance(name, str) or name == "__metadata__" or not printable(name):
            problems.append(f"{shown(name)} cannot be the name of a tensor")
        elif isinstance(tensor, TensorSource):
            sources[name] = tensor
        elif tensor.dtype in _STORED:
            sources[name] = TensorSource(_STORED[tensor.dtype], tensor.shape, lambda tensor=tensor: tensor)
        else:
            problems.append(
                f"tensor {shown(name)}: {tensor.dtype} cannot be stored as it is; cast it, or pack it and pass a "
                "TensorSource"
            )
    if not sources and not problems:
        problems = ["there are no tensors"]
    return sources, problems


def _fill(sources: Mapping[str, TensorSource], max_shard_bytes: int) -> dict[str, str]:
    """The shard of every tensor: shards are filled in order, and named when their number is known."""
    numbers: dict[str, int] = {}
    number, used = 1, 0
    for name, source in sources.items():
        if used and used + source.nbytes > max_shard_bytes:
            number, used = number + 1, 0
        used += source.nbytes
        numbers[name] = number
    if number == 1:
        return dict.fromkeys(sources, SINGLE_NAME)
    return {name: f"model-{shard:05d}-of-{number:05d}.safetensors" for name, shard in numbers.items()}


def _weight_map_problems(weight_map: Mapping[str, str], sources: Mapping[str, TensorSource]) -> list[str]:
    problems = [f"tensor {shown(name)} is not in the weight_map" for name in sources if name not in weight_map]
    problems += [
        f"the weight_map places tensor {shown(name)}, which is not given" for name in weight_map if name not in sources
    ]
    return problems + [
        f"{shown(file)} is not a plain file name *.safetensors"
        for file in dict.fromkeys(weight_map.values())
        if not is_shard_name(file)
    ]


def _folder_problems(folder: Path) -> list[str]:
    """Shards of two checkpoints must never mix, so a folder that holds one is refused."""
    try:
        present = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"the folder cannot be used: {error.strerror}"]
    present = [name for name in present if name.endswith(".safetensors") or name == INDEX_NAME]
    return [f"the folder already holds {shown(name)}; remove it or choose another folder" for name in present]


def _header_bytes(members: Mapping[str, TensorSource], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON, padded with spaces so that the data starts at a multiple of 8: as the official writer does."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    begin = 0
    for name, source in members.items():
        shape = [int(size) for size in source.shape]
        if source.stored_dtype == PACKED_FP4:
            shape[-1] *= 2
        header[name] = {"dtype": source.stored_dtype, "shape": shape, "data_offsets": [begin, begin + source.nbytes]}
        begin += source.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_shard(out: BinaryIO, members: Mapping[str, TensorSource], metadata: Mapping[str, str]) -> None:
    out.write(_header_bytes(members, metadata))
    for name, source in members.items():
        _write_tensor(out, name, source)


def _write_tensor(out: BinaryIO, name: str, source: TensorSource) -> None:
    array = np.asarray(source.make())
    if array.shape != tuple(source.shape) or array.dtype != source.dtype:
        raise CheckpointError(
            f"Tensor {shown(name)} is not what its source said",
            [f"expected {source.dtype} {list(source.shape)}, made {array.dtype} {list(array.shape)}"],
        )
    out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _write_json(out: BinaryIO, value: object) -> None:
    out.write(json.dumps(value, ensure_ascii=False, indent=2).encode("utf-8") + b"\n")


def _publish(folder: Path, files: Mapping[str, Callable[[BinaryIO], None]]) -> list[Path]:
    """Writes every file under a temporary name that no reader looks at, then renames all in order."""
    partial = {file: folder / f".{file}.partial" for file in files}
    published: list[Path] = []
    file = next(iter(files))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, write in files.items():
            with partial[file].open("wb") as out:
                write(out)
                out.flush()
                os.fsync(out.fileno())
        for file in files:
            os.replace(partial[file], folder / file)
            published.append(folder / file)
    except BaseException as error:
        for path in (*partial.values(), *published):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise CheckpointError(f"Checkpoint {folder} cannot be written", [f"{file}: {reason}"]) from error
        raise
    return published
