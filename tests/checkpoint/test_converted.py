"""Converted checkpoints: every tensor is in them, any layout writes and reads them, whole or not at all."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import kimi_jax
from kimi_jax.checkpoint import parameters, parts
from kimi_jax.checkpoint.convert import Written, convert
from kimi_jax.checkpoint.converted import ConvertedFolder, checksum, is_converted
from kimi_jax.checkpoint.header import CheckpointError
from kimi_jax.config import load_config
from kimi_jax.placement.layout import Layout, LayoutError, load_layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.precision import BFLOAT16, Precision
from tests.checkpoint.models import (
    KDA,
    MOE,
    VISION,
    assert_same,
    edited,
    loaded,
    nothing_left,
    over,
    rewritten,
    small,
    specs_of,
    stored_of,
    with_vision,
)

MARKER = "kimi_jax.json"
PART = 60_000
A_LOG = "model.layers.0.self_attn.A_log"


def converted(source: Path, folder: Path, layout: Layout | str = "single", **options: Any) -> Path:
    layout = load_layout(layout)
    options = {"part_bytes": PART, "tied_head": load_config(source).tied_head, **options}
    convert(source, folder, stored_of(source), layout, make_mesh(layout), **options)
    return folder


def refused(folder: Path, layout: str = "single") -> tuple[str, ...]:
    with nothing_left(), pytest.raises(CheckpointError) as caught:
        loaded(folder, layout)
    return caught.value.problems


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    return with_vision(small(folder / "text"), folder / "all")


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory) -> Path:
    return converted(source, tmp_path_factory.mktemp("converted") / "new")


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    """One to damage."""
    return shutil.copytree(folder, tmp_path / "copy")


class TestContents:
    def test_every_tensor_in_its_stored_dtype(self, source, folder):
        opened, stored = ConvertedFolder.open(folder), stored_of(source)
        assert opened.arrays.keys() == stored.keys() | VISION.keys()
        for name, spec in stored.items():
            assert opened.arrays[name].dtype == spec.dtype  # red: operands of the CPU, float32
            assert name == A_LOG or opened.arrays[name].shape == spec.shape
        for name, array in VISION.items():
            assert opened.read(name).dtype == array.dtype
            assert opened.read(name).tobytes() == array.tobytes()
            assert opened.read(name).shape == array.shape

    def test_padding_of_a_log_survives(self, folder):
        array = ConvertedFolder.open(folder).read(A_LOG)
        assert array.shape == (16,)
        assert (array[8:] == 50).all()  # red: narrowed when written

    def test_the_other_files_are_copied(self, source, folder):
        assert (folder / "config.json").read_bytes() == (source / "config.json").read_bytes()
        assert not list(folder.glob("*.safetensors*"))

    def test_parts_are_small(self, source, tmp_path, monkeypatch):
        save, seen = parts.save, []

        def measured(path, arrays):
            seen.append({name: array.nbytes for name, array in arrays.items()})
            on_devices = sum(array.nbytes for array in jax.live_arrays())
            assert on_devices - before <= sum(seen[-1].values())  # red: parts before are not freed
            save(path, arrays)

        before = sum(array.nbytes for array in jax.live_arrays())
        monkeypatch.setattr(parts, "save", measured)
        with nothing_left():
            converted(source, tmp_path / "new")
        assert len(seen) > 3
        assert all(len(part) == 1 or sum(part.values()) <= PART for part in seen)  # red: one part for all

    def test_counts(self, source, tmp_path):
        layout, calls = load_layout("single"), []
        progress = lambda *call: calls.append(call)  # noqa: E731
        options = {"part_bytes": PART, "progress": progress}
        done = convert(source, tmp_path / "new", stored_of(source), layout, make_mesh(layout), **options)
        opened = ConvertedFolder.open(tmp_path / "new")
        total = sum(info.nbytes for info in opened.arrays.values())
        assert done == Written(len(opened.arrays), total)
        assert calls[-1] == (list(opened.arrays)[-1], total, total)
        assert [call[1] for call in calls] == sorted({call[1] for call in calls})

    def test_a_folder_says_what_it_is(self, source, folder):
        assert is_converted(folder)
        assert not is_converted(source)


class TestLayouts:
    """PF-29: whatever layout wrote a folder, any other reads the same arrays."""

    @pytest.mark.parametrize("wrote", ["tp8", "tp8-lean", "ep8", "tp4-ep2"])
    def test_saved_on_eight_opens_on_one_two_four_eight(self, source, tmp_path, wrote):
        folder = converted(source, tmp_path / "new", wrote)
        for layout in (load_layout("single"), over(2), over(4), load_layout("tp8"), load_layout("ep8")):
            # red: padded experts written, sharding forgotten
            assert_same(loaded(folder, layout), loaded(source, layout))

    @pytest.mark.parametrize("precision", [Precision(), None])
    def test_saved_on_one_opens_on_eight(self, source, folder, precision):
        for layout in ("tp8", "tp8-lean", "ep8", "tp4-ep2", "dp2-tp4"):
            assert_same(loaded(folder, layout, precision), loaded(source, layout, precision))

    def test_a_strict_layout_writes_what_it_may_not_run(self, source, tmp_path):
        strict = dataclasses.replace(load_layout("tp8"), strict=True)
        folder = converted(source, tmp_path / "new", strict)
        assert_same(loaded(folder), loaded(source))

    def test_a_layout_that_does_not_fit(self, source, tmp_path):
        with pytest.raises(LayoutError):
            converted(source, tmp_path / "new", dataclasses.replace(over(3)))
        assert not list(tmp_path.iterdir())

    def test_only_what_changes_shape_is_whole_on_the_host(self, folder, monkeypatch):
        whole = set()
        read = ConvertedFolder.read_together

        def noted(self, names):
            whole.update(names)
            return read(self, names)

        monkeypatch.setattr(ConvertedFolder, "read_together", noted)
        loaded(folder, "ep8")
        assert whole == {A_LOG}  # red: everything through the reader
        loaded(folder, "tp8")  # its slices of 8 expert units are padded to groups of 32
        assert whole == {A_LOG} | {name for name in ConvertedFolder.open(folder).arrays if ".experts." in name}

    def test_small_batches_and_large_ones_agree(self, source, folder, monkeypatch):
        monkeypatch.setattr(parameters, "BATCH_BYTES", 1)
        assert_same(loaded(folder, "ep8"), loaded(source, "ep8"))

    def test_load_recognises_it(self, source, folder):
        model = kimi_jax.load(folder, "tp8")
        assert_same(model.runner.params, kimi_jax.load(source, "tp8").runner.params)

    def test_nothing_left(self, folder):
        with nothing_left():
            params = loaded(folder, "tp8")
            del params


class TestHeads:
    def test_tied_without_a_head(self, tmp_path):
        tied = small(tmp_path / "tied", tied=True)
        source = rewritten(tied, tmp_path / "source", lambda tensors: tensors.pop("language_model.lm_head.weight"))
        folder = converted(source, tmp_path / "new", "tp8", part_bytes=1 << 30)
        assert "lm_head.weight" not in ConvertedFolder.open(folder).arrays
        assert_same(loaded(folder, "ep8"), loaded(source, "ep8"))
        # red: one restore of the shared array for both
        layout, specs = load_layout("tp8"), specs_of(folder, load_layout("tp8"))
        specs["lm_head.weight"] = dataclasses.replace(specs["lm_head.weight"], dtype=BFLOAT16, axes=(None, None))
        read = functools.partial(parameters.read_parameters, stored=stored_of(folder), specs=specs, tied_head=True)
        assert_same(*(read(path, layout=layout, mesh=make_mesh(layout)) for path in (folder, source)))

    def test_tied_with_a_head_of_its_own(self, tmp_path):
        source = small(tmp_path / "tied", tied=True)
        folder = converted(source, tmp_path / "new")
        with pytest.warns(UserWarning, match="it is used"):
            params = loaded(folder)
        with pytest.warns(UserWarning, match="it is used"):
            assert_same(params, loaded(source))


class TestWhole:
    """A destination appears whole or not at all, and hides nothing else."""

    def test_existing_destination(self, source, tmp_path):
        for name in ("file", "folder", "link"):
            target = tmp_path / name
            {"file": target.touch, "folder": target.mkdir, "link": lambda t=target: t.symlink_to("nowhere")}[name]()
            with pytest.raises(CheckpointError, match="already exists"):
                converted(source, target)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link"]

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space"), ValueError("tensorstore")])
    def test_an_error_in_the_middle(self, source, tmp_path, monkeypatch, error):
        save, calls = parts.save, []

        def failing(path, arrays):
            calls.append(path)
            if len(calls) == 3:
                raise error
            save(path, arrays)

        monkeypatch.setattr(parts, "save", failing)
        before = len(jax.live_arrays())
        with nothing_left():
            with pytest.raises(CheckpointError if isinstance(error, OSError) else type(error)) as caught:
                converted(source, tmp_path / "new")
            assert len(jax.live_arrays()) <= before  # red: the part is not freed while the error is held
            del caught
        assert not list(tmp_path.iterdir())  # red: no clean-up

    def test_a_bad_source(self, source, tmp_path):
        def change(tensors):
            tensors[f"{MOE}.experts.6.w1.weight_scale"][0] = 255
            tensors[f"{MOE}.experts.2.w1.weight_scale"][0] = 255

        bad = rewritten(source, tmp_path / "bad", change)
        with nothing_left():
            with pytest.raises(CheckpointError, match="NaN") as caught:
                converted(bad, tmp_path / "new")
            assert len(caught.value.problems) == 2
            del caught
        missing = rewritten(source, tmp_path / "missing", lambda tensors: tensors.pop(f"{KDA}.A_log"))
        with pytest.raises(CheckpointError, match="A_log is missing"):
            converted(missing, tmp_path / "new")
        assert not (tmp_path / "new").exists()

    def test_killed(self, source, tmp_path):
        program = (
            "import os, signal, sys\nfrom pathlib import Path\n"
            "from kimi_jax.checkpoint import convert\nfrom tests.checkpoint.test_converted import converted\n"
            "convert._write_marker = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            "converted(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        )
        command = [sys.executable, "-c", program, str(source), str(tmp_path / "new")]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not (tmp_path / "new").exists()  # red: written in place
        converted(source, tmp_path / "new")


class TestDamage:
    def data_file(self, folder: Path) -> Path:
        return max((folder / "arrays").rglob("*"), key=lambda path: (path.is_file(), path.stat().st_size))

    def test_truncated_and_missing_files_are_named_together(self, copy):
        data = self.data_file(copy)
        size = data.stat().st_size
        os.truncate(data, size - 1)
        gone = copy / "arrays" / "0001" / "_METADATA"
        gone.unlink()
        problems = refused(copy)
        assert len(problems) == 2  # red: stops at the first
        name = data.relative_to(copy).as_posix()
        assert f"{name}: expected {size:,} bytes, found {size - 1:,}" in problems
        assert any(problem.startswith("arrays/0001/_METADATA: cannot be read") for problem in problems)

    def test_a_missing_part(self, copy):
        shutil.rmtree(copy / "arrays" / "0002")
        problems = refused(copy)
        assert problems and all(problem.startswith("arrays/0002/") for problem in problems)

    def test_a_changed_byte(self, copy):
        data = self.data_file(copy)
        with data.open("r+b") as file:
            file.seek(1000)
            byte = file.read(1)[0]
            file.seek(1000)
            file.write(bytes([byte ^ 1]))
        (problem,) = refused(copy, "tp8")
        assert problem.startswith(data.relative_to(copy).as_posix())  # red: no checksum, the weight is wrong
        assert "changed" in problem

    def test_what_orbax_refuses(self, copy):
        manifest = copy / "arrays" / "0000" / "manifest.ocdbt"
        manifest.write_bytes(bytes(manifest.stat().st_size))
        edited(copy / MARKER, lambda marker: marker["files"].update({"arrays/0000/manifest.ocdbt": checksum(manifest)}))
        opened = ConvertedFolder.open(copy)
        name = next(iter(opened.arrays))
        with nothing_left(), pytest.raises(CheckpointError, match="arrays/0000 cannot be read") as caught:
            opened.read(name)  # one alone: orbax lets others that it reads beside it fail with noise
        assert caught.value.problems[0].startswith(f"{name}: ")  # red: what tensorstore raises gets out

    def test_another_format_version(self, copy):
        edited(copy / MARKER, lambda marker: marker.update(format=2))
        (problem,) = refused(copy)
        assert problem == f"{MARKER}: has format version 2; this kimi_jax reads version 1"

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"format": true}', b'{"format": "1"}', b"\xff"])
    def test_no_marker_at_all(self, copy, content):
        (copy / MARKER).write_bytes(content)
        assert all(problem.startswith(MARKER) for problem in refused(copy))

    @pytest.mark.parametrize(
        ("section", "key", "value"),
        [
            ("arrays", A_LOG, {"dtype": "F32", "shape": [16], "part": "../elsewhere"}),
            ("arrays", A_LOG, {"dtype": "F31", "shape": [16], "part": "arrays/0000"}),
            ("arrays", A_LOG, {"dtype": "F32", "shape": [-16], "part": "arrays/0000"}),
            ("arrays", A_LOG, {"dtype": ["F32"], "shape": 16, "part": "arrays/0000"}),
            ("arrays", A_LOG, {"dtype": "F32", "shape": [16], "part": "arrays/0099"}),
            ("arrays", A_LOG, 3),
            ("files", "../secret", [0, 0]),
            ("files", "arrays/0000/../../x", [0, 0]),
            ("files", "/etc/passwd", [0, 0]),
            ("files", "arrays/0000/_METADATA", "big"),
        ],
    )
    def test_a_marker_that_lies(self, copy, section, key, value):
        edited(copy / MARKER, lambda marker: marker[section].update({key: value}))
        (problem,) = refused(copy)
        assert problem.startswith(MARKER)  # red: found only when the file is used

    def test_another_configuration(self, copy, tmp_path):
        other = small(tmp_path / "other", hidden_size=64, full_attention=(1,))
        shutil.copyfile(other / "config.json", copy / "config.json")
        problems = refused(copy)
        assert any(problem.startswith("model.layers.0.self_attn.kv_b_proj.weight is missing") for problem in problems)
        assert "model.norm.weight in arrays/" in " ".join(problems)
        assert any(problem.endswith("belongs to no parameter") for problem in problems)  # red: extras pass

    def test_a_dtype_that_does_not_match(self, copy):
        edited(copy / MARKER, lambda marker: marker["arrays"][A_LOG].update(dtype="BF16"))
        (problem,) = refused(copy)
        assert problem.endswith("is BF16; expected F32")

    def test_the_marker_is_short(self, folder):
        assert json.loads((folder / MARKER).read_text()).keys() == {"format", "arrays", "files"}
