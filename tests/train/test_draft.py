"""Draft training: packed blocks are inference's blocks, data follows the step, gradients stay in the draft, export reads back."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.draft.config_read import load_spec, read_spec
from kimi_jax.draft.dspark import Dspark, describe_context
from kimi_jax.draft.load import load_draft
from kimi_jax.draft.rope import RopeConfig, YarnConfig
from kimi_jax.placement.layout import load_layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.precision import BFLOAT16, FLOAT32, choose_precision
from kimi_jax.train.draft_begin import first_weights, new_draft
from kimi_jax.train.draft_blocks import packed_blocks, score_blocks
from kimi_jax.train.draft_data import DraftBatches, Sample, digest, read_samples
from kimi_jax.train.draft_export import config_json, export_draft
from kimi_jax.train.state import TrainingError
from tests.parity.quick import SIZES, quick

EXACT = choose_precision("float32")


def made(backbone: str, **changes):
    """A draft of one layer and random weights for the small target."""
    from kimi_jax.config import parse
    from kimi_jax.testing.configs import config_json as target_json

    config = parse(target_json(**SIZES))
    spec = new_draft(config, backbone, layers=1, block=4, **changes)
    masters = first_weights(spec, {"model.norm.weight": np.ones(config.hidden)}, EXACT, 1)
    random = np.random.default_rng(2)
    for name in masters:
        if not masters[name].any():
            masters[name] = jnp.asarray(random.normal(size=masters[name].shape), jnp.float32)
    return config, spec, masters


def bound(spec, masters) -> Dspark:
    from kimi_jax.train.draft import bind_draft

    pytest.importorskip("optax", reason="optax is not installed here")

    class Held:
        precision = EXACT

    return bind_draft(Held, spec, masters)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("backbone", "causal"), [("gqa", False), ("mla", True)])
def test_packed_blocks_are_those_of_inference(backbone: str, causal: bool) -> None:
    # red when an anchor sees its own context row or a later one, another anchor's block, or stands at another position
    config, spec, masters = made(backbone, causal=causal)
    draft, random = bound(spec, masters), np.random.default_rng(3)
    taps = jnp.asarray(random.normal(size=(2, 12, len(spec.taps), config.hidden)), jnp.float32)
    embedded = jnp.asarray(random.normal(size=(2, 3, 4, config.hidden)), jnp.float32)
    anchors = jnp.array([[1, 5, 11], [8, 8, 3]])
    graph, state = nnx.split(draft)

    @jax.jit
    def alone(taps, embedded, anchor):
        draft = nnx.merge(graph, state)
        cache = jax.tree.map(
            lambda s: jnp.full(s.shape, 7.0), describe_context(spec.sizes, 1, 16, EXACT), is_leaf=is_spec
        )
        # written as a prompt and then commits write it: only what lies before the anchor
        context = draft.write(draft.fuse(taps[None]), jnp.zeros(1, jnp.int32), anchor[None], cache)
        return draft.block(embedded[None], anchor[None], context)[0]

    @jax.jit
    def all_at_once(taps, embedded, anchors):
        draft = nnx.merge(graph, state)
        return packed_blocks(draft, embedded, anchors, draft.fuse(taps))

    packed = all_at_once(taps, embedded, anchors)
    for row in range(2):
        for place in range(3):
            one = alone(taps[row], embedded[row, place], anchors[row, place])
            np.testing.assert_allclose(packed[row, place], one, atol=2e-5)


def is_spec(value: object) -> bool:
    return hasattr(value, "axes")


def test_forced_scores_are_those_of_the_chain() -> None:
    # red when the bias comes from another token than the one before, or the confidence from another vector
    config, spec, masters = made("gqa")
    draft, random = bound(spec, masters), np.random.default_rng(4)
    hidden = jnp.asarray(random.normal(size=(1, 1, 4, config.hidden)), jnp.float32)
    head = jnp.asarray(random.normal(size=(config.vocab, config.hidden)), jnp.float32)
    tokens = [7, 9, 30, 11]
    forced = jax.jit(lambda h: score_blocks(draft, h, jnp.array([[tokens]]), lambda x: x @ head.T, 0.5))(hidden)
    chosen = [*tokens[1:], 5]
    drafted = draft.chain(
        0.5 * (hidden[0] @ head.T),
        hidden[0],
        jnp.array([7]),
        lambda scores, place: jnp.array([chosen[place]]),
        scale=0.5,
    )
    np.testing.assert_allclose(forced.scores[0], drafted.logits, atol=1e-4)
    assert forced.trust is not None
    np.testing.assert_allclose(jax.nn.sigmoid(forced.trust[0]), drafted.confidence, atol=1e-5)


def test_batches_follow_the_step() -> None:
    # red when a batch depends on those before it, an epoch repeats or leaves out a sequence, or a draft stands in the prompt
    samples = [Sample(tuple(range(10 * n, 10 * n + 9)), prompt=n % 4) for n in range(6)]
    batches = DraftBatches(samples, rows=2, length=8, anchors=5, drafts=3, seed=4)
    later = [batches(step) for step in (2, 1, 0)][::-1]
    again = [DraftBatches(samples, 2, 8, 5, 3, 4)(step) for step in range(3)]
    for one, other in zip(later, again, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    firsts = [int(first) for batch in later for first in batch.ids[:, 0]]
    assert sorted(firsts) == [0, 10, 20, 30, 40, 50]
    for batch in later:
        for row in range(2):
            prompt = samples[batch.ids[row, 0] // 10].prompt
            used = batch.real[row].any(axis=1)
            assert used.sum() == min(5, 8 - 1 - max(prompt, 1))
            assert batch.anchors[row][used].min() >= max(prompt, 1)
            ends = batch.anchors[row][:, None] + 1 + np.arange(3)
            assert np.array_equal(batch.real[row], used[:, None] & (ends < 8))
    assert digest(samples) != digest(samples[::-1])


def test_data_files(tmp_path: Path) -> None:
    # red when a form is not read, or only the first problem of a file is told
    file = tmp_path / "data"
    file.write_text(json.dumps([[1, 2, 3], "abc", {"ids": [4, 5, 6, 7], "prompt": 2}]))
    encode = lambda text: [ord(letter) for letter in text]  # noqa: E731
    wanted = [Sample((1, 2, 3)), Sample((97, 98, 99)), Sample((4, 5, 6, 7), 2)]
    assert read_samples(file, 128, encode) == wanted
    file.write_text('[1, 2, 3]\n\n"abc"\n{"ids": [4, 5, 6, 7], "prompt": 2}\n')
    assert read_samples(file, 128, encode) == wanted
    file.write_text('[1, 2]\n"abc"\n{"ids": [4, 500, 6]}\n{"ids": [1, 2, 3], "prompt": 3}\n{"id": 1}\n[1, 2\n')
    with pytest.raises(TrainingError) as caught:
        read_samples(file, 128, None)
    told = str(caught.value)
    assert "6 problems" in told and all(f"line {number}" in told for number in range(1, 7))


@pytest.mark.parametrize("backbone", ["gqa", "mla"])
def test_an_exported_draft_reads_back(tmp_path: Path, backbone: str) -> None:
    # red when config.json says another draft, a tensor has another name, or a value changes beyond its rounding
    _, spec, masters = made(backbone, causal=backbone == "mla")
    form, rounded = ("bfloat16", BFLOAT16) if backbone == "gqa" else ("float32", FLOAT32)
    export_draft(tmp_path, spec, masters, form)
    read, layout = load_spec(tmp_path), load_layout("single")
    assert read == spec
    loaded = load_draft(tmp_path, read, layout, make_mesh(layout), EXACT)
    assert not loaded.ignored and loaded.spec == spec
    for name, array in masters.items():
        np.testing.assert_array_equal(
            np.asarray(loaded.params[name]), np.asarray(array).astype(rounded).astype(FLOAT32)
        )


def test_every_part_of_a_draft_goes_through_its_config() -> None:
    # red when a field of the draft is not written, as the rotation of a long context
    _, spec, _ = made("gqa", stream="prefix")
    yarn = YarnConfig(16.0, 65536, 24.0, 2.0, truncate=False, mscale=0.7, mscale_all_dim=0.9, attention_factor=1.1)
    other = replace(
        spec,
        rope=RopeConfig(1e6, yarn),
        logit_scale=0.5,
        top_k=9,
        sizes=replace(spec.sizes, confidence="none", eps=1e-4),
        confidence=(False, False),
    )
    read = read_spec(config_json(other), "here")
    assert replace(read, sizes=replace(read.sizes, confidence="none")) == other


def test_sizes_that_do_not_fit_are_told_together() -> None:
    # red when only the first is told
    with pytest.raises(TrainingError) as caught:
        made("gqa", taps=(0, 5), kv_rank=3, heads=3, kv_heads=2, head_dim=3, mask_id=10_000)
    told = str(caught.value)
    assert "5 problems" in told
    for part in ("taps = [0, 5]", "kv_rank is no size", "no multiple", "come in pairs", "mask_id = 10000"):
        assert part in told


def test_what_cannot_be_trained_is_told_together() -> None:
    # red when only the first problem is told, or it is told after compiling
    pytest.importorskip("optax", reason="optax is not installed here")
    from kimi_jax.train.draft import DraftSettings, train_draft

    runner = quick().runner
    _, spec, masters = made("gqa")
    spec = replace(spec, taps=(0, 9), sizes=replace(spec.sizes, vocab=99))
    with pytest.raises(TrainingError) as caught:
        settings = DraftSettings(steps=0, seq_len=9000, lr=-1.0)
        train_draft(runner.steps, runner.params, spec, masters, [Sample((1, 2, 3), 2)], settings)
    told = str(caught.value)
    assert "6 problems" in told
    for part in (
        "steps = 0",
        "seq_len = 9,000",
        "lr = -1.0",
        "taps layers [0, 9]",
        "vocab_size = 99",
        "anything to draft",
    ):
        assert part in told
