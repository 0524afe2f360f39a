"""Ways to get serving wrong, each planted once: the watched life of an engine must notice every one.

What the properties promise is worth as much as what this shows: a fault that no test sees would be a test that cannot fail.
"""

from dataclasses import replace

import numpy as np
import pytest

from kimi_jax.engine import batch
from kimi_jax.engine.engine import Engine
from kimi_jax.engine.limits import EngineLimits
from kimi_jax.engine.pages import Pool
from kimi_jax.engine.prefix import Match, PrefixTree
from kimi_jax.engine.request import Request
from kimi_jax.engine.scheduler import Scheduler
from kimi_jax.layers.image_rows import ImageRows
from tests.engine.fake_device import NAN, PLACE, FakeDevice, image
from tests.engine.life import PAGE, PHRASES, Life, Parity


def busy(groups: int) -> None:
    """Prompts that share starts, long answers on few pages, cancels, images, and every kind of sampling."""
    life = Life(EngineLimits(4 * groups, 8 * groups, 3 * groups, queue=64, page=PAGE, chunk=3, spacing=8), groups)
    extras = [
        {"frequency_penalty": 0.5},
        {"grammar": Parity(9)},
        {"temperature": 1.0},
        {"bias": {20: 3.0}, "logprobs": 2},
    ]
    life.cancel(life.submit(Request(PHRASES[0][:20])))
    half_run = life.submit(Request(PHRASES[0][:20]))
    for _ in range(4):
        life.turn()
    life.cancel(half_run)
    for round in range(3):
        for index in range(4):
            prompt = [*PHRASES[index % 2][: 13 - 4 * round], 20 + index]
            life.submit(Request(prompt, max_tokens=4 + index, **extras[(round + index) % 4]))
            life.submit(Request([30 + index], max_tokens=20, seed=index, **extras[index]))
        if round:  # two prompts of equal ids and other images, and an end that only one has
            ids = [*PHRASES[0][:2], *[PLACE] * 9, *PHRASES[0][2:4]]
            for name in (0, 1, 0):
                images = [image(2, 5, name), image(7, 4, 1)]
                life.submit(Request(ids, max_tokens=8, images=images, **extras[name]))
            life.submit(Request(ids, max_tokens=8))
        life.submit(Request([*PHRASES[2][:5], NAN, *PHRASES[2][:4]], max_tokens=9))
        for _ in range(4):
            life.turn()
        life.cancel(9 * round + 5)
        life.cancel(9 * round + 9 + 4 * (round > 0))
    life.run()
    for prompt in (PHRASES[1][:15], [*PHRASES[1][:6], 40]):  # parts where no checkpoint is
        life.submit(Request(prompt, max_tokens=3))
        life.run()
    assert life.engine.stats().preemptions > 0
    assert life.engine.stats().hit_tokens > 0
    life.check()


def no_restore(plant):
    plant.setattr(FakeDevice, "restore", lambda self, cache, checkpoints, slots: cache)


def always_from_nothing(plant):
    restore = FakeDevice.restore
    plant.setattr(FakeDevice, "restore", lambda s, cache, kept, slots: restore(s, cache, np.full_like(kept, -1), slots))


def no_count(plant):
    plant.setattr(FakeDevice, "count", lambda self, cache, *given: cache)


def shared_pages_not_counted(plant):
    plant.setattr(Pool, "share", lambda self, places: None)


def pages_not_freed(plant):
    release = Scheduler.release

    def leak(self, sequence):
        self.groups[sequence.group].pages.share(sequence.pages[-1:])
        release(self, sequence)

    plant.setattr(Scheduler, "release", leak)


def unpublished_checkpoints_not_freed(plant):
    release = Scheduler.release

    def leak(self, sequence):
        sequence.saved.clear()
        release(self, sequence)

    plant.setattr(Scheduler, "release", leak)


