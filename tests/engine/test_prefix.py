"""The tree of prompts: where a new one may start, and what is given up first."""

import numpy as np

from kimi_jax.engine.pages import Pool
from kimi_jax.engine.prefix import Match, PrefixTree
from kimi_jax.engine.sequence import goals

PAGE = 2


class Grown:
    """A tree that prompts are run through: each takes pages of its own and leaves checkpoints where told."""

    def __init__(self, pages: int = 20, checkpoints: int = 8) -> None:
        self.pages, self.checkpoints = Pool(pages), Pool(checkpoints)
        self.tree = PrefixTree(PAGE, self.pages, self.checkpoints)

    def run(self, ids, *ends):
        found = self.tree.match(ids)
        self.pages.share(found.pages)
        mine = self.pages.take(-(-len(ids) // PAGE) - len(found.pages))
        saved = {end: self.checkpoints.take(1)[0] for end in ends}
        pages = [*found.pages, *mine]
        self.tree.publish(ids, pages, saved)
        self.pages.drop(pages)
        return pages, saved


def test_a_prompt_starts_at_the_deepest_checkpoint_and_leaves_a_token_to_run():
    grown = Grown()
    pages, saved = grown.run([1, 2, 3, 4, 5, 6, 7], 2, 6)
    assert grown.tree.match([1, 2, 3, 4, 5, 6, 9]) == Match(tuple(pages[:3]), saved[6], 6)
    # PF-37, red when all of a prompt may be found: its last token must run to draw from it
    assert grown.tree.match([1, 2, 3, 4, 5, 6]) == Match(tuple(pages[:1]), saved[2], 4)
    assert grown.tree.match([1, 2, 3, 4, 9, 9, 9]) == Match(tuple(pages[:1]), saved[2], 4)
    assert grown.tree.match([9, 2, 3, 4]) == Match()
    assert grown.tree.match([1]) == Match()
    assert grown.tree.match(np.array([1, 2, 3])) == Match(tuple(pages[:1]), saved[2], 2)


def test_pages_that_no_checkpoint_reaches_are_not_kept():
    grown = Grown()
    grown.run([1, 2, 3, 4, 5, 6, 7], 4)
    assert (grown.pages.idle, grown.pages.free) == (2, 18)
    grown.run([8, 8, 8, 8])
    assert grown.pages.idle == 2


def test_a_second_checkpoint_of_one_place_is_freed():
    grown = Grown()
    _, first = grown.run([1, 2, 3], 2)
    grown.run([1, 2, 4], 2)
    assert grown.checkpoints.free == 7
    assert grown.tree.match([1, 2, 5]).checkpoint == first[2]


def test_the_least_recently_used_end_goes_first_with_the_pages_only_it_needs():  # PF-36: A, B, A
    grown = Grown()
    a, b = [1, 2, 3, 4, 5, 6, 7], [1, 2, 8, 8, 9]
    grown.run(a, 2, 6)
    grown.run(b, 4)
    grown.tree.touch(grown.tree.match(a).checkpoint)
    assert grown.pages.idle == 4
    assert grown.tree.evict_pages()  # b's: red when the order is that of arrival
    assert (grown.pages.idle, len(grown.tree.match(b).pages), len(grown.tree.match(a).pages)) == (3, 1, 3)
    assert grown.tree.evict_pages()  # a's end, down to the checkpoint at 2
    assert (grown.pages.idle, len(grown.tree.match(a).pages)) == (1, 1)
    assert grown.tree.evict_pages()
    assert not grown.tree.evict_pages()
    assert (grown.pages.free, grown.checkpoints.free) == (20, 8)


def test_pages_that_are_read_go_last():
    grown = Grown()
    grown.run([1, 2, 3], 2)
    grown.run([4, 5, 6], 2)
    reader = grown.tree.match([1, 2, 9]).pages
    grown.pages.share(reader)
    assert grown.tree.evict_pages()
    assert grown.tree.match([1, 2, 9]).pages == reader  # red when only the time of use counts
    assert grown.tree.evict_pages()
    assert grown.pages.users(reader[0]) == 1  # still the reader's


def test_a_checkpoint_is_given_up_inside_a_prompt_without_its_end():
    grown = Grown()
    pages, saved = grown.run([1, 2, 3, 4, 5], 2, 4)
    grown.tree.touch(saved[4])
    assert grown.tree.evict_checkpoint()
    assert grown.tree.match([1, 2, 3, 4, 9]) == Match(tuple(pages[:2]), saved[4], 4)
    assert grown.tree.match([1, 2, 9]) == Match((), None, 2)
    grown.tree.clear()
    assert (grown.pages.free, grown.checkpoints.free) == (20, 8)


class TestGoals:
    def test_the_last_page_end_leaves_a_token(self):
        assert goals(9, 0, 0, 4, 100) == [8]
        assert goals(8, 0, 0, 4, 100) == [4]  # red: 8 would leave nothing to run
        assert goals(4, 0, 0, 4, 100) == []

    def test_where_earlier_prompts_parted(self):
        assert goals(21, 0, 8, 4, 100) == [8, 20]
        assert goals(21, 8, 8, 4, 100) == [20]

    def test_every_so_many_tokens(self):
        assert goals(50, 0, 0, 4, 16) == [16, 32, 48]
        assert goals(50, 20, 20, 4, 16) == [32, 48]  # red when counted from the start of what is run
        assert goals(9, 8, 8, 4, 16) == []
