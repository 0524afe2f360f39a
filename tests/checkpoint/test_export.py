"""The way back: the same tensors byte for byte, the same files where they were written as usual."""

import filecmp
import json
import random
import shutil
import struct
import weakref
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kimi_jax.checkpoint.convert import Written
from kimi_jax.checkpoint.converted import ConvertedFolder, checksum
from kimi_jax.checkpoint.export import export
from kimi_jax.checkpoint.header import CheckpointError
from kimi_jax.checkpoint.reader import CheckpointFolder
from kimi_jax.checkpoint.writer import write_checkpoint
from kimi_jax.config import load_config
from tests.checkpoint.models import (
    INDEX,
    VISION,
    edited,
    loaded,
    nothing_left,
    rewritten,
    small,
    stored_of,
    tensors_of,
    with_vision,
)
from tests.checkpoint.test_converted import converted

SHARDS = Path("source") / "shards.json"


def back(folder: Path, destination: Path) -> Path:
    export(folder, destination, stored_of(folder), tied_head=load_config(folder).tied_head)
    return destination


class Watched(np.ndarray):
    """An array that a WeakSet can hold: by identity, not by value."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def round_trip(source: Path, folder: Path, layout: str = "single") -> Path:
    return back(converted(source, folder / "converted", layout), folder / "back")


def assert_same_folder(got: Path, expected: Path) -> None:
    names = sorted(path.name for path in expected.iterdir() if path.suffix != ".npz")
    assert sorted(path.name for path in got.iterdir()) == names
    same, different, unreadable = filecmp.cmpfiles(got, expected, names, shallow=False)
    assert (different, unreadable) == ([], [])
    assert len(same) == len(names)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    return with_vision(small(folder / "text"), folder / "all")


def test_golden_checkpoint(k3_tiny, tmp_path):
    # red: experts in the order of their names as text, A_log narrowed, shards filled anew
    assert_same_folder(round_trip(k3_tiny, tmp_path), k3_tiny)


@pytest.mark.parametrize("layout", ["single", "ep8"])
def test_vision_and_padding_come_back(source, tmp_path, layout):
    folder = round_trip(source, tmp_path, layout)
    assert_same_folder(folder, source)
    assert VISION.keys() <= tensors_of(folder).keys()
    assert tensors_of(folder) == tensors_of(source)


def test_any_order_and_assignment(source, tmp_path):
    with CheckpointFolder.open(source) as opened:
        names = list(opened.names())
        tensors = {name: np.array(opened.read(name)) for name in names}
    random.Random(3).shuffle(names)
    weight_map = {name: f"part-{random.Random(name).randrange(4)}.safetensors" for name in names}
    shuffled = tmp_path / "shuffled"
    write_checkpoint(shuffled, {name: tensors[name] for name in names}, weight_map=weight_map)
    shutil.copyfile(source / "config.json", shuffled / "config.json")
    edited(shuffled / INDEX, lambda index: index.update(weight_map=dict(sorted(index["weight_map"].items()))))
    assert_same_folder(round_trip(shuffled, tmp_path), shuffled)  # red: the order of the index instead of the data


def test_one_file_of_the_official_writer(source, tmp_path):
    folder = tmp_path / "official"
    folder.mkdir()
    with CheckpointFolder.open(source) as opened:
        tensors = {name: np.array(opened.read(name)) for name in opened.names()}
        save_file(tensors, folder / "weights.safetensors", metadata={"format": "pt", "by": "someone"})
    shutil.copyfile(source / "config.json", folder / "config.json")
    assert_same_folder(round_trip(folder, tmp_path), folder)  # red: an index added, the text lost, model.safetensors


def test_another_spelling_of_a_header_changes_no_tensor(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "spaced")
    for shard in folder.glob("*.safetensors"):
        content = shard.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.dumps(json.loads(content[8 : 8 + length]), indent=1, sort_keys=True).encode()
        shard.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    assert tensors_of(round_trip(folder, tmp_path)) == tensors_of(source)


def test_unused_copies_are_dropped(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "decoy")
    name = "language_model.model.norm.weight"
    write_checkpoint(tmp_path / "other", {name: np.zeros(3), "mm_projector.extra": np.ones(2, np.float32)})
    shutil.copyfile(tmp_path / "other" / "model.safetensors", folder / "a.safetensors")
    edited(folder / INDEX, lambda index: index["weight_map"].update({"mm_projector.extra": "a.safetensors"}))
    expected = tensors_of(folder)
    folder = round_trip(folder, tmp_path)
    assert tensors_of(folder) == expected
    with CheckpointFolder.open(folder) as opened:
        assert opened.info("mm_projector.extra").file == "a.safetensors"


def test_tied_without_a_head(tmp_path):
    tied = small(tmp_path / "tied", tied=True)
    source = rewritten(tied, tmp_path / "source", lambda tensors: tensors.pop("language_model.lm_head.weight"))
    assert_same_folder(round_trip(source, tmp_path), source)


def test_counts_and_progress(source, tmp_path):
    folder, calls = converted(source, tmp_path / "converted"), []
    done = export(folder, tmp_path / "back", stored_of(folder), progress=lambda *call: calls.append(call))
    sizes = {name: len(data) for name, (_, data) in tensors_of(source).items()}
    assert done == Written(len(sizes), sum(sizes.values()))
    assert calls[-1][1:] == (done.bytes, done.bytes)
    assert {call[0] for call in calls} == sizes.keys()


def test_every_array_is_read_once_and_let_go(source, tmp_path, monkeypatch):
    folder = converted(source, tmp_path / "converted")
    read, reads, alive, most = ConvertedFolder.read, [], weakref.WeakSet(), 0

    def counted(self, name):
        nonlocal most
        reads.append(name)
        array = read(self, name).view(Watched)
        alive.add(array)
        most = max(most, sum(array.nbytes for array in alive))
        return array

    monkeypatch.setattr(ConvertedFolder, "read", counted)
    with nothing_left():
        back(folder, tmp_path / "back")
    assert sorted(reads) == sorted(ConvertedFolder.open(folder).arrays)  # red: one read for each expert
    largest = max(info.nbytes for info in ConvertedFolder.open(folder).arrays.values())
    assert most <= 2 * largest  # red: arrays kept after their last tensor


class TestRefused:
    @pytest.fixture
    def folder(self, source, tmp_path) -> Path:
        return converted(source, tmp_path / "converted")

    def problems(self, folder: Path, destination: Path) -> tuple[str, ...]:
        with pytest.raises(CheckpointError) as caught:
            back(folder, destination)
        assert not destination.exists()
        assert [path.name for path in destination.parent.iterdir()] == [folder.name]  # red: no clean-up
        return caught.value.problems

    def test_existing_destination(self, folder, tmp_path):
        (tmp_path / "back").mkdir()
        with pytest.raises(CheckpointError, match="already exists"):
            back(folder, tmp_path / "back")
        assert not list((tmp_path / "back").iterdir())

    def test_a_changed_byte_is_found_before_it_is_written(self, folder, tmp_path):
        data = max((folder / "arrays").rglob("*"), key=lambda path: (path.is_file(), path.stat().st_size))
        content = bytearray(data.read_bytes())
        content[-1000] ^= 4
        data.write_bytes(content)
        assert "changed" in self.problems(folder, tmp_path / "back")[0]

    def test_a_changed_order(self, folder, tmp_path):
        path = folder / SHARDS
        path.write_text(path.read_text().replace('"pt"', '"tp"', 1))
        assert self.problems(folder, tmp_path / "back")[0].startswith(f"{SHARDS}: its contents changed")

    def test_an_order_that_does_not_match(self, folder, tmp_path):
        def change(shards):
            shards[0]["tensors"].append(shards[1]["tensors"].pop())
            shards[0]["tensors"] += ["unknown", shards[0]["tensors"][0]]
            shards[1]["tensors"].pop()

        edited(folder / SHARDS, change)
        marker = folder / "kimi_jax.json"
        edited(marker, lambda value: value["files"].update({SHARDS.as_posix(): checksum(folder / SHARDS)}))
        problems = self.problems(folder, tmp_path / "back")
        assert len(problems) == 3
        assert "'unknown' belongs to no array" in problems

    @pytest.mark.parametrize("value", [[], {}, [3], [{"file": "../x.safetensors", "metadata": {}, "tensors": ["a"]}]])
    def test_an_order_that_is_not_one(self, folder, tmp_path, value):
        (folder / SHARDS).write_text(json.dumps(value))
        marker = folder / "kimi_jax.json"
        edited(marker, lambda value: value["files"].update({SHARDS.as_posix(): checksum(folder / SHARDS)}))
        assert len(self.problems(folder, tmp_path / "back")) == 1

    def test_another_configuration(self, folder, tmp_path):
        edited(folder / "config.json", lambda config: config["text_config"].update(vocab_size=128))
        assert any("lm_head.weight" in problem for problem in self.problems(folder, tmp_path / "back"))


def test_what_comes_back_loads(source, tmp_path):
    folder = round_trip(source, tmp_path)
    expected = loaded(source, "tp8")
    for name, array in loaded(folder, "tp8").items():
        assert np.asarray(array).tobytes() == np.asarray(expected[name]).tobytes()
