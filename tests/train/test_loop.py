"""The shared training loop: exact resume after a kill, measurements, schedules."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.train.checkpoint import Checkpoints
from kimi_jax.train.loop import run
from kimi_jax.train.metrics import Metrics, plot
from kimi_jax.train.schedule import warmup_cosine, warmup_stable_decay
from kimi_jax.train.state import TrainingError, TrainState, begin

PROGRAM = """
import sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from kimi_jax.train.checkpoint import Checkpoints
from kimi_jax.train.loop import run
from kimi_jax.train.metrics import Metrics
from tests.train.test_loop import batches, fresh, update

home, slow = Path(sys.argv[1]), float(sys.argv[2])
def slowly(step):
    time.sleep(slow)
    return batches(step)
run(update(), fresh(), slowly, steps=24, checkpoints=Checkpoints(home / "saved", every=3), metrics=Metrics(home / "log"), every=2)
"""


def fresh() -> TrainState:
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
    return begin(
        {"a.weight": weights, "b.weight": weights.astype(jnp.bfloat16)}, (jnp.zeros((8, 4)),), {"bias": jnp.zeros(4)}
    )


def batches(step: int):
    return np.random.default_rng([7, step]).normal(size=(16, 8)).astype(np.float32)


def update():
    """Momentum on a nonlinear loss, a bfloat16 copy, and a count that no gradient moves."""

    def loss(weights, batch):
        return jnp.mean(jnp.tanh(batch @ weights) ** 2 + jnp.sin(batch @ weights))

    def step(state: TrainState, batch):
        value, slope = jax.value_and_grad(loss)(state.params["a.weight"], batch)
        moved = 0.9 * state.opt_state[0] + slope
        weights = state.params["a.weight"] - 0.1 * moved
        params = {"a.weight": weights, "b.weight": state.params["b.weight"] + weights.astype(jnp.bfloat16)}
        return TrainState(state.step + 1, params, (moved,), {"bias": state.extra["bias"] + value}), {"loss": value}

    return jax.jit(step, donate_argnums=0)


def same(one: TrainState, other: TrainState) -> bool:
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)


def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    # red when the data does not follow the step, an array is not saved, or half a checkpoint counts as one
    whole = run(update(), fresh(), batches, steps=24, metrics=Metrics(tmp_path / "whole"), every=2)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    saved = Checkpoints(tmp_path / "saved", every=3)
    for least in (1, 10):
        child = subprocess.Popen([*command, "0.05"], env={**os.environ, "JAX_PLATFORMS": "cpu"})
        deadline = time.monotonic() + 60
        while not (saved.steps() and saved.steps()[-1] >= least):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert 10 <= saved.steps()[-1] < 24
    again = run(update(), fresh(), batches, steps=24, checkpoints=saved, metrics=Metrics(tmp_path / "log"), every=2)
    assert same(again, whole)
    untimed = [
        [{key: value for key, value in line.items() if key != "seconds_per_step"} for line in Metrics(file).read()]
        for file in (tmp_path / "log", tmp_path / "whole")
    ]
    assert untimed[0] == untimed[1]
    assert [line["step"] for line in untimed[0]] == [1, *range(2, 25, 2)]
    assert len(saved.steps()) == 2 and not list((tmp_path / "saved").glob(".*"))


def test_what_a_kill_leaves_behind_is_no_checkpoint(tmp_path: Path) -> None:
    # red when a partial folder, or one that is being deleted, is listed or read
    saved = Checkpoints(tmp_path, every=1, keep=1)
    state = run(update(), fresh(), batches, steps=2, checkpoints=saved)
    (tmp_path / ".step-00000009.partial" / "arrays").mkdir(parents=True)
    (tmp_path / ".step-00000001.old").mkdir()
    assert saved.steps() == [2]
    assert same(saved.restore(fresh()), state)
    saved.save(state._replace(step=jnp.int32(3)))
    assert saved.steps() == [3] and not list(tmp_path.glob(".*"))


def test_a_checkpoint_of_another_run_is_refused_with_every_difference(tmp_path: Path) -> None:
    # red when the settings or the arrays of a run are not compared, or only the first difference is told
    run(
        update(),
        fresh(),
        batches,
        steps=1,
        checkpoints=Checkpoints(tmp_path, run={"seed": 1, "lr": 0.1, "taps": (0, 1)}),
    )
    other = fresh()
    other.params["c.weight"] = other.params.pop("b.weight")
    other = other._replace(opt_state=(jnp.zeros((8, 5)),))
    with pytest.raises(TrainingError) as caught:
        Checkpoints(tmp_path, run={"seed": 2, "lr": 0.1, "taps": (0, 1)}).restore(other)
    told = str(caught.value)
    assert "4 problems" in told
    for part in ("seed was 1, now 2", "params.c.weight is not saved", "params.b.weight is saved", "[8, 4]"):
        assert part in told


def test_torn_and_repeated_lines_go(tmp_path: Path) -> None:
    # red when a torn line stays, or measurements after the checkpoint are kept twice
    metrics = Metrics(tmp_path / "log")
    metrics.resume(0)
    for step in (1, 2, 3):
        metrics.add(step, {"loss": step / 2})
    metrics.file.write_text(metrics.file.read_text() + '{"step": 4, "lo')
    metrics.resume(2)
    metrics.add(3, {"loss": 9.0})
    assert [json.loads(line) for line in metrics.file.read_text().splitlines()] == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 1.0},
        {"step": 3, "loss": 9.0},
    ]


def test_a_loss_that_is_no_number_stops_the_run_unsaved(tmp_path: Path) -> None:
    # red when such weights are saved over good ones
    def broken(state, batch):
        return state._replace(step=state.step + 1), {"loss": jnp.where(state.step >= 3, jnp.nan, 1.0)}

    saved = Checkpoints(tmp_path, every=2)
    with pytest.raises(TrainingError, match="loss = nan at update 4"):
        run(broken, fresh(), batches, steps=8, checkpoints=saved, every=100)
    assert saved.steps() == [2]


def test_rates(tmp_path: Path) -> None:
    # red when a phase is off by one update or has another shape; values by hand
    cosine = warmup_cosine(2.0, 4, 12, floor=0.25)
    assert [round(float(cosine(step)), 5) for step in (0, 3, 4, 8, 12, 50)] == [0.5, 2.0, 2.0, 1.25, 0.5, 0.5]
    stable = warmup_stable_decay(1.0, 2, 3, 4)
    assert [round(float(stable(step)), 5) for step in range(11)] == [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    with pytest.raises(TrainingError, match="2 problems"):
        warmup_cosine(-1.0, 8, 4)


def test_the_curve_is_drawn_or_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # red when the error names no way out, or a key that was never measured draws an empty figure
    metrics = Metrics(tmp_path / "log")
    metrics.resume(0)
    metrics.add(1, {"loss": 2.0})
    metrics.add(2, {"loss": 1.0})
    with pytest.raises(TrainingError, match="has no accept"):
        plot(metrics, tmp_path / "curve.png", ["accept"])
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(Exception, match="matplotlib is not installed"):
            plot(metrics, tmp_path / "curve.png")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed here")
    plot(metrics, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
