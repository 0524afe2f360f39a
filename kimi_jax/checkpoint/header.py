"""The header of one safetensors file: parsed, and every claim in it checked before a byte of data is trusted.

Layout of a file: 8 bytes little-endian header length, that many bytes of JSON, then the data of all tensors without
holes. Source: the format section of the safetensors documentation; the checks go beyond those of the official reader.
"""

import math
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kimi_jax.checkpoint.strict_json import limited, parse_json, printable, shown
from kimi_jax.problems import ProblemsError

MAX_HEADER_BYTES = 100_000_000  # the limit of the official reader
MAX_RANK = 32  # what every numpy allows
_MAX_SIZE = 2**63 - 1

PACKED_FP4 = "F4"
DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        PACKED_FP4: np.uint8,  # two values a byte: the last dimension is halved
    }.items()
}
_REFUSED_DTYPES = ("F6_E2M3", "F6_E3M2", "C64")  # in the format, in no Kimi checkpoint
_FIELDS = frozenset(("dtype", "shape", "data_offsets"))


class CheckpointError(ProblemsError):
    """A checkpoint that cannot be opened, read or written; lists every problem that was found."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies and what it is.

    Attributes:
      name: its name in the checkpoint.
      file: name of the shard that holds it, without folder.
      dtype: of the array that reading returns.
      shape: of the array that reading returns; for F4 the packed shape, last dimension halved.
      nbytes: bytes in the file, equal to the bytes of the array.
      stored_dtype: the file's own name of the element type, a key of ``DTYPES``.
      offset: of its first byte from the start of the file.
    """

    name: str
    file: str
    dtype: np.dtype
    shape: tuple[int, ...]
    nbytes: int
    stored_dtype: str
    offset: int


@dataclass(frozen=True)
class Header:
    """What one file holds. ``file_bytes`` is the size of the whole file, ``metadata`` its free text."""

    file: str
    file_bytes: int
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]


