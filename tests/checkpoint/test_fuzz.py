"""Damaged headers and indexes: refused with a CheckpointError, or read exactly as the official reader does."""

import json
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from kimi_jax.checkpoint.header import DTYPES, CheckpointError
from kimi_jax.checkpoint.reader import CheckpointFolder

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]},
    "c": {"dtype": "F4", "shape": [2, 2], "data_offsets": [16, 18]},
    "d": {"dtype": "F32", "shape": [0, 5], "data_offsets": [18, 18]},
    "e": {"dtype": "F8_E8M0", "shape": [], "data_offsets": [18, 19]},
}
DATA = bytes(range(19))
TOKENS = [
    b"0",
    b"-",
    b"1",
    b"9" * 30,
    b"{",
    b"}",
    b"[",
    b"[" * 5000,
    b"]",
    b",",
    b'"',
    b":",
    b" ",
    b"\\",
    b"null",
    b"true",
]
TOKENS += [b"NaN", b"1e9", b"\\ud800", b"\xff", b"\0", b'"a"', b"../", b"U8", b"F4", b'"__metadata__":', b"[1,2,3]"]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, 2, 3, 4, 12, 16, 18, 19, -1, 2**31, 2**62, 2**63, 2**64, 10**30])
    | st.floats(allow_nan=True)
    | st.sampled_from([*DTYPES, "F6_E2M3", "a", "../x.safetensors", A, B]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abxy"), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def pack(text: bytes, data: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + data


@st.composite
def damaged(draw: st.DrawFn, original: bytes) -> bytes:
    """``original`` with bytes overwritten, cut, doubled or put in."""
    content = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        end = min(at + draw(st.integers(0, 12)), len(content))
        match draw(st.sampled_from(["byte", "token", "swap", "cut", "double"])):
            case "byte" if at < len(content):
                content[at] = draw(st.integers(0, 255))
            case "token":
                content[at:at] = draw(st.sampled_from(TOKENS))
            case "swap":
                content[at:end] = draw(st.sampled_from(TOKENS))
            case "cut":
                del content[at:end]
            case "double":
                content[at:at] = content[at:end]
    return bytes(content)


@st.composite
def replaced(draw: st.DrawFn, original: dict[str, object]) -> bytes:
    """``original`` as JSON with one value or key, at any depth, replaced by another."""
    value = json.loads(json.dumps(original))
    inside = value
    while True:
        key = draw(st.sampled_from([*inside] if isinstance(inside, dict) else range(len(inside))))
        if isinstance(inside[key], dict | list) and inside[key] and draw(st.booleans()):
            inside = inside[key]
            continue
        match draw(st.sampled_from(["value", "drop", "rename"])):
            case "drop":
                del inside[key]
            case "rename" if isinstance(inside, dict):
                inside[draw(st.sampled_from(["a", "b", "z", "", "é", "dtype", "__metadata__"]))] = inside.pop(key)
            case _:
                inside[key] = draw(json_values)
        return json.dumps(value).encode()


@st.composite
def damaged_files(draw: st.DrawFn) -> bytes:
    """A file whose bytes were damaged, whose header text was, or one value of the header."""
    text = json.dumps(HEADER).encode()
    match draw(st.sampled_from(["file", "text", "value"])):
        case "file":
            return draw(damaged(pack(text, DATA)))
        case "text":
            return pack(draw(damaged(text)), DATA)
        case _:
            return pack(draw(replaced(HEADER)), DATA)


fuzzing = settings(max_examples=400, deadline=timedelta(seconds=5))  # a hang is a failure


@fuzzing
@given(damaged_files())
def test_a_damaged_file(scratch, content):
    """Red: any check of the header that is taken out, if the official reader makes it too; any other exception."""
    assume(b"-0" not in content)  # we take -0 for 0, the official reader does not
    (scratch / "x").mkdir(exist_ok=True)
    (scratch / "x" / "model.safetensors").write_bytes(content)
    try:
        folder = CheckpointFolder.open(scratch / "x")
    except CheckpointError as error:
        assert error.problems
        return
    with folder:
        official = dict(deserialize(content))
        assert set(folder.names()) == official.keys()
        for name, tensor in official.items():
            info = folder.info(name)
            shape = list(info.shape)
            if info.stored_dtype == "F4":
                shape[-1] *= 2
            assert (info.stored_dtype, shape) == (tensor["dtype"], tensor["shape"])
            if info.stored_dtype != "BOOL":
                assert folder.read(name).tobytes() == bytes(tensor["data"])


@fuzzing
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 0, 0, 0, -2, -1, 1])), min_size=1, max_size=5),
    st.permutations(range(5)),
    st.sampled_from([0, 0, 0, -1, 1]),
)
def test_any_arrangement_of_ranges(scratch, parts, order, tail):
    """Tensors of ``parts`` = (bytes, gap before them) in any order of the header: holes and overlaps never open.

    Red: the check of holes, of overlaps, of the end of the file; ranges taken in the order of the header.
    """
    entries, end = [], 0
    for size, gap in parts:
        begin = max(0, end + gap)
        end = begin + size
        entries.append({"dtype": "U8", "shape": [size], "data_offsets": [begin, end]})
    header = {f"t{i}": entries[i] for i in order if i < len(entries)}
    content = pack(json.dumps(header).encode(), bytes(max(0, end + tail)))
    (scratch / "x").mkdir(exist_ok=True)
    (scratch / "x" / "model.safetensors").write_bytes(content)
    try:
        deserialize(content)
    except SafetensorError:
        with pytest.raises(CheckpointError):
            CheckpointFolder.open(scratch / "x")
    else:
        CheckpointFolder.open(scratch / "x").close()


