"""A checkpoint folder: every shard's header checked on opening, tensors read as views of memory-mapped files.

The index decides which shard a tensor is read from; a second copy of it in another shard is never looked at.
"""

import gc
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Self

import numpy as np

from kimi_jax.checkpoint.header import CheckpointError, Header, TensorInfo, read_header
from kimi_jax.checkpoint.index import INDEX_NAME, Index, read_index
from kimi_jax.checkpoint.strict_json import MAX_LISTED, limited, shown

SINGLE_NAME = "model.safetensors"
_ONE_OF_MANY = re.compile(r"-(\d+)-of-(\d+)\.safetensors")


class ReadCounter:
    """How many bytes of tensors were asked for, in total and per file. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._per_file: dict[str, int] = {}

    def add(self, file: str, nbytes: int) -> None:
        """Counts ``nbytes`` asked for from ``file``."""
        with self._lock:
            self._per_file[file] = self._per_file.get(file, 0) + nbytes

    @property
    def total(self) -> int:
        """Bytes over all files."""
        return sum(self.per_file.values())

    @property
    def per_file(self) -> dict[str, int]:
        """Bytes per shard name; shards that were not read are absent."""
        with self._lock:
            return dict(self._per_file)


class CheckpointFolder:
    """An open checkpoint. Use it as a context manager, or call ``close``.

    Attributes:
      path: the folder.
      requested: counts the bytes of every slice that ``read`` returned.
    """

    def __init__(self, path: Path, headers: Mapping[str, Header], tensors: Mapping[str, TensorInfo]) -> None:
        self.path = path
        self.requested = ReadCounter()
        self._headers = headers
        self._tensors = tensors
        self._lock = Lock()
        self._maps: dict[str, mmap.mmap] = {}
        self._closed = False

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Opens the checkpoint in folder ``path``: parses its index and all headers, reads no tensor data.

        Without an index the folder must hold ``model.safetensors`` or exactly one ``*.safetensors``.

        Raises:
          CheckpointError: lists all problems of the index and of every shard.
        """
        with _collector_paused():
            return cls._open(Path(path))

    @classmethod
    def _open(cls, path: Path) -> Self:
        try:
            index, files, problems = _listing(path)
        except OSError as error:
            raise CheckpointError(f"Checkpoint {path} cannot be opened", [str(error)]) from error
        headers: dict[str, Header] = {}
        for file in files:
            try:
                headers[file] = read_header(path / file)
            except CheckpointError as error:
                problems += error.problems
        if index is None:
            tensors = {name: info for header in headers.values() for name, info in header.tensors.items()}
        else:
            tensors, misplaced = _place(index, headers)
            problems += misplaced
            if not problems:
                problems += _total_problems(index, tensors.values())
        if problems:
            raise CheckpointError(f"Checkpoint {path} cannot be opened", problems)
        return cls(path, headers, tensors)

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the order of the index, or of the file when there is no index."""
        return tuple(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Where tensor ``name`` lies and what it is.

        Raises:
          CheckpointError: when there is no such tensor; names the one whose name starts most like it.
        """
        try:
            return self._tensors[name]
        except KeyError:
            alike = os.path.commonprefix  # character by character is what is meant
            nearest = max(self._tensors, key=lambda other: len(alike((other, name))), default=None)
            hint = f"The nearest name is {shown(nearest)}." if nearest is not None else ""
            raise CheckpointError(f"{self.path} has no such tensor", [shown(name)], hint) from None

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Tensor ``name``, or the part of it that ``index`` selects, as a read-only view of the mapped file.

        Nothing is copied, so the data need not be aligned to the element size. Counted in ``requested``.

        Args:
          name: a tensor of ``names()``.
          index: one slice a dimension, without steps and within the shape; None is everything.

        Returns:
          Array of ``info(name).dtype``; F4 stays packed, two values in a uint8.

        Raises:
          CheckpointError: unknown name, an index that does not fit, a file that changed since opening.
        """
        info = self.info(name)
        if index is not None:
            _check_index(info, index)
        array = self._array(info)
        if index is not None:
            array = array[index]
        if info.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
            raise CheckpointError(f"Cannot read {shown(name)}", [f"{info.file}: a BOOL is neither 0 nor 1"])
        self.requested.add(info.file, array.nbytes)
        return array

    def close(self) -> None:
        """Lets go of all files. Arrays that were read stay valid; a file is freed with the last array that views it."""
        with self._lock:
            self._closed = True
            while self._maps:
                _, mapped = self._maps.popitem()
                with suppress(BufferError):  # arrays still view it and keep it
                    mapped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _array(self, info: TensorInfo) -> np.ndarray:
        with self._lock:  # held until the array keeps the mapping alive
            if self._closed:
                raise CheckpointError(f"Cannot read {shown(info.name)}", [f"the checkpoint {self.path} is closed"])
            mapped = self._maps.get(info.file)
            if mapped is None:
                mapped = self._maps[info.file] = self._map(self._headers[info.file])
            array = np.frombuffer(mapped, info.dtype, info.nbytes // info.dtype.itemsize, info.offset)
        return array.reshape(info.shape)

    def _map(self, header: Header) -> mmap.mmap:
        try:
            with (self.path / header.file).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size == header.file_bytes:
                    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoint {self.path} cannot be read", [f"{header.file}: {error.strerror}"]
            ) from error
        raise CheckpointError(
            f"Checkpoint {self.path} cannot be read",
            [f"{header.file}: changed since it was opened, from {header.file_bytes:,} to {size:,} bytes"],
        )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection: half a million records without cycles would be walked over and over (7 s become 4)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _listing(path: Path) -> tuple[Index | None, list[str], list[str]]:
    """The index of the folder if it has one, the shards to open, and what is wrong with the index."""
    if not path.is_dir():
        hint = "Give the folder that holds the file." if path.exists() else ""
        raise CheckpointError(f"Checkpoint {path} cannot be opened", ["it is not a folder"], hint)
    if not os.path.lexists(path / INDEX_NAME):
        return None, [_only_shard(path)], []
    index, problems = read_index(path / INDEX_NAME)
    return index, sorted(set(index.weight_map.values())), problems


def _only_shard(path: Path) -> str:
    """The file to read in a folder without an index."""
    files = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(".safetensors"))
    file = SINGLE_NAME if SINGLE_NAME in files else files[0] if len(files) == 1 else None
    title, hint = f"Checkpoint {path} cannot be opened", f"Add the {INDEX_NAME} that belongs to it."
    if not files:
        raise CheckpointError(title, [f"the folder holds neither {INDEX_NAME} nor a *.safetensors file"])
    if file is None:
        listed = ", ".join(shown(name) for name in files[:MAX_LISTED])
        raise CheckpointError(title, [f"{len(files)} safetensors files and no index: {listed}"], hint)
    shard = _ONE_OF_MANY.search(file)
    if shard is not None and int(shard[2]) > 1:
        raise CheckpointError(title, [f"{shown(file)} is one of {shard[2]} shards and there is no index"], hint)
    return file


def _check_index(info: TensorInfo, index: tuple[slice, ...]) -> None:
    """Refuses what numpy would clamp, reverse or broadcast in silence."""
    title = f"Cannot read {shown(info.name)} of shape {list(info.shape)}"
    if len(index) != len(info.shape):
        raise CheckpointError(title, [f"{len(index)} slices for {len(info.shape)} dimensions"])
    problems = []
    for dim, (size, part) in enumerate(zip(info.shape, index, strict=True)):
        if not isinstance(part, slice):
            problems.append(f"dimension {dim}: {part!r} is not a slice")
            continue
        begin, end = part.start or 0, size if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= begin <= end <= size:
            problems.append(f"dimension {dim}: {part} is not a part of 0:{size} without steps")
    if problems:
        raise CheckpointError(title, problems)


def _place(index: Index, headers: Mapping[str, Header]) -> tuple[dict[str, TensorInfo], list[str]]:
    """Takes every tensor from the shard that the index names; shards that did not open are passed over."""
    tensors: dict[str, TensorInfo] = {}
    lacking: list[str] = []
    for name, file in index.weight_map.items():
        header = headers.get(file)
        if header is None:
            continue
        info = header.tensors.get(name)
        if info is None:
            lacking.append(name)
        else:
            tensors[name] = info

    def lack(name: str) -> str:
        others = [shown(file) for file, header in headers.items() if name in header.tensors]
        found = f", but {', '.join(others)} does" if others else ""
        return f"{index.weight_map[name]}: does not hold tensor {shown(name)}{found}"

    problems = limited([*map(lack, lacking[:MAX_LISTED]), *lacking[MAX_LISTED:]])  # only what is shown is searched for
    for file, header in headers.items():
        extra = header.tensors.keys() - index.weight_map.keys() - index.refused
        problems += limited(
            [f"{file}: holds tensor {shown(name)}, which the index does not name" for name in sorted(extra)]
        )
    return tensors, problems


def _total_problems(index: Index, tensors: Iterable[TensorInfo]) -> list[str]:
    """A total above what is there means that tensors were lost together with their index entries.

    A total below it loses nothing, every tensor is checked by itself, and converters are known to write one.
    """
    present = sum(info.nbytes for info in tensors)
    if index.total_bytes is None or index.total_bytes <= present:
        return []
    return [f"{INDEX_NAME}: total_size says {index.total_bytes:,} bytes of tensors, the shards hold {present:,}"]