def read_header(path: str | os.PathLike[str]) -> Header:
    """Parses and checks the header of the safetensors file at ``path``; reads no tensor data.

    Raises:
      CheckpointError: names the file, the tensor and the numbers of every problem.
    """
    path = Path(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise _error(path, [f"{path.name}: is not a regular file"])
        with path.open("rb") as file:
            return _parse(path, file, os.fstat(file.fileno()).st_size)
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _error(path, [f"{path.name}: cannot be read: {reason}"]) from error


def _error(path: Path, problems: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"{path} is not a usable safetensors file", limited(problems))


def _parse(path: Path, file: Any, file_bytes: int) -> Header:
    name = path.name
    prefix = file.read(8)
    if len(prefix) < 8:
        raise _error(path, [f"{name}: has {len(prefix)} bytes, a safetensors file has at least 8"])
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        pointer = "; it looks like a Git LFS pointer: run `git lfs pull`" if prefix == b"version " else ""
        raise _error(path, [f"{name}: header of {length:,} bytes, the limit is {MAX_HEADER_BYTES:,}{pointer}"])
    start = 8 + length
    if start > file_bytes:
        raise _error(
            path,
            [f"{name}: is truncated: its header alone needs {start:,} bytes, the file has {file_bytes:,}"],
        )
    raw = file.read(length)
    if not raw.startswith(b"{"):
        raise _error(path, [f"{name}: the header does not start with '{{'"])
    members, problems = parse_json(raw)
    if not isinstance(members, dict):
        raise _error(path, [f"{name}: the header {problem}" for problem in problems])

    metadata = members.pop("__metadata__", {})
    complete = not problems  # a repeated key hides a tensor, whose bytes would then show as a hole
    problems = [f"the header {problem}" for problem in problems]
    problems += _metadata_problems(metadata)
    tensors: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for tensor, entry in members.items():
        wrong, span, info = _check_entry(name, tensor, entry, start)
        problems += [f"tensor {shown(tensor)}: {problem}" for problem in wrong]
        if span is not None:
            spans.append((*span, tensor))
        if info is not None:
            tensors[tensor] = info
    if complete and len(spans) == len(members):
        problems += _range_problems(spans, start, file_bytes)
    if problems:
        raise _error(path, [f"{name}: {problem}" for problem in problems])
    return Header(name, file_bytes, metadata, tensors)


def _metadata_problems(metadata: Any) -> list[str]:
    if type(metadata) is not dict:
        return [f"__metadata__ must be an object of strings, found {shown(metadata)}"]
    return [
        f"__metadata__ must map strings to strings, found {shown(key)}: {shown(value)}"
        for key, value in metadata.items()
        if type(value) is not str
    ]


def _check_entry(
    file: str, name: str, entry: Any, start: int
) -> tuple[list[str], tuple[int, int] | None, TensorInfo | None]:
    """Problems of one entry, its byte range if that is well formed, and the tensor if nothing is wrong."""
    if type(entry) is not dict:
        return [f"must be an object with dtype, shape and data_offsets, found {shown(entry)}"], None, None
    if entry.keys() != _FIELDS:
        problems = [f"has no {field}" for field in sorted(_FIELDS - entry.keys())]
        problems += [f"has the unknown field {shown(field)}" for field in sorted(entry.keys() - _FIELDS)]
        return problems, None, None
    problems = [] if printable(name) else ["its name holds half a surrogate pair, which is not UTF-8"]
    stored, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]

    dtype = DTYPES.get(stored) if type(stored) is str else None
    if dtype is None:
        known = "is not supported" if stored in _REFUSED_DTYPES else "is unknown"
        problems.append(f"dtype {shown(stored)} {known}; known are {' '.join(DTYPES)}")

    sizes = _sizes(shape)
    if sizes is None:
        problems.append(f"shape must be a list of at most {MAX_RANK} sizes of 0 or more, found {shown(shape)}")
    elif stored == PACKED_FP4:
        if not sizes or sizes[-1] % 2:
            problems.append(f"F4 packs two values a byte, so the last size of {list(sizes)} must be even")
            sizes = None
        else:
            sizes = (*sizes[:-1], sizes[-1] // 2)

    span = _span(offsets)
    if span is None:
        problems.append(f"data_offsets must be [begin, end] with 0 <= begin <= end, found {shown(offsets)}")
    if dtype is None or sizes is None:
        return problems, span, None

    nbytes = math.prod(sizes) * dtype.itemsize
    # numpy cannot shape an empty array either when its other sizes overflow
    if math.prod(size or 1 for size in sizes) * dtype.itemsize > _MAX_SIZE:
        problems.append(f"shape {shown(shape)} overflows: more than 2**63 bytes")
    elif span is not None and span[1] - span[0] != nbytes:
        problems.append(
            f"{stored} {shown(shape)} takes {nbytes:,} bytes, data_offsets {list(span)} hold {span[1] - span[0]:,}"
        )
    if problems or span is None:
        return problems, span, None
    return problems, span, TensorInfo(name, file, dtype, sizes, nbytes, stored, start + span[0])


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A JSON list of sizes as a tuple; None when it is anything else. ``true`` is not a size."""
    if type(value) is not list or len(value) > MAX_RANK:
        return None
    for size in value:
        if type(size) is not int or not 0 <= size <= _MAX_SIZE:
            return None
    return tuple(value)


def _span(value: Any) -> tuple[int, int] | None:
    """A JSON ``[begin, end]`` in order, or None."""
    sizes = _sizes(value)
    if sizes is None or len(sizes) != 2 or sizes[0] > sizes[1]:
        return None
    return sizes[0], sizes[1]


def _range_problems(spans: list[tuple[int, int, str]], start: int, file_bytes: int) -> list[str]:
    """Overlaps, holes, missing and left-over bytes of ranges ``(begin, end, name)`` that follow byte ``start``."""
    problems = []
    covered, last = 0, ""
    for begin, end, name in sorted(spans):
        if begin > covered:
            problems.append(f"data bytes {covered} to {begin} belong to no tensor; {shown(name)} follows them")
        elif begin < covered:
            problems.append(f"tensor {shown(name)}: data bytes {begin} to {end} overlap those of {shown(last)}")
        if end >= covered:
            covered, last = end, name
    present = file_bytes - start
    if covered > present:
        cut = sum(end > present for _, end, _ in spans)
        problems.append(
            f"is truncated: expected {start + covered:,} bytes, found {file_bytes:,}; "
            f"{cut:,} of {len(spans):,} tensors are cut or missing, the last one is {shown(last)}"
        )
    elif covered < present:
        problems.append(
            f"has data after the last tensor {shown(last)}: expected {start + covered:,} bytes, found {file_bytes:,}"
        )
    return problems
