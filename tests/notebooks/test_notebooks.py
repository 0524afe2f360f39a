"""The notebooks: clean in the repository, and run from top to bottom as a reader would."""

import json
import os
import re
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIGURES = {"01": 4, "02": 2, "03": 4, "04": 3}
LIMIT = 180
"""Seconds that a reader waits at most, on two cores."""


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell: dict) -> str:
    return "".join(cell["source"])


def test_all_are_here():
    assert [path.name[:2] for path in NOTEBOOKS] == list(FIGURES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestSource:
    def test_nothing_of_a_run_is_kept(self, path):
        # Red when a notebook is saved with its outputs.
        book = read(path)
        assert set(book["metadata"]) == {"kernelspec", "language_info"}
        assert set(book["metadata"]["language_info"]) == {"name"}
        for cell in book["cells"]:
            assert cell["metadata"] == {}
            if cell["cell_type"] == "code":
                assert (cell["outputs"], cell["execution_count"]) == ([], None)

    def test_it_says_what_one_learns_and_what_to_try(self, path):
        first, last = read(path)["cells"][0], read(path)["cells"][-1]
        assert source(first).startswith("# ") and "**What you learn.**" in source(first)
        assert last["cell_type"] == "markdown" and source(last).startswith("## What to try")

    def test_no_path_of_a_machine(self, path):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(home|root|tmp|work|Users|usr|opt)/|[A-Z]:\\\\", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path):
    """Red when a cell raises, warns on stderr, or shows another number of figures than it did."""
    pytest.importorskip("ipykernel", reason='notebooks are not run: pip install "kimi-jax[notebooks]"')
    nbclient = pytest.importorskip("nbclient", reason='notebooks are not run: pip install "kimi-jax[notebooks]"')
    nbformat = pytest.importorskip("nbformat", reason='notebooks are not run: pip install "kimi-jax[notebooks]"')
    book = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(book, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": ROOT}})
    began = time.perf_counter()
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)})
    assert time.perf_counter() - began < LIMIT
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) == FIGURES[path.name[:2]]
