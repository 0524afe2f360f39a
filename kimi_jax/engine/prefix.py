"""Prompts run before, page by page, with recurrent states at some page ends: where a new prompt may start.

A page is known by its ids and by the images that it holds parts of: other images at equal ids are another prompt.

A recurrent state cannot be cut, so a prompt continues only from the end of a page where the state was kept (a checkpoint). Latent
pages before it are shared, never copied: nothing writes below the start of a sequence's own tokens. A tree holds no page that no
checkpoint reaches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kimi_jax.engine.pages import Pool


@dataclass(frozen=True)
class Match:
    """Where a prompt may start.

    Attributes:
      pages: of the tokens before the start; not yet shared with anyone.
      checkpoint: the recurrent state there; None for a start from nothing.
      known: tokens that the tree has seen before in this order, at least those of ``pages``: it was here that an earlier
        prompt went another way.
    """

    pages: tuple[int, ...] = ()
    checkpoint: int | None = None
    known: int = 0


class _Node:
    """One page of one prompt; the way from the root spells all tokens before it."""

    __slots__ = ("checkpoint", "children", "key", "page", "parent", "used")

    def __init__(self, parent: "_Node | None", key: bytes, page: int) -> None:
        self.parent, self.key, self.page = parent, key, page
        self.children: dict[bytes, _Node] = {}
        self.checkpoint: int | None = None
        self.used = 0


class PrefixTree:
    """The prompts that one group of slots has run.

    Args:
      page: tokens of one page.
      pages: the group's latent pages; the tree is one user of each page that it holds.
      checkpoints: the group's recurrent checkpoints; the tree is the only user of those it holds.
    """

    def __init__(self, page: int, pages: Pool, checkpoints: Pool) -> None:
        self._page, self._pages, self._checkpoints = page, pages, checkpoints
        self._root = _Node(None, b"", -1)
        self._holders: dict[int, _Node] = {}  # checkpoint -> the page it follows
        self._clock = 0

    def match(self, ids: Sequence[int], marks: Sequence[bytes] = ()) -> Match:
        """The longest start for a prompt; at least its last token is left to run.

        Args:
          ids: the prompt.
          marks: for each page, what stands for its images (``media.prompt.page_marks``); empty without images.
        """
        node, pages, found = self._root, [], Match()
        for key in self._keys(ids, marks, (len(ids) - 1) // self._page):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            pages.append(node.page)
            if node.checkpoint is not None:
                found = Match(tuple(pages), node.checkpoint)
        return Match(found.pages, found.checkpoint, len(pages) * self._page)

    def touch(self, checkpoint: int) -> None:
        """Marks a checkpoint as used just now."""
        self._clock += 1
        self._holders[checkpoint].used = self._clock

    def publish(
        self, ids: Sequence[int], pages: Sequence[int], saved: Mapping[int, int], marks: Sequence[bytes] = ()
    ) -> None:
        """Adds what a prompt has left behind; takes the checkpoints over, frees those that are there already.

        Args:
          ids: the prompt.
          pages: its pages, in order.
          saved: tokens before it -> checkpoint; each a whole number of pages.
          marks: of its pages, as in :meth:`match`.
        """
        self._clock += 1
        node = self._root
        for index, key in enumerate(self._keys(ids, marks, max(saved, default=0) // self._page)):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(node, key, pages[index])
                self._pages.keep(pages[index])
            node = child
            checkpoint = saved.get((index + 1) * self._page)
            if checkpoint is None:
                continue
            node.used = self._clock
            if node.checkpoint is None:
                node.checkpoint = checkpoint
                self._holders[checkpoint] = node
            else:
                self._checkpoints.drop([checkpoint])

    def evict_pages(self) -> bool:
        """Gives up the end that was used longest ago, one that no request reads if there is one; whether there was any."""
        ends = [node for node in self._holders.values() if not node.children]
        return self._forget([node for node in ends if self._pages.users(node.page) == 1] or ends)

    def evict_checkpoint(self) -> bool:
        """Gives up the checkpoint that was used longest ago; whether there was one."""
        return self._forget(list(self._holders.values()))

    def clear(self) -> None:
        """Gives up everything."""
        while self.evict_checkpoint():
            pass

    def _forget(self, nodes: list[_Node]) -> bool:
        """Drops the checkpoint of the least recently used node, and the pages that no other checkpoint needs."""
        if not nodes:
            return False
        node = min(nodes, key=lambda node: node.used)
        assert node.checkpoint is not None
        del self._holders[node.checkpoint]
        self._checkpoints.drop([node.checkpoint])
        node.checkpoint = None
        while node.parent is not None and not node.children and node.checkpoint is None:
            del node.parent.children[node.key]
            self._pages.give_up(node.page)
            node = node.parent
        return True

    def _keys(self, ids: Sequence[int], marks: Sequence[bytes], count: int) -> list[bytes]:
        """The tokens and images of the first pages as dictionary keys: compared whole, so that no two prompts are confused."""
        blocks = np.asarray(ids[: count * self._page], np.int32).reshape(count, self._page)
        keys = [block.tobytes() for block in blocks]
        for index, mark in enumerate(marks[:count]):
            keys[index] += mark
        return keys
