"""What is written: the same bytes as the official writer, in the released layout, whole or not at all."""

import errno
import json
import os
import resource
import subprocess
import sys
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import save_file

from kimi_jax.checkpoint.header import DTYPES, CheckpointError
from kimi_jax.checkpoint.reader import CheckpointFolder
from kimi_jax.checkpoint.writer import TensorSource, write_checkpoint

ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"


def one_of_each() -> dict[str, np.ndarray]:
    """Every dtype that the official writer takes from numpy, odd sizes, names that need escapes."""
    rng = np.random.default_rng(0)
    raw = {stored: rng.integers(0, 2, (3, 5 * dtype.itemsize), np.uint8) for stored, dtype in DTYPES.items()}
    arrays = {f"t.{stored}": raw[stored].view(DTYPES[stored]) for stored in DTYPES if stored != "F4"}
    arrays |= {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 4), ml_dtypes.bfloat16)}
    return arrays | {'quote " \\ \n \x01 é 漢 😀': np.arange(3, dtype=np.int64)}


def header_of(path: Path) -> dict[str, dict[str, object]]:
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def refused(folder: Path, tensors: object, **options: object) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(folder, tensors, **options)
    return caught.value.problems


def numbered(count: int) -> dict[str, np.ndarray]:
    """Tensors of 4 bytes each."""
    return {f"t{i}": np.full(4, i, np.uint8) for i in range(count)}


class TestBytes:
    @pytest.mark.parametrize("metadata", [None, {"format": "np"}, {}])
    def test_equal_to_the_official_writer(self, tmp_path, metadata):
        arrays = one_of_each()
        theirs = {"format": "pt"} if metadata is None else metadata or None
        save_file(arrays, tmp_path / "official.safetensors", metadata=theirs)
        order = [name for name in header_of(tmp_path / "official.safetensors") if name != "__metadata__"]
        (path,) = write_checkpoint(tmp_path / "ours", {name: arrays[name] for name in order}, metadata=metadata)
        assert path == tmp_path / "ours" / "model.safetensors"
        # red: no padding, ASCII escapes, spaces after separators
        assert path.read_bytes() == (tmp_path / "official.safetensors").read_bytes()

    def test_released_shards_are_reproduced(self, tmp_path, k3_tiny):
        weight_map = json.loads((k3_tiny / INDEX).read_text())["weight_map"]
        with CheckpointFolder.open(k3_tiny) as folder:
            infos = [folder.info(name) for name in folder.names()]
            tensors = [
                (info.name, TensorSource(info.stored_dtype, info.shape, lambda info=info: folder.read(info.name)))
                for info in infos
            ]
            paths = write_checkpoint(tmp_path, iter(tensors), weight_map=weight_map)
        assert [path.name for path in paths[-1:]] == [INDEX]
        for path in paths[:-1]:
            assert path.read_bytes() == (k3_tiny / path.name).read_bytes()  # red: tensors sorted by name
        assert json.loads(paths[-1].read_text()) == json.loads((k3_tiny / INDEX).read_text())

    def test_round_trip(self, tmp_path):
        arrays = one_of_each()
        write_checkpoint(tmp_path, arrays.items(), max_shard_bytes=64)
        with CheckpointFolder.open(tmp_path) as folder:
            assert folder.names() == tuple(arrays)
            for name, array in arrays.items():
                read = folder.read(name)
                assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes())

    def test_packed_f4(self, tmp_path):
        packed = np.array([[0x21, 0xF7], [0x00, 0x08]], np.uint8)
        (path,) = write_checkpoint(tmp_path, {"w": TensorSource("F4", (2, 2), lambda: packed)})
        (official,) = deserialize(path.read_bytes())
        assert official[1]["shape"] == [2, 4]  # red: packed shape in the header
        assert official[1]["dtype"] == "F4"
        with CheckpointFolder.open(tmp_path) as folder:
            assert folder.read("w").tolist() == packed.tolist()

    def test_a_view_that_is_not_contiguous(self, tmp_path):
        grid = np.arange(12, dtype=np.int32).reshape(3, 4)
        write_checkpoint(tmp_path, {"t": grid.T, "s": grid[::2, 1:3]})
        with CheckpointFolder.open(tmp_path) as folder:
            assert folder.read("t").tolist() == grid.T.tolist()  # red: bytes in memory order
            assert folder.read("s").tolist() == [[1, 2], [9, 10]]


