"""Headers written by hand from the format's description, good and bad."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kimi_jax.checkpoint.header import DTYPES, CheckpointError, read_header

GOOD = (
    b"\x6d\x00\x00\x00\x00\x00\x00\x00"
    b'{"a":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]},'
    b'"b":{"dtype":"U8","shape":[3],"data_offsets":[4,7]}}'
    b"\x80\x3f\x00\xc0"  # 1.0, -2.0
    b"\x01\x02\x03"
)
TWICE = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}'


def pack(header: object, data: bytes = b"") -> bytes:
    """A file with this header, given as JSON text or as the value to write, and this data."""
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object, shape: object, *offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def refused(tmp_path: Path, content: bytes) -> tuple[str, ...]:
    """The problems of a file with these bytes; every one must name the file."""
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(tmp_path / "x.safetensors")
    assert all(problem.startswith(("x.safetensors: ", "... and")) for problem in caught.value.problems)
    return caught.value.problems


def test_a_file_written_by_hand(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(GOOD)
    header = read_header(tmp_path / "x.safetensors")
    a, b = header.tensors["a"], header.tensors["b"]
    assert list(header.tensors) == ["a", "b"]
    assert (a.dtype, a.shape, a.nbytes, a.stored_dtype, a.offset) == (ml_dtypes.bfloat16, (2, 1), 4, "BF16", 117)
    assert (b.file, b.dtype, b.shape, b.offset) == ("x.safetensors", np.uint8, (3,), 121)  # red: offset without `start`
    assert header.file_bytes == len(GOOD)


def test_padding_metadata_scalars_and_empty_tensors(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "none": entry("F32", [0, 7], 4, 4),
        "one": entry("F32", [], 0, 4),
        "end": entry("I8", [0], 4, 4),
    }
    (tmp_path / "x.safetensors").write_bytes(pack(json.dumps(header) + "  \n ", b"\x00\x00\x80\x3f"))
    read = read_header(tmp_path / "x.safetensors")
    assert read.metadata == {"format": "pt"}
    assert "__metadata__" not in read.tensors  # red: get instead of pop
    assert [(read.tensors[name].shape, read.tensors[name].nbytes) for name in ("none", "one")] == [((0, 7), 0), ((), 4)]


def test_no_tensors_is_a_file(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(pack("{}"))
    assert not read_header(tmp_path / "x.safetensors").tensors


@pytest.mark.parametrize("stored", [name for name in DTYPES if name != "F4"])
def test_every_dtype_has_its_size(tmp_path, stored):
    bits = {"BOOL": 8, "BF16": 16}.get(stored) or int(stored.split("_")[0][1:])  # red: a wrong row in DTYPES
    (tmp_path / "x.safetensors").write_bytes(pack({"t": entry(stored, [3], 0, 3 * bits // 8)}, bytes(3 * bits // 8)))
    info = read_header(tmp_path / "x.safetensors").tensors["t"]
    assert info.dtype == DTYPES[stored]
    assert info.nbytes == 3 * bits // 8


def test_f4_is_packed(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(pack({"t": entry("F4", [3, 4], 0, 6)}, bytes(6)))
    info = read_header(tmp_path / "x.safetensors").tensors["t"]
    assert (info.dtype, info.shape, info.nbytes, info.stored_dtype) == (
        np.uint8,
        (3, 2),
        6,
        "F4",
    )  # red: first dim halved


MALFORMED = [
    (b"", "has 0 bytes, a safetensors file has at least 8"),
    (GOOD[:7], "has 7 bytes"),
    (pack("{}")[:9], "is truncated: its header alone needs 10 bytes, the file has 9"),
    (GOOD[:60], "is truncated: its header alone needs 117 bytes, the file has 60"),
    ((100_000_001).to_bytes(8, "little") + b"{}", "header of 100,000,001 bytes, the limit is 100,000,000"),
    (b"\xff" * 16, "header of 18,446,744,073,709,551,615 bytes"),
    (b"version https://git-lfs.github.com/spec/v1\n", "run `git lfs pull`"),
    (bytes(8), "does not start with '{'"),
    (pack(" {}"), "does not start with '{'"),
    (pack("[]"), "does not start with '{'"),
    (pack("\ufeff{}"), "does not start with '{'"),
    (pack(b'{"\xff":1}'), "is not UTF-8: invalid start byte at byte 2"),
    (pack("{}".encode("utf-16-le")), "is not usable JSON"),
    (pack('{"a":'), "is not usable JSON"),
    (pack("{} {}"), "is not usable JSON: Extra data"),
    (pack("{}\0\0"), "is not usable JSON: Extra data"),
    (pack('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), "nests too deeply"),
    (pack('{"a":' * 100_000 + "1" + "}" * 100_000), "nests too deeply"),
    (pack('{"a":' + "9" * 5000 + "}"), "is not usable JSON: Exceeds the limit"),
    (pack('{"a":NaN}'), "NaN is not allowed"),
    (pack('{"a":-Infinity}'), "-Infinity is not allowed"),
    (pack(TWICE, b"abcd"), "has the key 'a' twice"),
    (pack('{"a":{"dtype":"U8","dtype":"I8","shape":[2],"data_offsets":[0,2]}}', b"ab"), "has the key 'dtype' twice"),
    (pack({"__metadata__": []}), "__metadata__ must be an object of strings, found []"),
    (pack({"__metadata__": None}), "__metadata__ must be an object of strings, found None"),
    (pack({"__metadata__": {"step": 3}}), "__metadata__ must map strings to strings, found 'step': 3"),
    (pack({"a": []}), "tensor 'a': must be an object with dtype, shape and data_offsets, found []"),
    (pack({"a": {"dtype": "U8", "shape": [0]}}), "tensor 'a': has no data_offsets"),
    (pack({"a": entry("U8", [0], 0, 0) | {"strides": [1]}}), "tensor 'a': has the unknown field 'strides'"),
    (pack({"\ud800": entry("U8", [0], 0, 0)}), "half a surrogate pair"),
    (pack({"a": entry("Q8", [0], 0, 0)}), "tensor 'a': dtype 'Q8' is unknown; known are BOOL U8"),
    (pack({"a": entry("f32", [0], 0, 0)}), "dtype 'f32' is unknown"),
    (pack({"a": entry(["F32"], [0], 0, 0)}), "dtype ['F32'] is unknown"),
    (pack({"a": entry(None, [0], 0, 0)}), "dtype None is unknown"),
    (pack({"a": entry("F6_E2M3", [4], 0, 3)}, b"abc"), "dtype 'F6_E2M3' is not supported"),
    (pack({"a": entry("F6_E3M2", [4], 0, 3)}, b"abc"), "dtype 'F6_E3M2' is not supported"),
    (pack({"a": entry("F4", [4, 3], 0, 6)}, bytes(6)), "the last size of [4, 3] must be even"),
    (pack({"a": entry("F4", [], 0, 1)}, b"a"), "the last size of [] must be even"),
    (pack({"a": entry("U8", 2, 0, 2)}, b"ab"), "shape must be a list of at most 32 sizes of 0 or more, found 2"),
    (
        pack({"a": entry("U8", [2.0], 0, 2)}, b"ab"),
        "shape must be a list of at most 32 sizes of 0 or more, found [2.0]",
    ),
    (pack({"a": entry("U8", [True], 0, 1)}, b"a"), "sizes of 0 or more, found [True]"),
    (pack({"a": entry("U8", [-1], 0, 0)}), "sizes of 0 or more, found [-1]"),
    (pack({"a": entry("U8", ["2"], 0, 2)}, b"ab"), "sizes of 0 or more, found ['2']"),
    (pack({"a": entry("U8", [1] * 33, 0, 1)}, b"a"), "at most 32 sizes"),
    (pack({"a": entry("U8", [2**63], 0, 1)}, b"a"), "sizes of 0 or more, found [9223372036854775808]"),
    (pack({"a": entry("U8", [2**32, 2**32], 0, 0)}), "overflows: more than 2**63 bytes"),
    (pack({"a": entry("F64", [2**61], 0, 0)}), "overflows: more than 2**63 bytes"),
    (pack({"a": entry("U8", [0, 2**62, 2**62], 0, 0)}), "overflows: more than 2**63 bytes"),
    (pack({"a": entry("F32", [2], 0, 4)}, bytes(4)), "tensor 'a': F32 [2] takes 8 bytes, data_offsets [0, 4] hold 4"),
    (pack({"a": entry("U8", [2], 0)}), "data_offsets must be [begin, end] with 0 <= begin <= end, found [0]"),
    (pack({"a": entry("U8", [0], 2, 0)}), "data_offsets must be [begin, end] with 0 <= begin <= end, found [2, 0]"),
    (pack({"a": entry("U8", [0], -2, -2)}), "found [-2, -2]"),
    (pack({"a": entry("U8", [1], False, True)}, b"a"), "found [False, True]"),
    (pack({"a": entry("U8", [2], 1, 3)}, b"abc"), "data bytes 0 to 1 belong to no tensor; 'a' follows them"),
    (
        pack({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 3, 5)}, b"abcde"),
        "data bytes 2 to 3 belong to no tensor; 'b' follows them",
    ),
    (
        pack({"a": entry("U8", [3], 0, 3), "b": entry("U8", [2], 2, 4)}, b"abcd"),
        "tensor 'b': data bytes 2 to 4 overlap those of 'a'",
    ),
    (
        pack({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2)}, b"ab"),
        "tensor 'b': data bytes 0 to 2 overlap those of 'a'",
    ),
    (pack({"a": entry("U8", [2], 0, 2)}, b"abc"), "has data after the last tensor 'a': expected 70 bytes, found 71"),
    (GOOD[:-1], "is truncated: expected 124 bytes, found 123; 1 of 2 tensors are cut or missing, the last one is 'b'"),
    (GOOD[:-6], "is truncated: expected 124 bytes, found 118; 2 of 2 tensors are cut or missing"),
]


@pytest.mark.parametrize(("content", "problem"), MALFORMED, ids=[problem for _, problem in MALFORMED])
def test_malformed(tmp_path, content, problem):
    problems = refused(tmp_path, content)
    assert len(problems) == 1  # red: each row when its check is taken out
    assert problem in problems[0]


def test_all_problems_at_once(tmp_path):
    header = {"a": entry("Q8", [2], 0, 2), "b": entry("U8", [-2], 2, 4), "c": entry("U8", [2], 3, 5)}
    problems = refused(tmp_path, pack(header, b"abcd"))
    for part in ("'a': dtype", "'b': shape", "'c': data bytes 3 to 5 overlap", "is truncated"):
        assert sum(part in problem for problem in problems) == 1  # red: raise at the first
    assert len(problems) == 4


def test_a_flood_of_problems_is_counted_not_printed(tmp_path):
    problems = refused(tmp_path, pack({f"t{i}": entry("Q8", [0], 0, 0) for i in range(3000)}))
    assert len(problems) == 51  # red: problems not limited
    assert problems[-1] == "... and 2,950 more like these"


def test_names_cannot_write_to_the_terminal(tmp_path):
    (problem,) = refused(tmp_path, pack({"\x1b[2J" + "n" * 5000: entry("Q8", [0], 0, 0)}))
    assert "\x1b" not in problem  # red: the name printed as it is
    assert len(problem) < 600


def test_not_a_regular_file(tmp_path):
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_header(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: cannot be read: No such file"):
        read_header(tmp_path / "gone.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "nul\0.safetensors")
