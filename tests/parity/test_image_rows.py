"""Given image rows in every program: the same as a model whose embedding holds those rows, told by ids instead."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from kimi_jax.layers.image_rows import ImageRows
from kimi_jax.media.prompt import Span, call_rows, chunk_rows
from tests.parity.compilations import compilations
from tests.parity.joined import VOCAB, joined
from tests.parity.light import light_compilation as light_compilation
from tests.parity.models import GARBAGE, TOLERANCE
from tests.parity.quick import with_parameter
from tests.slot_pool import Pool, scores

pytestmark = pytest.mark.usefixtures("light_compilation")

EMBED = 48
TOKENS = (5, 3)
SPARE = VOCAB - sum(TOKENS)
"""First of the ids whose embeddings the oracle holds image rows in; no prompt has them."""

PLACEHOLDER = 7
ROWS = [np.random.default_rng(count).standard_normal((count, EMBED)).astype(np.float32) for count in TOKENS]
PROMPT = [30, 31, *[PLACEHOLDER] * 5, 32, *[PLACEHOLDER] * 3, 33, 34]
SPANS = (Span(2, 5, b"a"), Span(8, 3, b"b"))


def told() -> list[int]:
    """The prompt with the spare ids in the place of the placeholders."""
    spare = iter(range(SPARE, VOCAB))
    return [next(spare) if token == PLACEHOLDER else token for token in PROMPT]


@cache
def oracle() -> np.ndarray:
    """Scores of that prompt by the model with the image rows in its embedding."""

    def change(table: np.ndarray) -> np.ndarray:
        table[SPARE:] = np.concatenate(ROWS)
        return table

    return with_parameter(joined().runner, "model.embed_tokens.weight", change).logits(told())


def part(start: int, count: int, rows: Sequence[np.ndarray] = ROWS) -> Any:
    """The image rows of some positions; what lies between them is poison."""
    found = chunk_rows(SPANS, rows, start, count)
    return found and (np.where(found[1][:, None], found[0], np.nan).astype(np.float32), found[1])


def run(layout: str, lengths: Sequence[int], rows: Sequence[np.ndarray] = ROWS) -> np.ndarray:
    """Scores of the prompt in chunks of some lengths, in the last of two rows; the text without images runs in the other."""
    kimi = joined(layout=layout)
    steps, cache = kimi.runner.steps, kimi.runner.steps.new_cache(2)
    at, found = 0, []
    for length in lengths:
        grid = np.full((2, 16), GARBAGE, np.int32)
        grid[0, :length], grid[1, :length] = told()[at : at + length], PROMPT[at : at + length]
        given = [grid, np.full(2, at, np.int32), np.full(2, length, np.int32)]
        images = call_rows([None, part(at, length, rows)], 16)
        if images is None:
            out, cache = steps.score(kimi.runner.params, cache, *given)
        else:
            out, cache = steps.score_images(kimi.runner.params, cache, *given, ImageRows(*images))
        found.append(np.asarray(out)[1, :length])
        at += length
    return np.concatenate(found)


@pytest.mark.parametrize(
    "layout, lengths",
    [("single", [13]), ("single", [1] * 13), ("single", [4, 1, 5, 3]), ("tp8", [4, 9]), ("dp2-tp4", [4, 9])],
)
def test_scores_are_those_of_a_model_that_holds_the_rows(layout, lengths):
    # red when rows go to other positions or sequences, are summed over the devices that cut the vocabulary, or scaled
    np.testing.assert_allclose(run(layout, lengths), oracle(), rtol=0, atol=TOLERANCE)


def test_the_order_of_images_matters():
    # red when rows are sorted, or pooled, on the way
    swapped = np.concatenate(ROWS)[::-1]
    assert np.abs(run("single", [13], [swapped[:5], swapped[5:]])[2:] - oracle()[2:]).max() > 0.1


def log_softmax(rows: np.ndarray) -> np.ndarray:
    rows = rows - rows.max(-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


@pytest.mark.slow
def test_slots():
    # red when the program over slots gives rows to another slot of the call, or text beside pictures changes
    rows = Pool(joined(), top=VOCAB, page=8, pages=24)
    rows.start(0, 2)
    expected = log_softmax(oracle())
    with compilations() as count:
        for start, length in ((0, 4), (4, 5), (9, 4)):
            pieces = {2: told()[start : start + length], 0: PROMPT[start : start + length]}
            found = rows.feed(pieces, last=start == 9, images={0: part(start, length)})
            before = count()
            np.testing.assert_allclose(scores(found, 1), expected[start + length - 1], rtol=0, atol=TOLERANCE)
        rows.start(0)
        rows.feed({0: PROMPT[:9]}, images={0: part(0, 9)})
        assert count() == before  # another length is no other program
