"""Both models at full size, compiled for eight MI355X and held against their budgets, through the command that a user types.

Each step has a process of its own: its peak of memory is its own, and the compiler builds every kernel anew.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_jax.placement.budget import load_budget
from kimi_jax.placement.files import shipped_names

ROOT = Path(__file__).parents[2]

QUICK = ("k3-tp8-decode-1", "k3-tp8-prefill-2048")
"""Budgets of the default test run."""

SLOW = ("k3-tp8-lean-decode-1", "k3-ep8-decode-1", "k31-tp8-decode-1", "k3-tp8-verify-8")
"""Budgets that `scripts/test --all` holds too, in one to three minutes each. Those of eight sequences differ by the rows of the
products alone; `kimi-jax compile --budget` holds them."""

CONFIGS = {"k31": "k3.1-pro"}
"""What the command calls a model whose name has the dash that parts a budget's."""

DRAFT = "k3-mla"
"""Drafts 7 tokens: the target verifies 8."""

HELD = 1 << 20
"""Tokens in the cache, of all sequences together."""

MOST_BYTES = 6 << 30
"""Host memory of one compile."""

BUDGETS = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def arguments(budget: str) -> list[str]:
    """CONFIG-LAYOUT-PHASE-SIZE: what a budget's name says."""
    model, phase, size = budget.rsplit("-", 2)
    config, _, layout = model.partition("-")
    config = CONFIGS.get(config, config)
    sized = {"decode": ["--batch", size], "prefill": ["--prefill-chunk", size], "verify": ["--draft", DRAFT]}[phase]
    # eight sequences of a million tokens do not fit beside the weights: they share them
    context = HELD // int(size) if phase == "decode" else HELD
    return [config, "--layout", layout, "--phase", phase, *sized, "--context", str(context), "--budget", budget]


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_step_keeps_its_budget(mi355x, budget):
    # Red with an extra gather, an undonated cache, a widened weight, a spilling kernel: the message names it.
    command = [
        sys.executable,
        "-m",
        "kimi_jax.cli.main",
        "compile",
        *arguments(budget),
        "--target",
        mi355x.name,
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["plan"]["agrees"]
    assert found["budget"] == []
    tally = found["memory"]["aliased"] - found["plan"]["cache"]  # of drafts: a few counters
    assert 0 < tally < 64 if "verify" in budget else tally == 0
    assert found["peak_bytes"] < MOST_BYTES


KEPT = [name for name in shipped_names("budgets") if (ROOT / "docs" / "compiled" / f"{name}.json").exists()]


@pytest.mark.parametrize("budget", KEPT)
def test_the_kept_reports_keep_their_budgets(budget):
    # Red when a limit is tightened below what the README shows.
    report = json.loads((ROOT / "docs" / "compiled" / f"{budget}.json").read_text())["report"]
    most, moved = load_budget(budget).most, report["moved"]
    assert report["budget"] == []
    assert report["memory"]["temp"] <= most["temp_bytes"] and report["launches"]["step"] <= most["launches"]
    assert moved is None or moved["ratio"] <= most["moved_ratio"]
