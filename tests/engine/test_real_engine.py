"""The engine on the compiled programs of a real model in float32; all that it no longer holds is not a number."""

import dataclasses
from functools import cache

import numpy as np
import pytest

from kimi_jax.engine.engine import Engine
from kimi_jax.engine.limits import EngineLimits
from kimi_jax.engine.request import Request, RequestError
from tests.engine.poison import poison
from tests.parity import quick
from tests.parity.compilations import compilations
from tests.parity.light import light_compilation as light_compilation

pytestmark = pytest.mark.usefixtures("light_compilation")

BAD = 5
"""An id whose embedding is not a number."""

SHARED = quick.ids(20, seed=1)
LIMITS = EngineLimits(slots=4, pages=7, checkpoints=4, queue=64, page=8, chunk=16, spacing=16)


@cache
def engine(layout: str = "single", **sizes) -> Engine:
    runner = quick.with_parameter(quick.quick(layout=layout).runner, "model.embed_tokens.weight", _break)
    limits = dataclasses.replace(LIMITS, **sizes)
    return Engine.build(dataclasses.replace(runner.steps, block=4), runner.params, runner.allowed, limits)


def _break(embedding: np.ndarray) -> np.ndarray:
    embedding[BAD] = np.nan
    return embedding


def requests(seed: int, **every) -> list[Request]:
    """Prompts of all lengths, half of them with a common start, that ask for everything; one cannot be computed."""
    random = np.random.default_rng(seed)
    extras = [{}, {"bias": {7: 4.0, 9: -4.0}}, {"frequency_penalty": 1.5, "repetition_penalty": 1.3}, {"min_p": 0.05}]
    made = []
    for index in range(9):
        ids = [
            *SHARED[: random.integers(8, 21)] * (index % 2),
            *quick.ids(int(random.integers(1, 10)), seed=seed + index),
        ]
        ids = [number for number in ids if number != BAD]
        length = int(random.integers(1, 14))
        if index < 3:  # few pages at first and many in the end
            ids, length = ids[:2], 26
        warm = {"temperature": 1.2, "seed": index, "top_k": 50} if index % 3 else {}
        made.append(Request(ids, max_tokens=length, **warm, **extras[index % 4], **every))
    return [*made, Request([*SHARED[:17], BAD, 9], **every)]


def run(one: Engine, asked: list[Request], cancel: tuple[int, ...] = ()) -> list[tuple]:
    """Ids, logprobs, alternatives and end of every request; some are cancelled on the way."""
    events: dict[int, list] = {one.submit(request): [] for request in asked}
    numbers = list(events)
    while not one.idle:
        for event in one.turn():
            events[event.request].append(event)
        for place in cancel:
            if len(events[numbers[place]]) > 1:
                one.cancel(numbers[place])
        poison(one)
    found = []
    for told in events.values():
        ids = [event.token for event in told if event.token is not None]
        found.append((ids, [event.top[:1] and event.top[0][0] for event in told], told[-1].finish))
    return found


def check(one: Engine, seed: int, **every) -> None:
    asked = requests(seed, **every)
    alone = []
    for request in asked:
        one.forget()
        alone += run(one, [request])
    one.forget()
    before = one.stats()
    together = run(one, asked, cancel=(4, 7))
    for place, (found, expected) in enumerate(zip(together, alone, strict=True)):
        if place in (4, 7):
            assert found[0] == expected[0][: len(found[0])]
        else:
            assert found == expected
    assert together[-1] == ([], [()], "error")
    stats = one.stats()
    assert stats.hit_tokens > before.hit_tokens
    assert (stats.running, stats.pages_used) == (0, 0)
    one.forget()
    assert one.stats().pages_kept == one.stats().checkpoints_used == 0


def test_requests_in_company_draw_what_they_draw_alone():
    # red when a table, a state, a checkpoint, a seed or a count reaches the wrong row, or anything freed is read
    one = engine()
    check(one, 0, logprobs=1)  # so that one program decodes all, and only it is compiled
    assert one.stats().preemptions > 0


def test_a_batch_refuses_what_only_an_engine_does():
    # red when a runner ignores a field in silence
    with pytest.raises(RequestError, match="min_p is not known to a batch"):
        quick.quick().runner.run([Request([1], min_p=0.5)])


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "chunk"), [("single", 32), ("dp2-tp4", 16)])
def test_after_warming_nothing_compiles(layout, chunk):
    # red when a mixture of requests, a length or an option makes another program (PF-64)
    one = engine(layout, pages=20, chunk=chunk)
    one.warm()
    with compilations() as count:
        check(one, 2)
        check(one, 3, logprobs=2)
        assert count() == 0


@pytest.mark.slow
def test_an_engine_draws_what_a_batch_draws():
    # red when slots, pages or checkpoints compute anything else than a cache of one's own
    asked = [Request(quick.ids(length, seed=length), max_tokens=12) for length in (1, 9, 16, 14)]
    found = run(engine("single", pages=20, chunk=32), asked)
    expected = [quick.answers(quick.quick().runner, [request])[0] for request in asked]
    assert [(ids, finish) for ids, _, finish in found] == expected
