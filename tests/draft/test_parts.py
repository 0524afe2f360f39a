"""Rotary positions, Markov heads and the scheduler against given numbers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.draft import markov, schedule
from kimi_jax.draft.config_rope import read_rope
from kimi_jax.draft.rope import rotation
from tests.draft.golden import case, cases


@pytest.mark.parametrize("name", cases("rope"))
def test_rotation(name):
    # red with the other layout, linear interpolation, max positions for original ones, or a factor in the wrong place
    wanted = case("rope", name)
    problems: list[str] = []
    config = read_rope({"rope_parameters": json.loads(str(wanted["params"]))}, problems)
    assert not problems
    turn = rotation(config, wanted["x"].shape[-1], mla=bool(wanted["mla"]))
    np.testing.assert_allclose(turn.frequencies, wanted["inv_freq"], rtol=1e-6)
    assert turn.factor == pytest.approx(float(wanted["cos_sin_factor"]), rel=1e-6)
    assert turn.softmax == pytest.approx(float(wanted["scale_factor"]), rel=1e-6)
    got = turn(jnp.asarray(wanted["x"])[None], jnp.asarray(wanted["pos"])[None])[0]
    # angles are float32: at position 2**20 they are good to 0.06
    near = wanted["pos"] < 1 << 14
    np.testing.assert_allclose(got[near], wanted["out"][near], atol=4e-3)
    np.testing.assert_allclose(got[wanted["pos"] < 512], wanted["out"][wanted["pos"] < 512], atol=1e-4)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_bias(kind):
    # red when the tables are swapped, the state does not go on, or the parts are joined in another order
    wanted = case("markov", kind)
    joint = markov.Joint(wanted["proj"], wanted["bias"]) if kind != "vanilla" else None
    heads = {"vanilla": markov.vanilla, "gated": markov.gated(joint), "rnn": markov.recurrent(joint)}
    steps, vocab = wanted["out"].shape
    # the drafted ids are forced: token k is the anchor of step k + 1
    forced = [*wanted["tokens"][1:].tolist(), 0]
    drafted = markov.chain(
        jnp.zeros((1, steps, vocab)),
        jnp.asarray(wanted["h"])[None],
        jnp.asarray(wanted["tokens"][:1]),
        jnp.asarray(wanted["w1"]),
        jnp.asarray(wanted["w2"]),
        lambda scores, place: jnp.array([forced[place]]),
        bias=heads[kind],
    )
    np.testing.assert_allclose(drafted.logits[0], wanted["out"], atol=1e-5)


@pytest.mark.parametrize("name", cases("schedule"))
def test_schedule(name):
    # red when a slot is admitted before its prefix, ties are broken otherwise, or the search goes on after a fall
    wanted = case("schedule", name)
    confidence, speed = wanted["conf"], wanted["steps_per_second"]
    lengths = schedule.greedy_prefix(confidence, lambda rows: float(speed[rows]))
    assert lengths.tolist() == wanted["lengths"].tolist()
    alive = schedule.survival(confidence)
    output = sum(1 + alive[r, :n].sum() for r, n in enumerate(lengths))
    assert output * speed[len(lengths) + lengths.sum()] == pytest.approx(float(wanted["theta"]), rel=1e-5)
    for key, expected in wanted.items():
        if key.startswith("budget"):
            assert schedule.admit(confidence, int(key.removeprefix("budget"))).tolist() == expected.tolist()


def test_a_budget_looks_past_a_dip():
    # red when the budget stops at the first fall: program sizes are padded
    speed = {1: 1.0, 2: 0.4, 3: 0.4, 4: 0.4, 5: 0.39}
    assert schedule.best_budget(np.full((1, 4), 0.99), lambda rows: speed[rows]) == 4
    assert schedule.best_budget(np.full((1, 4), 0.1), lambda rows: speed[rows]) == 0