class TestShards:
    def test_filled_in_order(self, tmp_path):
        tensors = {"big": np.zeros(20, np.uint8)} | numbered(3) | {"last": np.zeros(1, np.uint8)}
        paths = write_checkpoint(tmp_path, tensors, max_shard_bytes=8)
        names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
        assert [path.name for path in paths] == [*names, INDEX]
        assert sorted(os.listdir(tmp_path)) == [*names, INDEX]
        index = json.loads(paths[-1].read_text())
        assert index["metadata"] == {"total_size": 33}
        shards = [index["weight_map"][name] for name in ("big", "t0", "t1", "t2", "last")]
        assert shards == [names[0], names[1], names[1], names[2], names[2]]  # red: >= for >, an empty first shard

    def test_a_given_map(self, tmp_path):
        weight_map = {"t0": "b.safetensors", "t1": "a.safetensors", "t2": "b.safetensors"}
        paths = write_checkpoint(tmp_path, numbered(3), weight_map=weight_map, max_shard_bytes=1)
        assert [path.name for path in paths] == ["b.safetensors", "a.safetensors", INDEX]
        assert list(header_of(paths[0])) == ["__metadata__", "t0", "t2"]
        assert list(json.loads(paths[-1].read_text())["weight_map"].items()) == list(weight_map.items())

    def test_one_tensor_is_alive_at_a_time(self, tmp_path):
        made: list[weakref.ref[np.ndarray]] = []

        def make(value: int) -> np.ndarray:
            assert not any(array() is not None for array in made)  # red: arrays kept while the shard is written
            array = np.full(1000, value, np.uint8)
            made.append(weakref.ref(array))
            return array

        sources = ((f"t{i}", TensorSource("U8", (1000,), lambda i=i: make(i))) for i in range(20))
        write_checkpoint(tmp_path, sources, max_shard_bytes=5000)
        with CheckpointFolder.open(tmp_path) as folder:
            assert [folder.read(name)[0] for name in folder.names()] == list(range(20))


class TestRefusals:
    def test_all_problems_before_a_byte(self, tmp_path):
        half, packed = np.zeros(2, ml_dtypes.float4_e2m1fn), np.zeros(2, np.uint8)
        pairs = [("a", half), ("b", np.zeros(1, ">f4")), ("c", packed), ("c", packed), ("__metadata__", packed)]
        pairs += [("\ud800", packed), (3, packed), ("d", packed)]
        weight_map = {"c": "../c.safetensors", "gone": "g.safetensors"}
        problems = refused(tmp_path / "new", pairs, weight_map=weight_map, metadata={"step": 3})
        for part in (
            "'a': float4_e2m1fn cannot be stored as it is",
            "'b': >f4 cannot be stored as it is",
            "'c' is given twice",
            "'__metadata__' cannot be the name",
            "'\\ud800' cannot be the name",
            "3 cannot be the name",
            "'d' is not in the weight_map",
            "places tensor 'gone', which is not given",
            "'../c.safetensors' is not a plain file name",
            "metadata must map strings to strings",
        ):
            assert sum(part in problem for problem in problems) == 1  # red: a check taken out
        assert len(problems) == 10
        assert not (tmp_path / "new").exists()

    def test_a_source_is_checked_when_made(self):
        with pytest.raises(CheckpointError, match="'F6_E2M3'"):
            TensorSource("F6_E2M3", (4,), lambda: np.zeros(3, np.uint8))
        with pytest.raises(CheckpointError, match="a scalar has no last dimension"):
            TensorSource("F4", (), lambda: np.zeros((), np.uint8))

    def test_nothing_to_write(self, tmp_path):
        assert refused(tmp_path, {}) == ("there are no tensors",)

    def test_a_folder_in_use(self, tmp_path):
        write_checkpoint(tmp_path, numbered(2), max_shard_bytes=4)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        problems = refused(tmp_path, numbered(2))
        assert len(problems) == 3  # red: an old checkpoint overwritten file by file
        assert (
            problems[0]
            == "the folder already holds 'model-00001-of-00002.safetensors'; remove it or choose another folder"
        )
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def test_a_folder_that_is_a_file(self, tmp_path):
        (tmp_path / "file").write_text("")
        assert refused(tmp_path / "file", numbered(1)) == ("the folder cannot be used: Not a directory",)
        assert refused(tmp_path / "file" / "sub", numbered(1)) == ("the folder cannot be used: Not a directory",)


