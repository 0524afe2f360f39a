"""`kimi-jax convert` there and back."""

import json
from pathlib import Path

import pytest

from kimi_jax.checkpoint.converted import is_converted
from kimi_jax.cli.main import main
from tests.checkpoint.models import small, tensors_of


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return small(tmp_path_factory.mktemp("released") / "small")


def run(capsys, *words: object) -> tuple[int, str, str]:
    status = main(["convert", *map(str, words)])
    out, err = capsys.readouterr()
    return status, out, err


def test_there_and_back(source, tmp_path, capsys):
    there, back = tmp_path / "there", tmp_path / "back"
    total = sum(len(data) for _, data in tensors_of(source).values())
    status, out, _ = run(capsys, source, there, "--layout", "tp8", "--json")
    report = json.loads(out)  # red: a line beside the object
    assert status == 0
    assert is_converted(there)
    assert report.keys() == {"source", "destination", "form", "arrays", "bytes", "seconds"}
    assert (report["form"], report["bytes"], report["destination"]) == ("orbax", total, str(there))
    status, out, _ = run(capsys, there, back)
    assert status == 0
    assert "released checkpoint" in out and f"{total:,} bytes" in out
    assert tensors_of(back) == tensors_of(source)


def test_refusals(source, tmp_path, capsys):
    status, out, err = run(capsys, source, source)
    assert (status, out) == (2, "")
    assert "already exists" in err
    status, _, err = run(capsys, source, source / "inside")
    assert status == 2 and "lies inside" in err  # red when a checkpoint may grow a second one in itself
    assert not (source / "inside").exists()
    status, _, err = run(capsys, tmp_path / "nothing", tmp_path / "new")
    assert status == 2 and "No configuration" in err
    status, _, err = run(capsys, source, tmp_path / "new", "--layout", "tp9")
    assert status == 2 and "tp8" in err
    run(capsys, source, tmp_path / "there")
    status, _, err = run(capsys, tmp_path / "there", tmp_path / "back", "--layout", "tp8")
    assert status == 2 and "Leave it out" in err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
