"""A prompt whose tokens are dealt to devices is read as one device reads it, and decoding goes on from it."""

import re
from functools import cache

import jax
import numpy as np
import pytest

import kimi_jax
from kimi_jax.api import Kimi
from kimi_jax.layers import share
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.layout import Layout, LayoutError, load_layout
from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.configs import config_json, with_indexer
from tests.parity import k31, models
from tests.parity.models import TOLERANCE, Slots, assert_logits
from tests.parity.quick import SIZES, ids

HEADS = dict.fromkeys(("heads", "ffn", "expert_ffn", "vocab"), "tensor")
MESH = {"context": 2, "tensor": 2}


def cut(name: str, mesh: dict[str, int], cache: dict[str, str], interleave: int = 1, **axes: str) -> Layout:
    """Tokens over the axis ``context``."""
    return Layout(name, mesh=mesh, axes={"tokens": "context", **axes}, cache=cache, interleave=interleave)


LAYOUTS = {
    "whole": load_layout("single"),
    # the experts of every device are met by the tokens of all
    "experts": cut("experts", MESH, {}, **HEADS, expert="context"),
    # the devices that share the tokens also share the cached rows: owners write, and rows and keys come to the queries
    "rows": cut("rows", MESH, {"sequence": "context"}, 2, **HEADS),
    # cached rows are shared by devices that have the same tokens
    "beside": cut("beside", MESH, {"sequence": "tensor"}, **HEADS),
    "four": cut("four", {"context": 4}, {"sequence": "context"}, expert="context"),
}
PROMPTS = [ids(length, seed=length) for length in (47, 23, 6)]
"""Read in three calls of 21: in the second one row ends inside the first share, and one has nothing."""

WIDTH = 21


@cache
def pro(layout: str, tmp: str) -> Kimi:
    """A K3.1 Pro model of two layers, KDA with a dense MLP and chosen rows with experts: 8 of up to 47 tokens are kept."""
    return kimi_jax.load(tmp, LAYOUTS[layout], "float32", max_seq_len=64, prefill_chunk=WIDTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    made = tmp_path_factory.mktemp("cut-tokens") / "model"
    # six experts do not divide among four devices
    config = with_indexer(config_json(**{**SIZES, "num_experts": 8}), index_topk=8)
    return str(write_random_checkpoint(made, config, seed=4, tokenizer=False))


@cache
def read(layout: str, folder: str) -> tuple[Slots, list[np.ndarray], list[list[np.ndarray]], list[np.ndarray]]:
    """The rows at last; scores of the prompts, what the cache then held, and scores of three more tokens, one at a time."""
    rows = Slots(pro(layout, folder), len(PROMPTS) + 1)
    scores = rows.run([*PROMPTS, []], WIDTH)
    held = [] if LAYOUTS[layout].parts("sequence") > 1 else [rows.of_row(row) for row in range(4)]
    goes_on = layout in ("whole", "experts", "rows")  # elsewhere a decode step is that of test_cut_sequence.py
    further = rows.run([ids(3, seed=row) for row in range(4)], 1) if goes_on else []
    return rows, scores, held, further


@pytest.mark.parametrize(
    "layout",
    ["experts", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rows", "beside", "four"))],
)
def test_scores_and_states_are_those_of_one_device(folder, layout):
    # red when a row lands at the place of another device's token, a mask counts from the share's beginning, keys come rank by rank,
    # a device keeps its own end of the state, or padding between shares is taken for tokens
    assert share.is_cut(WIDTH, Parallel.of(LAYOUTS[layout]))
    (_, scores, held, after), (_, wanted, states, further) = read(layout, folder), read("whole", folder)
    for got, expected in zip([*scores, *after], [*wanted, *further[: len(after)]], strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
    for got, expected in zip(held, states[: len(held)], strict=True):
        for array, reference in zip(got, expected, strict=True):
            np.testing.assert_allclose(array, reference, rtol=0, atol=TOLERANCE)


def test_every_device_of_the_axis_ends_with_the_same_state(folder):
    # red when each replica adds the fragments up in its own order: their states would drift apart in decoding
    for array in jax.tree.leaves(read("experts", folder)[0].cache):
        shards: dict[str, list[bytes]] = {}
        for shard in array.addressable_shards:
            shards.setdefault(str(shard.index), []).append(np.asarray(shard.data).tobytes())
        assert all(len(set(copies)) == 1 and len(copies) > 1 for copies in shards.values())


COLLECTIVE = re.compile(
    r"= (\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(.*kda_"
)


@pytest.mark.slow
def test_collectives_of_a_recurrent_layer_do_not_grow_with_the_prompt(folder):
    # red when q, k or v of a share travel
    runner = pro("experts", folder).runner
    steps, params, row = runner.steps, runner.params, np.zeros(1, np.int32)
    found = []
    for width in (16, 48):
        lowered = steps.extend.lower(params, steps.new_cache(1), np.zeros((1, width), np.int32), row, row)
        found.append(sorted(COLLECTIVE.findall(lowered.compile().as_text())))
    assert found[0] == found[1]
    assert [name for _, name in found[0]] == ["all-gather"] * 2  # the windows and the fragments


@pytest.mark.slow
@pytest.mark.parametrize("model, rows", [(models, (0, 3, 5, 6)), (k31, (0, 3, 4, 6))], ids=["k3", "k31"])
def test_goldens(model, rows):
    # red when any of the faults above sits in a kind of layer that the quick model lacks
    slots, golden = Slots(model.tiny("sp2-tp4"), len(rows)), model.golden()
    for index, got in zip(rows, slots.run([model.prompt(index) for index in rows], 16), strict=True):
        assert_logits(got, model.logits(index))
    at, wanted = rows.index(int(golden["greedy/prompt"])), golden["greedy/tokens"].tolist()
    drawn = [int(model.logits(rows[at])[-1].argmax())]
    while len(drawn) < len(wanted):
        drawn.append(int(slots.feed([drawn[-1:] if row == at else [] for row in range(len(rows))], 1)[at][-1].argmax()))
    assert drawn == wanted


def test_devices_that_would_sum_other_tokens_are_refused():
    # red when a partial sum of one device's tokens would be added to another's
    with pytest.raises(LayoutError) as caught:
        cut("mixed", MESH, {"pages": "context"}, heads="context", batch="context", expert="context")
    found = "\n".join(caught.value.problems)
    assert 'heads and tokens both lie on mesh axis "context": its devices hold different tokens of a call' in found
    assert 'tokens and batch both lie on mesh axis "context": its devices hold different sequences' in found
    assert "expert and tokens" not in found and "sequence" not in found.replace("different sequences", "")


def test_short_calls_and_drafted_blocks_are_not_cut():
    # red when a decode step is cut: its only token would be one device's
    parallel = Parallel.of(load_layout("sp2-tp4"))
    assert [share.is_cut(width, parallel) for width in (1, 7, 8, 9, 512)] == [False, False, True, True, True]
    assert not share.is_cut(512, Parallel.of(load_layout("tp8")))