class TestNothingHalfWritten:
    @pytest.mark.parametrize(
        ("made", "found"),
        [
            (np.zeros(3, np.uint8), "expected uint8 [4], made uint8 [3]"),
            (np.zeros(4, np.int8), "expected uint8 [4], made int8 [4]"),
            (np.zeros((4, 1), np.uint8), "expected uint8 [4], made uint8 [4, 1]"),
        ],
    )
    def test_a_source_that_lied(self, tmp_path, made, found):
        tensors = numbered(3) | {"liar": TensorSource("U8", (4,), lambda: made)}
        assert refused(tmp_path, tensors, max_shard_bytes=8) == (found,)
        assert os.listdir(tmp_path) == []  # red: no clean-up

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_a_source_that_raises(self, tmp_path, error):
        def fail() -> np.ndarray:
            raise error("no")

        with pytest.raises(error, match="no"):
            write_checkpoint(tmp_path, numbered(3) | {"bad": TensorSource("U8", (4,), fail)}, max_shard_bytes=4)
        assert os.listdir(tmp_path) == []  # red: `except Exception`

    def test_a_full_disk(self, tmp_path):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        tensors = {"small": np.zeros(10, np.uint8), "large": np.zeros(2_000_000, np.uint8)}
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
            problems = refused(tmp_path, tensors, max_shard_bytes=100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert problems == ("model-00002-of-00002.safetensors: File too large",)
        assert os.listdir(tmp_path) == []

    def test_a_rename_that_is_not_allowed(self, tmp_path, monkeypatch):
        replace = os.replace

        def deny(source: Path, target: Path) -> None:
            if target.name == INDEX:
                raise PermissionError(errno.EACCES, "Permission denied")
            replace(source, target)

        monkeypatch.setattr(os, "replace", deny)
        assert refused(tmp_path, numbered(3), max_shard_bytes=4) == (f"{INDEX}: Permission denied",)
        assert os.listdir(tmp_path) == []  # red: shards that were renamed are left

    def test_the_index_comes_last(self, tmp_path, monkeypatch):
        replace, renamed = os.replace, []

        def watch(source: Path, target: Path) -> None:
            renamed.append(target.name)
            assert len([name for name in os.listdir(tmp_path) if name.endswith(".partial")]) == 4 - len(renamed) + 1
            replace(source, target)

        monkeypatch.setattr(os, "replace", watch)
        write_checkpoint(tmp_path, numbered(3), max_shard_bytes=4)
        assert renamed[-1] == INDEX  # red: index first
        assert len(renamed) == 4  # red: a file renamed before all are written

    def test_a_kill_leaves_nothing_that_opens(self, tmp_path):
        script = """
import os, sys, numpy as np
from kimi_jax.checkpoint.writer import TensorSource, write_checkpoint
make = lambda i: os._exit(9) if i == 2 else np.full(4, i, np.uint8)
tensors = {f"t{i}": TensorSource("U8", (4,), lambda i=i: make(i)) for i in range(4)}
write_checkpoint(sys.argv[1], tensors, max_shard_bytes=4)
"""
        killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, timeout=120, check=False)
        assert killed.returncode == 9
        assert all(name.endswith(".partial") for name in os.listdir(tmp_path))  # red: written under the final name
        with pytest.raises(CheckpointError, match="holds neither"):
            CheckpointFolder.open(tmp_path)
        write_checkpoint(tmp_path, numbered(4), max_shard_bytes=4)  # the left-overs are written over
        assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]
