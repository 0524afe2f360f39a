"""Opening a folder, reading parts of tensors, counting them, letting go of the files."""

import json
import os
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize

from kimi_jax.checkpoint.header import DTYPES, CheckpointError
from kimi_jax.checkpoint.reader import CheckpointFolder

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def shard(tensors: dict[str, np.ndarray | tuple[str, list[int], bytes]]) -> bytes:
    """A file with these uint8 arrays, or tensors given as stored dtype, shape and bytes."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        stored, shape, raw = tensor if isinstance(tensor, tuple) else ("U8", list(tensor.shape), tensor.tobytes())
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def bytes_of(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def fill(folder: Path, files: dict[str, bytes], weight_map: object = None, **metadata: object) -> Path:
    """Writes the files, and an index when a weight_map is given."""
    folder.mkdir(exist_ok=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    if weight_map is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return folder


def two_shards(folder: Path) -> Path:
    a = shard({"x": bytes_of(1, 2, 3), "y": bytes_of(4)})
    return fill(folder, {A: a, B: shard({"z": bytes_of(5, 6)})}, {"z": B, "x": A, "y": A}, total_size=6)


def refused(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        CheckpointFolder.open(folder)
    return caught.value.problems


def descriptors() -> list[str]:
    """What this process has open under the name of a shard."""
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [os.readlink(path) for path in paths if os.path.lexists(path) and "safetensors" in os.readlink(path)]


class TestGolden:
    def test_every_tensor_equals_the_official_reader(self, k3_tiny):
        with CheckpointFolder.open(k3_tiny) as folder:
            seen = 0
            for file in sorted(k3_tiny.glob("*.safetensors")):
                for name, tensor in deserialize(file.read_bytes()):
                    info, array = folder.info(name), folder.read(name)
                    assert (info.file, info.stored_dtype) == (file.name, tensor["dtype"])
                    assert list(array.shape) == tensor["shape"]
                    assert array.dtype == DTYPES[tensor["dtype"]]
                    assert array.tobytes() == bytes(tensor["data"])  # red: an offset off by one
                    seen += 1
            assert seen == len(folder.names()) == 1492
            assert folder.requested.total == sum(folder.info(name).nbytes for name in folder.names()) == 2_611_904

    def test_names_are_in_the_order_of_the_index(self, k3_tiny):
        weight_map = json.loads((k3_tiny / INDEX).read_text())["weight_map"]
        with CheckpointFolder.open(k3_tiny) as folder:
            assert folder.names() == tuple(weight_map)  # red: names in the order of the shards
            assert "model.norm" not in folder
            assert "language_model.model.norm.weight" in folder


class TestOpen:
    def test_one_file_without_an_index(self, tmp_path):
        fill(tmp_path, {"weights.safetensors": shard({"x": bytes_of(7)})})
        with CheckpointFolder.open(str(tmp_path)) as folder:
            assert folder.read("x") == [7]
        fill(tmp_path, {"model.safetensors": shard({"x": bytes_of(8)})})
        with CheckpointFolder.open(tmp_path) as folder:
            assert folder.read("x") == [8]  # red: the first file instead of model.safetensors

    def test_the_index_decides(self, tmp_path):
        right, decoy = shard({"x": bytes_of(1)}), shard({"x": bytes_of(2), "y": bytes_of(3)})
        for first, second in ((A, B), (B, A)):
            fill(tmp_path, {first: right, second: decoy}, {"x": first, "y": second})
            with CheckpointFolder.open(tmp_path) as folder:
                assert folder.read("x") == [1]  # red: the last shard wins
                assert folder.info("x").file == first

    def test_the_index_wins_over_a_single_file(self, tmp_path):
        two_shards(tmp_path)
        fill(tmp_path, {"model.safetensors": shard({"x": bytes_of(9)})})
        with CheckpointFolder.open(tmp_path) as folder:
            assert list(folder.read("x")) == [1, 2, 3]  # red: model.safetensors looked for first

    def test_a_cache_of_links(self, tmp_path):
        blobs = fill(tmp_path / "blobs", {"0a1b": shard({"x": bytes_of(1)})})
        snapshot = fill(tmp_path / "snapshot", {}, {"x": A})
        (snapshot / A).symlink_to(blobs / "0a1b")
        with CheckpointFolder.open(snapshot) as folder:
            assert folder.read("x") == [1]  # red: links refused
            assert folder.info("x").file == A

    @pytest.mark.parametrize(
        "name",
        [
            "../evil.safetensors",
            "/etc/evil.safetensors",
            "sub/x.safetensors",
            "..\\x.safetensors",
            "C:x.safetensors",
            "x\0.safetensors",
            "\x1b[2Jx.safetensors",
            "\ud800.safetensors",
            "n" * 300 + ".safetensors",
            "x.bin",
            "..",
            "",
            3,
            None,
            [A],
        ],
    )
    def test_a_shard_is_a_plain_name(self, tmp_path, name):
        for outside in ("evil.safetensors", "sub"):
            (tmp_path / outside).mkdir()
        folder = fill(tmp_path / "folder", {A: shard({"x": bytes_of(1)})}, {"y": name, "x": A})
        (problem,) = refused(folder)  # red: the name not checked
        assert problem.startswith(f"{INDEX}: tensor 'y' is placed in ")
        assert problem.isprintable()

    def test_all_problems_at_once(self, tmp_path):
        weight_map = {"x": A, "y": A, "z": B, "gone": A, "w": "c.safetensors", "v": "../d.safetensors"}
        fill(
            tmp_path,
            {A: shard({"x": bytes_of(1), "extra": bytes_of(2), "v": bytes_of(3)}), B: b"junk", "unnamed": b""},
            weight_map,
        )
        assert refused(tmp_path) == (
            f"{INDEX}: tensor 'v' is placed in '../d.safetensors': a shard must be a plain file name *.safetensors "
            "inside the folder",
            "c.safetensors: cannot be read: No such file or directory",
            f"{B}: has 4 bytes, a safetensors file has at least 8",
            f"{A}: does not hold tensor 'y'",
            f"{A}: does not hold tensor 'gone'",
            f"{A}: holds tensor 'extra', which the index does not name",
        )  # red: raise after the first kind

    def test_a_tensor_in_the_wrong_shard_is_found(self, tmp_path):
        folder = fill(tmp_path, {A: shard({"x": bytes_of(1)}), B: shard({"y": bytes_of(2)})}, {"x": B, "y": B})
        (problem,) = refused(folder)[:1]
        assert problem == f"{B}: does not hold tensor 'x'"  # no shard is opened that the index does not name
        fill(tmp_path, {A: shard({"x": bytes_of(1), "w": bytes_of(1)})}, {"x": B, "y": B, "w": A})
        assert refused(folder) == (f"{B}: does not hold tensor 'x', but '{A}' does",)  # red: others not searched

    def test_thousands_of_lost_tensors_are_counted(self, tmp_path):
        fill(tmp_path, {A: shard({"x": bytes_of(1)})}, {"x": A} | {f"t{i}": A for i in range(3000)})
        problems = refused(tmp_path)
        assert len(problems) == 51  # red: not limited
        assert problems[-1] == "... and 2,950 more like these"

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"", "is not usable JSON"),
            (b"\xff\xfe{}", "is not UTF-8"),
            (b"[]", "must be an object with a weight_map, found []"),
            (b"3", "must be an object with a weight_map, found 3"),
            (b"null", "must be an object with a weight_map, found None"),
            (b"{}", "weight_map must be an object of tensor name to shard name, found None"),
            (
                b'{"weight_map":[["x","y"]]}',
                "weight_map must be an object of tensor name to shard name, found [['x', 'y']]",
            ),
            (b'{"weight_map":{}}', "weight_map names no tensor"),
            (b'{"weight_map":{"x":"%s","x":"%s"}}' % (A.encode(), A.encode()), "has the key 'x' twice"),
            (b'{"weight_map":{"x":"%s"},"metadata":[]}' % A.encode(), "metadata must be an object, found []"),
            (b'{"weight_map":{"x":"%s"},"metadata":{"total_size":true}}' % A.encode(), "a number of bytes, found True"),
            (b'{"weight_map":{"x":"%s"},"metadata":{"total_size":"3"}}' % A.encode(), "a number of bytes, found '3'"),
            (b'{"weight_map":{"x":"%s"},"metadata":{"total_size":-1}}' % A.encode(), "a number of bytes, found -1"),
            (b'{"weight_map":{"x":"%s"},"metadata":{"total_size":1e999}}' % A.encode(), "a number of bytes, found inf"),
            (b'{"weight_map":{"x":"%s"},"metadata":{"total_size":NaN}}' % A.encode(), "NaN is not allowed"),
            (b'{"weight_map":' * 50_000, "nests too deeply"),
        ],
    )
    def test_a_malformed_index(self, tmp_path, content, problem):
        fill(tmp_path, {A: shard({"x": bytes_of(1)}), INDEX: content})
        (found,) = refused(tmp_path)  # red: each row when its check is taken out
        assert found.startswith(f"{INDEX}: ")
        assert problem in found

    def test_an_index_has_a_size_limit(self, tmp_path):
        fill(tmp_path, {A: shard({"x": bytes_of(1)})}, {"x": A})
        os.truncate(tmp_path / INDEX, (256 << 20) + 1)  # sparse: takes no space
        assert refused(tmp_path) == (f"{INDEX}: has 268,435,457 bytes, the limit is 268,435,456",)

    @pytest.mark.parametrize("total", [0, 5, 6, 6.0])
    def test_a_total_below_what_is_there_is_taken(self, tmp_path, total):
        two_shards(tmp_path)
        fill(tmp_path, {}, {"z": B, "x": A, "y": A}, total_size=total)
        CheckpointFolder.open(tmp_path).close()  # red: totals compared for equality

    def test_a_total_above_it_is_not(self, tmp_path):
        two_shards(tmp_path)
        fill(tmp_path, {}, {"z": B, "x": A, "y": A}, total_size=7)
        assert refused(tmp_path) == (f"{INDEX}: total_size says 7 bytes of tensors, the shards hold 6",)

    def test_what_is_not_a_checkpoint(self, tmp_path):
        assert refused(tmp_path / "gone") == ("it is not a folder",)
        assert refused(tmp_path) == (f"the folder holds neither {INDEX} nor a *.safetensors file",)
        fill(tmp_path, {A: shard({"x": bytes_of(1)})})
        assert refused(tmp_path) == (f"'{A}' is one of 00002 shards and there is no index",)  # red: opened as complete
        assert refused(tmp_path / A) == ("it is not a folder",)
        fill(tmp_path, {B: shard({"x": bytes_of(2)})})
        assert refused(tmp_path) == (f"2 safetensors files and no index: '{A}', '{B}'",)
        (tmp_path / INDEX).symlink_to(tmp_path / "gone")
        assert refused(tmp_path) == (f"{INDEX}: cannot be read: No such file or directory",)  # red: exists for lexists


class TestRead:
    @pytest.fixture
    def folder(self, tmp_path):
        grid = np.arange(12, dtype=np.float32).reshape(3, 4)
        tensors = {
            "odd": bytes_of(1),  # what follows is not aligned
            "grid": ("F32", [3, 4], grid.tobytes()),
            "half": ("BF16", [2], b"\x80\x3f\x00\xc0"),
            "fp8": ("F8_E4M3", [2], b"\x38\xc0"),
            "scale": ("F8_E8M0", [3], b"\x7f\x80\x00"),
            "fp4": ("F4", [2, 4], b"\x21\xf7\x00\x08"),
            "one": ("F64", [], np.float64(0.5).tobytes()),
            "none": ("I16", [0, 5], b""),
            "yes": ("BOOL", [2], b"\x01\x00"),
            "maybe": ("BOOL", [2], b"\x01\x02"),
            "last": ("F32", [0], b""),
        }
        with CheckpointFolder.open(fill(tmp_path, {"model.safetensors": shard(tensors)})) as folder:
            yield folder

    def test_values_by_hand(self, folder):
        assert folder.read("half").tolist() == [1.0, -2.0]
        assert folder.read("half").dtype == ml_dtypes.bfloat16
        assert folder.read("fp8").astype(np.float32).tolist() == [1.0, -2.0]  # red: E5M2 for E4M3
        assert folder.read("scale").astype(np.float32).tolist() == [1.0, 2.0, 2.0**-127]
        assert folder.read("fp4").tolist() == [[0x21, 0xF7], [0x00, 0x08]]
        assert folder.read("one") == 0.5
        assert folder.read("one").shape == ()
        assert folder.read("none").shape == (0, 5)  # red: read without a count, so on to the end of the file
        assert folder.read("none").dtype == np.int16
        assert folder.read("last").shape == (0,)
        assert folder.read("yes").tolist() == [True, False]
        assert folder.read("grid").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]

    def test_a_bool_is_0_or_1(self, folder):
        with pytest.raises(CheckpointError, match="a BOOL is neither 0 nor 1"):
            folder.read("maybe")
        assert folder.read("maybe", (slice(0, 1),)).tolist() == [True]  # red: the whole tensor looked at

    def test_slices_are_counted_views(self, folder):
        part = folder.read("grid", (slice(1, 3), slice(2, None)))
        assert part.tolist() == [[6, 7], [10, 11]]
        assert folder.requested.total == 16  # red: the bytes of the whole tensor counted
        assert folder.requested.per_file == {"model.safetensors": 16}
        whole = folder.read("grid", (slice(None), slice(None, None, 1)))
        assert np.shares_memory(whole, folder.read("grid"))  # red: a copy
        assert not whole.flags.writeable
        assert folder.requested.total == 16 + 48 + 48
        assert folder.read("one", ()) == 0.5

    @pytest.mark.parametrize(
        ("index", "problem"),
        [
            ((slice(None),), "1 slices for 2 dimensions"),
            ((slice(None),) * 3, "3 slices for 2 dimensions"),
            ((slice(0, 4), slice(None)), "dimension 0: slice(0, 4, None) is not a part of 0:3"),
            ((slice(-1, None), slice(None)), "dimension 0: slice(-1, None, None) is not a part of 0:3"),
            ((slice(2, 1), slice(None)), "dimension 0: slice(2, 1, None)"),
            (
                (slice(None), slice(None, None, 2)),
                "dimension 1: slice(None, None, 2) is not a part of 0:4 without steps",
            ),
            ((0, slice(None)), "dimension 0: 0 is not a slice"),
        ],
    )
    def test_an_index_that_does_not_fit(self, folder, index, problem):
        with pytest.raises(CheckpointError) as caught:
            folder.read("grid", index)
        (found,) = caught.value.problems  # red: each row when its check is taken out
        assert problem in found
        assert folder.requested.total == 0

    def test_an_unknown_name(self, folder):
        with pytest.raises(CheckpointError, match=r"'grad'(.|\n)*The nearest name is 'grid'"):
            folder.read("grad")
        with pytest.raises(CheckpointError, match="no such tensor"):
            folder.info("")

    def test_counting_from_many_threads(self, folder):
        def work() -> None:
            for _ in range(300):
                folder.read("grid", (slice(0, 1), slice(None)))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert folder.requested.total == 8 * 300 * 16


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the open files that Linux shows")
class TestFiles:
    def test_opened_when_read_and_closed(self, tmp_path):
        before = descriptors()
        with CheckpointFolder.open(two_shards(tmp_path)) as folder:
            assert descriptors() == before  # red: mapped on opening
            folder.read("x")
            folder.read("y")
            assert len(descriptors()) == len(before) + 1  # red: a mapping for every tensor
            folder.read("z")
            assert len(descriptors()) == len(before) + 2
        assert descriptors() == before  # red: close does nothing, as long as `folder` lives
        with pytest.raises(CheckpointError, match="is closed"):
            folder.read("x")
        folder.close()

    def test_arrays_outlive_the_folder(self, tmp_path):
        before = descriptors()
        with CheckpointFolder.open(two_shards(tmp_path)) as folder:
            array = folder.read("x", (slice(1, 3),))
        assert array.tolist() == [2, 3]  # red: unmapped under the array
        del array
        assert descriptors() == before

    def test_nothing_is_open_after_a_refusal(self, tmp_path):
        before = descriptors()
        fill(two_shards(tmp_path), {}, {"x": A, "gone": B})
        refused(tmp_path)
        assert descriptors() == before

    def test_a_file_that_changed(self, tmp_path):
        with CheckpointFolder.open(two_shards(tmp_path)) as folder:
            os.truncate(tmp_path / A, 100)
            with pytest.raises(CheckpointError, match=r"changed since it was opened, from \d+ to 100 bytes"):
                folder.read("x")  # red: size not compared (a bus error then)
            (tmp_path / B).unlink()
            with pytest.raises(CheckpointError, match="No such file"):
                folder.read("z")