@fuzzing
@given(st.binary(max_size=40) | st.binary(max_size=40).map(lambda text: pack(b"{" + text, b"")))
def test_noise(scratch, content):
    (scratch / "x").mkdir(exist_ok=True)
    (scratch / "x" / "model.safetensors").write_bytes(content)
    try:
        names = CheckpointFolder.open(scratch / "x").names()
    except CheckpointError:
        return
    assert set(names) == dict(deserialize(content)).keys()


def test_the_oracle_reads_what_we_read(scratch):
    """The undamaged file opens, so that the tests above do not pass by refusing everything."""
    content = pack(json.dumps(HEADER).encode(), DATA)
    (scratch / "x").mkdir(exist_ok=True)
    (scratch / "x" / "model.safetensors").write_bytes(content)
    with CheckpointFolder.open(scratch / "x") as folder:
        assert set(folder.names()) == dict(deserialize(content)).keys() == HEADER.keys() - {"__metadata__"}
    with pytest.raises(SafetensorError):
        deserialize(content[:-1])


weight_maps = st.dictionaries(
    st.sampled_from("aaabbbcd"),
    st.sampled_from([A, A, A, B, B, "../x.safetensors", "gone.safetensors", "", 3]),
    min_size=1,
)
INDEX_VALUE = {"metadata": {"total_size": 1}, "weight_map": {"a": A, "b": A, "c": B}}


def one_byte_each(**values: int) -> bytes:
    entries = {n: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, n in enumerate(values)}
    return pack(json.dumps(entries).encode(), bytes(values.values()))


@fuzzing
@given(
    damaged(json.dumps(INDEX_VALUE).encode())
    | replaced(INDEX_VALUE)
    | weight_maps.map(lambda placed: json.dumps({"weight_map": placed}).encode())
)
def test_a_damaged_index(scratch, content):
    """Red: a shard name that is not checked, a tensor of the index or of a shard that is passed over."""
    folder = scratch / "indexed"
    if not folder.exists():
        folder.mkdir()
        (folder / A).write_bytes(one_byte_each(a=1, b=2))
        (folder / B).write_bytes(one_byte_each(c=3, a=9))  # a second `a`, which only another index may choose
        (scratch / "x.safetensors").write_bytes(one_byte_each(a=66))  # outside
    (folder / INDEX).write_bytes(content)
    try:
        opened = CheckpointFolder.open(folder)
    except CheckpointError as error:
        assert error.problems
        return
    with opened:
        placed = json.loads(content)["weight_map"]
        assert opened.names() == tuple(placed)
        values = {("a", A): 1, ("b", A): 2, ("c", B): 3, ("a", B): 9}
        assert set(placed) == {name for name, file in values if file in placed.values()}
        for name, file in placed.items():
            assert opened.read(name) == [values[name, file]]
