"""A converted checkpoint: every tensor of a released one, stacked as the model has it, in orbax folders.

    kimi_jax.json       format version; every array with its dtype, shape and part; size and CRC-32 of every file below
    config.json ...     the other files of the source, unchanged
    arrays/0000/ ...    orbax folders ("parts"), each with the next arrays in order
    source/             the source's index and the order of its shards, from which `export` makes the same files again

Parameters carry their dotted path and are stored as the release stores them: experts stacked along a new first
dimension, MXFP4 bytes packed, padded ``A_log`` whole. Tensors that the text model does not read keep their own names.
"""

import os
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from kimi_jax.checkpoint.header import DTYPES, CheckpointError, TensorInfo
from kimi_jax.checkpoint.strict_json import limited, parse_json, shown
from kimi_jax.checkpoint.whole import MARKER

FORMAT = 1
"""Raised whenever an older reader would misread the folder."""

ARRAYS, SOURCE = "arrays", "source"
_FILE = re.compile(rf"(?:{ARRAYS}/\d+|{SOURCE})(?:/[\w.-]+)+")
_PART = re.compile(rf"{ARRAYS}/\d+")
_BLOCK = 1 << 22


def is_converted(folder: Path) -> bool:
    """Whether ``folder`` says that it is a converted checkpoint."""
    return os.path.lexists(folder / MARKER)


def checksum(path: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file."""
    size, value = 0, 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            size, value = size + len(block), zlib.crc32(block, value)
    return size, value


class ConvertedFolder:
    """An open converted checkpoint. Holds no files open.

    Attributes:
      path: the folder.
      arrays: what is stored, by name, in order; ``file`` is the part, relative to the folder.
    """

    def __init__(self, path: Path, arrays: Mapping[str, TensorInfo], files: Mapping[str, tuple[int, int]]) -> None:
        self.path, self.arrays = path, arrays
        self._files = files
        self._sound: set[str] = set()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Reads and checks ``kimi_jax.json``, and that every file is there with its size; reads no array.

        Raises:
          CheckpointError: lists everything that is missing, truncated or not understood.
        """
        path = Path(path)
        title = f"Checkpoint {path} cannot be opened"
        try:
            value, problems = parse_json((path / MARKER).read_bytes())
        except OSError as error:
            raise CheckpointError(title, [f"{MARKER}: cannot be read: {error.strerror}"]) from error
        if not problems and (not isinstance(value, dict) or type(value.get("format")) is not int):
            problems = ["names no format version"]
        if problems:
            raise CheckpointError(title, [f"{MARKER}: {problem}" for problem in problems])
        if value["format"] != FORMAT:
            found = f"{MARKER}: has format version {value['format']}; this kimi_jax reads version {FORMAT}"
            raise CheckpointError(title, [found], "Convert the released checkpoint again.")
        arrays, problems = _read_arrays(value.get("arrays"))
        files, wrong = _read_files(value.get("files"))
        problems += wrong
        parts = {"/".join(file.split("/")[:2]) for file in files}
        lost = {info.file for info in arrays.values()} - parts
        problems += [f"{MARKER}: names no file of {part}" for part in sorted(lost)]
        problems += _size_problems(path, files)
        if problems:
            raise CheckpointError(title, limited(problems))
        return cls(path, arrays, files)

    def verify(self, folder: str) -> None:
        """Compares the checksums of all files under ``folder``, once.

        Raises:
          CheckpointError: names the files that changed since they were written.
        """
        if folder in self._sound:
            return
        problems = []
        for file, expected in self._files.items():
            if not file.startswith(f"{folder}/"):
                continue
            try:
                if checksum(self.path / file) != expected:
                    problems.append(f"{file}: its contents changed since it was written (CRC-32 differs)")
            except OSError as error:
                problems.append(f"{file}: cannot be read: {error.strerror}")
        if problems:
            raise CheckpointError(f"Checkpoint {self.path} is damaged", limited(problems), "Copy or convert it again.")
        self._sound.add(folder)

    def restore(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        """Reads arrays of one part; ``targets`` maps names to ``parts.Target``.

        Raises:
          CheckpointError: a file changed, or orbax cannot read an array.
        """
        from kimi_jax.checkpoint import parts

        (part,) = {self.arrays[name].file for name in targets}
        self.verify(part)
        return parts.restore(self.path / part, targets)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """One array whole on the host, read-only, in its stored dtype."""
        return self.read_together([name])[name]

    def read_together(self, names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
        """The same for some arrays of one part."""
        from kimi_jax.checkpoint.parts import Target

        arrays = self.restore({name: Target(self.arrays[name].shape, self.arrays[name].dtype) for name in names})
        for array in arrays.values():
            array.flags.writeable = False
        return arrays


def array_entry(info: TensorInfo) -> dict[str, Any]:
    """How ``kimi_jax.json`` describes an array."""
    return {"dtype": info.stored_dtype, "shape": list(info.shape), "part": info.file}


def array_info(name: str, stored_dtype: str, shape: Iterable[int], part: str) -> TensorInfo:
    """An array of a part as the record that `names.check` reads."""
    shape, dtype = tuple(shape), DTYPES[stored_dtype]
    return TensorInfo(name, part, dtype, shape, int(np.prod(shape, dtype=object)) * dtype.itemsize, stored_dtype, 0)


def _read_arrays(value: Any) -> tuple[dict[str, TensorInfo], list[str]]:
    if not isinstance(value, dict) or not value:
        return {}, [f"{MARKER}: arrays must be an object of name to dtype, shape and part, found {shown(value)}"]
    arrays, problems = {}, []
    for name, entry in value.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "part"}:
            problems.append(f"{MARKER}: array {shown(name)} must have dtype, shape and part, found {shown(entry)}")
            continue
        stored, shape, part = entry["dtype"], entry["shape"], entry["part"]
        good = isinstance(stored, str) and stored in DTYPES
        good &= isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
        if good and isinstance(part, str) and _PART.fullmatch(part):
            arrays[name] = array_info(name, stored, shape, part)
        else:
            problems.append(f"{MARKER}: array {shown(name)} is not understood: {shown(entry)}")
    return arrays, problems


def _read_files(value: Any) -> tuple[dict[str, tuple[int, int]], list[str]]:
    if not isinstance(value, dict) or not value:
        return {}, [f"{MARKER}: files must be an object of path to size and CRC-32, found {shown(value)}"]
    files, problems = {}, []
    for file, entry in value.items():
        good = isinstance(entry, list) and len(entry) == 2 and all(type(number) is int for number in entry)
        if good and _FILE.fullmatch(file) and ".." not in file.split("/"):
            files[file] = (entry[0], entry[1])
        else:
            problems.append(f"{MARKER}: file {shown(file)} is not understood: {shown(entry)}")
    return files, problems


def _size_problems(path: Path, files: Mapping[str, tuple[int, int]]) -> list[str]:
    problems = []
    for file, (expected, _) in files.items():
        try:
            size = (path / file).stat().st_size
        except OSError as error:
            problems.append(f"{file}: cannot be read: {error.strerror}")
            continue
        if size != expected:
            problems.append(f"{file}: expected {expected:,} bytes, found {size:,}")
    return problems
