"""Every known way to get this model wrong is planted once, and the golden data must notice.

The faults come from the fixture's traps and from the checklist of the model text (docs/model.md). Most move the logits of a
golden prompt of seven tokens by more than 1; the few that logits barely show are caught by a golden case of their op.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.checkpoint.header import CheckpointError
from kimi_jax.checkpoint.names import check, sources
from kimi_jax.checkpoint.reader import CheckpointFolder
from kimi_jax.model import abstract
from kimi_jax.ops.kda import api as kda_op
from kimi_jax.ops.moe import api as moe_op
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import Precision
from tests.mutations import attention, experts, residuals
from tests.mutations.plain_kda import PlainKda
from tests.mutations.plant import CUT, error
from tests.parity.models import TINY, TOLERANCE, golden
from tests.parity.trace import config

RIGHT = {**attention.RIGHT, **residuals.RIGHT, **experts.RIGHT}
FAULTS = {**attention.FAULTS, **residuals.FAULTS, **experts.FAULTS}
VISIBLE = 1e-3
"""Ten times what the parity tests accept."""

WORST = (
    "softplus gate",
    "a log from the padding",
    "rotation on the shared dims",
    "silu gate in mla",
    "latent norms with the large eps",
    "layer: block appended before mix",
    "layer: embedding in first sum",
    "norm before the reduction",
    "weights from the biased score",
    "nibbles swapped",
)
"""Checked on every run; they are the ones other engines were caught with."""


@pytest.mark.parametrize("cuts", [(), CUT], ids=["one call", "token by token"])
def test_without_a_fault(cuts):
    # red when the run itself is off, which would make every fault below look caught
    assert error(cuts=cuts) < TOLERANCE


@pytest.mark.parametrize("name", RIGHT)
def test_stand_in_without_a_switch_is_right(name):
    # red when a stand-in is wrong before any switch is thrown
    assert error(RIGHT[name]) < TOLERANCE


@pytest.mark.parametrize("name", WORST)
def test_fault_is_seen(name):
    # red when a change of the data or of the model stops this fault from showing
    assert error(FAULTS[name]) > VISIBLE


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in WORST])
def test_every_fault_is_seen(name):
    # red as above
    assert error(FAULTS[name]) > VISIBLE


def dense_error(change) -> float:
    """Largest error over the golden router cases when ``change(route, logits, bias, k, scale)`` routes."""
    worst = 0.0
    for name in {key.split("/")[1] for key in golden() if key.startswith("router/")} - {"saturated"}:
        case = {key: golden()[f"router/{name}/{key}"] for key in ("logits", "bias", "k", "scale", "dense")}
        logits, bias = jnp.asarray(case["logits"]), jnp.asarray(case["bias"])
        ids, weights = map(np.asarray, change(moe_op.route, logits, bias, int(case["k"]), float(case["scale"])))
        dense = np.zeros_like(case["dense"])
        np.put_along_axis(dense, ids, weights, axis=-1)
        worst = max(worst, float(np.abs(dense - case["dense"]).max()))
    return worst


@pytest.mark.parametrize(
    "change, seen",
    [
        (lambda route, *args: route(*args[:3], renormalize=True, scale=args[3]), False),
        (lambda route, *args: route(*args[:3], renormalize=False, scale=args[3]), True),
        (lambda route, *args: route(*args[:3], renormalize=True, scale=1.0), True),
    ],
    ids=["right", "weights not renormalised", "factor forgotten"],
)
def test_a_common_factor_of_the_weights(change, seen):
    # red when the golden router cases lose it; in logits the norm after the weighted sum hides it
    assert (dense_error(change) > VISIBLE) is seen


@pytest.mark.parametrize("outside", [False, True], ids=["right", "eps outside the root"])
def test_eps_of_the_unit_length(outside):
    # red when the kernel case of tiny vectors no longer tells the two apart
    case = {
        key: jnp.asarray(golden()[f"kda/tiny_qk/{key}"])
        for key in ("q", "k", "v", "f", "b", "A_log", "dt_bias", "S0", "o")
    }
    inputs = [case[key][None] for key in ("q", "k", "v", "f", "b")]
    arguments = [*inputs, case["A_log"], case["dt_bias"], case["S0"][None], jnp.array([len(case["q"])], jnp.int32)]
    run = jax.jit(PlainKda(eps_outside_root=outside), static_argnames="lower_bound")
    out, _ = run(*arguments, lower_bound=float(golden()["kda/tiny_qk/lower_bound"]))
    shipped, _ = kda_op.kda(*arguments, lower_bound=float(golden()["kda/tiny_qk/lower_bound"]))
    scale = np.abs(case["o"]).max()
    assert bool(np.abs(out[0] - case["o"]).max() > VISIBLE * scale) == outside
    assert np.abs(shipped[0] - case["o"]).max() < 1e-5 * scale


@pytest.mark.parametrize(
    "lists",
    [
        ("kda", *config().attention[:-1]),
        (*config().attention[1:], "kda"),
        (*config().attention[:-1], "kda"),
        (*config().attention[:-2], "kda", "mla"),
    ],
    ids=["lists taken as 0-based", "one subtracted twice", "last layer not latent", "last but one not latent"],
)
def test_layer_kinds_follow_the_lists(lists):
    # red when the loader takes what it finds instead of what the lists say
    sizes = dataclasses.replace(config(), attention=lists)
    wanted = sources(abstract(sizes, Precision(), Parallel.single())[1])
    with CheckpointFolder.open(TINY) as folder:
        infos = {name: folder.info(name) for name in folder.names()}
    with pytest.raises(CheckpointError, match="self_attn"):
        check(infos, wanted, "k3-tiny")
