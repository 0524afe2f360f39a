"""The README and the pages beside it say what the tool says, and their links lead somewhere."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from kimi_jax.doctor.checks import ROCM, examine
from kimi_jax.doctor.pins import declared
from tests.doctor.machines import GOOD
from tests.doctor.machines import ROCM as ASKED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "sharding" / "README.md"]
MAKE = "python scripts/make_tables.py"


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "scripts" / "make_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["plan", "layouts", "compile", "modelled", "peers"])
def test_a_table_is_what_the_tool_says_now(tables, name):
    # Red when a number of the planner, a kept report or the table's form changes and the README does not.
    assert tables.with_block(README, name, tables.BLOCKS[name]()) == README, f"run {MAKE}"


def test_every_table_has_a_maker(tables):
    assert set(re.findall(r"<!-- ([A-Z]+) -->", README)) == {name.upper() for name in tables.BLOCKS}


def test_a_kept_report_is_of_the_command_that_is_named(tables):
    # Red when the command is changed and the report is not made again.
    assert {path.stem for path in tables.REPORTS.glob("*.json")} == set(tables.KEPT)
    assert set(tables.STEPS) <= set(tables.KEPT)
    for name, command in tables.KEPT.items():
        kept = json.loads((tables.REPORTS / f"{name}.json").read_text())
        assert kept["command"] == f"kimi-jax {command} --json"
        words = dict(zip(command.split()[2::2], command.split()[3::2], strict=True))
        report = kept["report"]
        told = {"--layout": "layout", "--target": "target", "--phase": "phase"}
        assert {flag: report[key] for flag, key in told.items()} == {flag: words[flag] for flag in told}
        assert set(report["implementations"].values()) == {words.get("--impl", "pallas")}
        assert (report["context"], report["batch"]) == (int(words["--context"]), int(words["--batch"]))


def test_a_modelled_time_is_the_sum_of_its_parts(tables):
    # Red when a collective also costs a launch, inner launches are left out, or a part is.
    rows = [row.strip("| ").split(" | ") for row in tables.modelled_block().splitlines()[2:]]
    assert len(rows) == len(tables.STEPS)
    for row, name in zip(rows, tables.STEPS, strict=True):
        report = json.loads((tables.REPORTS / f"{name}.json").read_text())["report"]
        launches, exchanges = (int(cell.split()[0].replace(",", "")) for cell in row[1:3])
        assert launches + exchanges == report["launches"]["step"] + report["launches"]["inner"]
        moving, exchanging, *modelled = map(float, row[5:])
        for cost, time in zip(tables.LAUNCH_MICROSECONDS, modelled, strict=True):
            assert time == pytest.approx(moving + exchanging + launches * cost / 1000, abs=0.02)


def test_a_place_that_is_not_there_is_said(tables):
    with pytest.raises(SystemExit, match="no place marked PLAN"):
        tables.with_block("nothing", "plan", "x")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


class TestRocmPage:
    page = (ROOT / "docs" / "rocm.md").read_text(encoding="utf-8")
    recipe = (ROOT / "docs" / "rocm.Dockerfile").read_text(encoding="utf-8")

    def test_its_versions_are_the_pins(self):
        for python, line in (("3.11", "| 3.11 |"), ("3.13", "| 3.12 and newer |")):
            (row,) = [each for each in self.page.splitlines() if each.startswith(line)]
            pins = declared().pins(python, ("rocm",))
            for name in ("jax", "flax", "jax-rocm7-pjrt"):
                assert pins[name] in row  # red when a pin is raised and the page is not
            assert pins["jax-rocm7-pjrt"] in ROCM

    def test_the_container_sets_what_the_doctor_asks_for(self):
        environment = dict(re.findall(r"\b([A-Z_]+)=(\S+)", self.recipe.split("ENV AMD")[1].join(["AMD", ""])))
        environment = {name: value.rstrip("\\") for name, value in environment.items()}
        asked = GOOD.environment
        assert environment == asked  # the good machine of the doctor's tests, whose findings are all ok
        assert all(finding.state == "ok" for finding in examine(GOOD, ASKED))
        assert all(f"`{name}` | `{value}`" in self.page for name, value in asked.items())
