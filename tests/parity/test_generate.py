"""Greedy text of k3-tiny: the golden continuation, alone and in every company."""

from functools import cache

import numpy as np
import pytest

from kimi_jax.engine.request import Request
from tests.parity.light import light_compilation as light_compilation
from tests.parity.models import golden, prompt, tiny

pytestmark = pytest.mark.usefixtures("light_compilation")

TOKENS = 16


@cache
def alone(index: int) -> tuple[int, ...]:
    return tiny().generate(prompt(index), TOKENS, ignore_eos=True).token_ids


def golden_tokens() -> tuple[int, tuple[int, ...]]:
    return int(golden()["greedy/prompt"]), tuple(golden()["greedy/tokens"].tolist())


def test_golden_continuation():
    # red for nearly every mutation of tests/mutations, and when the drawn id is fed at the wrong position
    index, expected = golden_tokens()
    answer = tiny().generate(prompt(index), TOKENS, ignore_eos=True)
    assert answer.token_ids == expected
    assert answer.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt(index)), TOKENS)


@pytest.mark.slow
def test_golden_continuation_in_blocks_of_one():
    # red when a block hands over a stale token, position or cache
    index, expected = golden_tokens()
    assert tiny(decode_block=1).generate(prompt(index), TOKENS, ignore_eos=True).token_ids == expected


@cache
def together() -> list[tuple[int, ...]]:
    answers = tiny().generate_batch([prompt(index) for index in range(7)], TOKENS, ignore_eos=True)
    return [answer.token_ids for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(7))
def test_prompts_together_are_each_alone(index):
    # red when a row of a batch sees another's state, position, budget or padding
    assert together()[index] == alone(index)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(7))
def test_first_drawn_id_is_the_best_of_the_golden_scores(index):
    # red when the last chunk of a long prompt is drawn from at another position
    assert together()[index][0] == golden()[f"prompt{index}/logits"][-1].argmax()


def test_pieces_of_a_stream_make_the_same_answer():
    # red when streaming drops, repeats or reorders a piece
    index, expected = golden_tokens()
    pieces = list(tiny().stream(prompt(index), TOKENS, ignore_eos=True))
    assert tuple(token for piece in pieces for token in piece.token_ids) == expected
    assert [piece.finish_reason for piece in pieces] == [None] * (TOKENS - 1) + ["length"]


def test_every_decoded_score_is_golden():
    # red when decoding reads or writes one position off, which greedy text may survive; or when log-probabilities are
    # taken after masking, at a temperature, or of another position
    ids, scores = prompt(6), golden()["prompt6/logits"].astype(np.float64)
    best = scores.max(axis=-1) - np.log(np.exp(scores).sum(axis=-1))
    batch = tiny().runner.open([Request(ids[:3], max_tokens=len(ids))])
    found = list(batch.news())
    for token in ids[3:]:
        batch.feed(np.array([token], np.int32))
        found += batch.news()
    batch.close()
    assert [event.token for event in found] == scores[2:].argmax(axis=-1).tolist()
    np.testing.assert_allclose([event.logprob for event in found], best[2:], rtol=0, atol=1e-4)
