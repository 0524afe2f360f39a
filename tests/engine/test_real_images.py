"""Images through the engine on compiled programs, against the same engine reading their rows from its embedding as text."""

import dataclasses
from functools import cache

import numpy as np
import pytest

from kimi_jax.api import Kimi
from kimi_jax.engine.engine import Engine
from kimi_jax.engine.limits import EngineLimits
from kimi_jax.engine.request import ImageSpan, Request
from tests.engine.test_real_engine import run
from tests.parity import quick
from tests.parity.compilations import compilations
from tests.parity.joined import joined
from tests.parity.light import light_compilation as light_compilation

pytestmark = pytest.mark.usefixtures("light_compilation")

PLACE = 7
"""An id that stands for rows."""

LENGTHS = (9, 9, 2)
"""Rows of three images; the first two can take one another's place."""

SPARE = 480
"""The first of those ids whose embeddings the text engine holds the rows in."""

LIMITS = EngineLimits(slots=4, pages=8, checkpoints=4, queue=64, page=8, chunk=16, spacing=8)


def rows(width: int) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.standard_normal((length, width)).astype(np.float32) for length in LENGTHS]


def spare(image: int) -> list[int]:
    first = SPARE + sum(LENGTHS[:image])
    return list(range(first, first + LENGTHS[image]))


@cache
def engines(kimi: Kimi, **sizes) -> tuple[Engine, Engine]:
    """One that is given images, and one that reads them as text, on the same programs."""

    def change(table: np.ndarray) -> np.ndarray:
        every = np.concatenate(rows(table.shape[1]))
        table[SPARE : SPARE + len(every)] = every
        return table

    runner, allowed = kimi.runner, kimi.runner.allowed.copy()
    allowed[SPARE:] = False
    limits = dataclasses.replace(LIMITS, **sizes)
    seeing = Engine.build(dataclasses.replace(runner.steps, block=4), runner.params, allowed, limits, images=True)
    text = quick.with_parameter(runner, "model.embed_tokens.weight", change)
    return seeing, Engine(seeing._programs, text.params, allowed, limits)


def prompts() -> list[list[int | tuple[int]]]:
    """Ids, and images by their number: alone, cut by borders, behind one another, at equal ids, beside text."""
    random = np.random.default_rng(1)
    words = [number for number in random.integers(8, SPARE, 40).tolist()]
    return [
        words[:2],
        [(2,), *words[3:5]],
        [(2,), words[5]],
        [*words[:6], (0,), *words[6:9]],
        [*words[:6], (1,), *words[6:9]],  # the same ids
        [*words[:6], (0,), *words[9:12]],  # parts from the last but one behind its image
        [(2,), (0,), *words[:2]],
        [*words[:6], *[PLACE] * 9, *words[6:9]],  # the same ids and no image
        [*words[:6], (0,), *words[6:9], (2,), words[9]],
        words[20:37],
    ]


def asked(width: int, *, images: bool) -> list[Request]:
    made = []
    for seed, parts in enumerate(prompts()):
        ids: list[int] = []
        spans = []
        for part in parts:
            if not isinstance(part, tuple):
                ids.append(part)
            elif images:
                spans.append(ImageSpan(len(ids), rows(width)[part[0]], bytes([part[0]])))
                ids += [PLACE] * LENGTHS[part[0]]
            else:
                ids += spare(part[0])
        warm = {"temperature": 1.0, "seed": seed} if seed % 2 else {}
        length = 24 if seed < 3 else 6  # few pages at first and many in the end
        made.append(Request(ids, max_tokens=length, logprobs=1, images=spans, **warm))
    return made


def check(kimi: Kimi, **sizes) -> tuple[Engine, int]:
    """Runs all of it together, twice, and each alone as text. Gives the engine and the tokens found the second time."""
    seeing, text = engines(kimi, **sizes)
    width = kimi.config.hidden
    expected = []
    for request in asked(width, images=False):
        text.forget()
        expected += run(text, [request])
    seeing.forget()
    cold = run(seeing, asked(width, images=True))
    before = seeing.stats().hit_tokens
    warm = [found for request in asked(width, images=True) for found in run(seeing, [request])]
    assert cold == expected
    assert warm == expected  # red when a hit is not what was run
    assert len({tuple(ids) for ids, *_ in expected[3:6]}) == 3
    return seeing, seeing.stats().hit_tokens - before


@pytest.mark.slow
def test_images_in_company_draw_what_their_rows_draw_as_text():
    # red when a row reaches another place, slot or chunk, is lost at a border or with a slot that is taken back, or when the prefix
    # of another image is taken
    engine, found = check(quick.quick(), chunk=5, pages=7)
    assert found > 0 and engine.stats().preemptions > 0


@pytest.mark.slow
def test_whole_chunks():
    # red when a call that holds all of an image, or several, is not the same
    check(quick.quick(), chunk=16, pages=16)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp8", "dp2-tp4"])
def test_on_eight_devices(layout):
    # red when rows of images are cut, summed over devices, or dealt to the wrong group
    check(joined(layout=layout, max_seq_len=32), pages=16)


@pytest.mark.slow
def test_after_warming_nothing_compiles():
    # red when an image, its size, its place or its company makes another program (PF-64)
    engine, _ = engines(quick.quick(), chunk=32, pages=20)
    engine.warm()
    width = quick.quick().config.hidden
    with compilations() as count:
        run(engine, asked(width, images=True))
        run(engine, [dataclasses.replace(request, logprobs=0) for request in asked(width, images=True)])
        assert count() == 0