def checkpoint_one_page_late(plant):
    reach = Scheduler.reach

    def late(self, sequence, tokens):
        reach(self, sequence, tokens)
        sequence.saved = {end + PAGE: place for end, place in sequence.saved.items()}

    plant.setattr(Scheduler, "reach", late)


def start_past_the_checkpoint(plant):
    match = PrefixTree.match

    def far(self, ids, marks):
        found = match(self, ids, marks)
        node, pages = self._root, []
        for key in self._keys(ids, marks, found.known // PAGE):
            node = node.children[key]
            pages.append(node.page)
        return Match(tuple(pages), found.checkpoint, found.known)

    plant.setattr(PrefixTree, "match", far)


def broken_prompts_are_kept(plant):
    news = Engine._news

    def keep(self, sequence, *given):
        if sequence.saved:
            self._scheduler.publish(sequence)
        yield from news(self, sequence, *given)

    plant.setattr(Engine, "_news", keep)


def drawn_ids_lost_when_taken_back(plant):
    preempt = Scheduler.preempt

    def forget(self, sequence):
        del sequence.ids[len(sequence.ids) - sequence.drawn :]
        preempt(self, sequence)

    plant.setattr(Scheduler, "preempt", forget)


def budget_forgotten_when_taken_back(plant):
    preempt = Scheduler.preempt

    def forget(self, sequence):
        sequence.drawn = 0
        preempt(self, sequence)

    plant.setattr(Scheduler, "preempt", forget)


def seeds_of_the_neighbour(plant):
    sampling = batch.sampling_of

    def turned(placed, rows):
        found = sampling(placed, rows)
        return found._replace(temperature=np.roll(found.temperature, 1), seed=np.roll(found.seed, 1))

    plant.setattr(batch, "sampling_of", turned)


def the_plain_program_for_all(plant):
    plant.setattr(batch, "kind_of", lambda requests: "random")


def blocks_run_past_a_grammar(plant):
    plant.setattr(Engine, "_steps", lambda self: 4)


def pages_of_another_group(plant):
    decode_rows = batch.decode_rows

    def turned(placed, slots, table):
        tables, rows = decode_rows(placed, slots, table)
        return np.roll(tables, 1, axis=0), rows

    plant.setattr(batch, "decode_rows", turned)


def other_images_count_as_the_same(plant):
    # in the tree
    plant.setattr(
        PrefixTree, "_keys", lambda self, ids, marks, count, keys=PrefixTree._keys: keys(self, ids, (), count)
    )


def an_image_begins_anew_in_every_chunk(plant):
    chunk_rows = batch.chunk_rows

    def anew(spans, rows, start, count):
        moved = [replace(span, start=max(span.start, start)) for span in spans]
        return chunk_rows(moved, rows, start, count)

    plant.setattr(batch, "chunk_rows", anew)


def images_lost_when_taken_back(plant):
    preempt = Scheduler.preempt

    def forget(self, sequence):
        sequence.spans = ()
        preempt(self, sequence)

    plant.setattr(Scheduler, "preempt", forget)


def images_of_the_neighbour(plant):
    image_rows = batch.image_rows

    def turned(*given):
        found = image_rows(*given)
        return found and ImageRows(np.roll(found.rows, 1, axis=0), np.roll(found.here, 1, axis=0))

    plant.setattr(batch, "image_rows", turned)


def a_cancelled_request_stays(plant):
    plant.setattr(Engine, "cancel", lambda self, number: None)


FAULTS = {
    name: fault
    for name, fault in list(globals().items())
    if callable(fault) and getattr(fault, "__code__", None) and fault.__code__.co_varnames[:1] == ("plant",)
}


@pytest.mark.parametrize("groups", [1, 2])
def test_without_a_fault(groups):
    # red when the life itself is wrong, which would make every fault below look caught
    busy(groups)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(name, monkeypatch):
    # red when a change of the engine or of the life stops this fault from showing
    FAULTS[name](monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        busy(2)
