"""Who runs where: places requests in slots, deals pages, keeps prefixes, and takes the newest back when pages run out.

First come, first served. Pages are dealt as sequences grow, not reserved for the longest possible answer; when they run out the
prefix cache gives up its own first, then the newest request of the group goes back to the queue and is run again later
from its prompt and drawn ids, to the same tokens. A group can always hold one full sequence, so the oldest request always goes on.
"""

from bisect import insort

from kimi_jax.engine.buckets import bucket
from kimi_jax.engine.limits import EngineLimits
from kimi_jax.engine.pages import Pool
from kimi_jax.engine.prefix import Match, PrefixTree
from kimi_jax.engine.sequence import Sequence, goals

MOST_ROWS = 8
"""Prompts of one group in one prefill call; together they have at most about one chunk of tokens."""


class Group:
    """What one group of devices has: slots, pages and checkpoints of its own."""

    def __init__(self, slots: int, pages: int, checkpoints: int, page: int) -> None:
        self.slots, self.pages, self.checkpoints = Pool(slots), Pool(pages), Pool(checkpoints)
        self.tree = PrefixTree(page, self.pages, self.checkpoints)

    def has_pages(self, count: int) -> bool:
        """Whether so many pages are free, or kept for later prompts only."""
        return count <= self.pages.free + self.pages.idle

    def take_pages(self, count: int) -> list[int] | None:
        """Free pages, at the cost of kept prefixes; None and no change where there are too few even so."""
        if not self.has_pages(count):
            return None
        while self.pages.free < count and self.tree.evict_pages():
            pass
        return self.pages.take(count)

    def take_checkpoint(self) -> int | None:
        """A free checkpoint, at the cost of the kept one that was used longest ago."""
        if not self.checkpoints.free and not self.tree.evict_checkpoint():
            return None
        taken = self.checkpoints.take(1)
        return taken[0] if taken else None


class Scheduler:
    """The requests of one engine.

    Attributes:
      queue: those that wait, oldest first.
      running: those that hold a slot.
      groups: of devices that hold different sequences.
      preemptions: how often a request was taken back.
      prompt_tokens: of admitted requests, hits included; each counted once.
      hit_tokens: of them, those found in the prefix cache.
    """

    def __init__(self, limits: EngineLimits, capacity: int, groups: int) -> None:
        self.limits, self.capacity = limits, capacity
        counts = (limits.slots // groups, limits.pages // groups, limits.checkpoints // groups)
        self.groups = [Group(*counts, limits.page) for _ in range(groups)]
        self.queue: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = self.prompt_tokens = self.hit_tokens = 0

    def enqueue(self, sequence: Sequence) -> None:
        """Puts a request into the queue by its number."""
        insort(self.queue, sequence, key=lambda waiting: waiting.number)

    # ---- admission

    def admit(self) -> list[tuple[Sequence, int | None]]:
        """Places waiting requests, each with the checkpoint that its slot starts from; None for a new start.

        One that a running prompt will soon leave a longer start lets others pass; one that does not fit does not.
        """
        admitted = []
        for sequence in list(self.queue):
            if not any(group.slots.free for group in self.groups):
                break
            if self._is_behind(sequence):
                continue
            placed = self._place(sequence)
            if placed is None:
                break
            self.queue.remove(sequence)
            self.running.append(sequence)
            admitted.append((sequence, placed[0]))
        return admitted

    def _is_behind(self, sequence: Sequence) -> bool:
        """Whether waiting for a running prompt saves running the same tokens twice."""
        if sequence.behind is not None and sequence.behind.prefilling and sequence.behind.position < sequence.until:
            return True
        sequence.behind = None
        leaders = [running for running in self.running if running.prefilling and running.goals]
        if not leaders:
            return False
        page, length = self.limits.page, sequence.end
        start = max(len(self._match(group, sequence).pages) for group in self.groups) * page
        for leader in leaders:
            shared = min(sequence.common(leader, page), length - 1)
            ends = [end for end in leader.goals if start < end <= shared]
            if ends:
                sequence.behind, sequence.until = leader, ends[-1]
                return True
        return False

    @staticmethod
    def _match(group: Group, sequence: Sequence) -> Match:
        return group.tree.match(sequence.ids[: sequence.end], sequence.marks)

    def _place(self, sequence: Sequence) -> tuple[int | None] | None:
        """Takes a slot and the pages of the prompt in the best group; None where no group has room."""
        page = self.limits.page
        matches = [self._match(group, sequence) for group in self.groups]
        order = sorted(
            (index for index, group in enumerate(self.groups) if group.slots.free),
            key=lambda i: (-len(matches[i].pages), -self.groups[i].slots.free, -self.groups[i].pages.free),
        )
        for index in order:
            group, match = self.groups[index], matches[index]
            neighbours = sum(running.group == index for running in self.running)
            group.pages.share(match.pages)
            if match.checkpoint is not None:
                group.tree.touch(match.checkpoint)
            missing = -(-sequence.end // page) - len(match.pages)
            # one page more for each neighbour, which would otherwise soon take this one's back
            if neighbours and not group.has_pages(missing + neighbours):
                group.pages.drop(match.pages)
                continue
            own = group.take_pages(missing)
            slot = group.slots.take(1)
            assert own is not None and slot is not None
            start = len(match.pages) * page
            sequence.group, sequence.slot, sequence.position = index, slot[0], start
            sequence.pages, sequence.decoding, sequence.behind = [*match.pages, *own], False, None
            if self.limits.checkpoints:
                sequence.goals = goals(sequence.end, start, match.known, page, self.limits.spacing)
            if sequence.hit is None:
                sequence.hit = start
                self.prompt_tokens += len(sequence.ids)
                self.hit_tokens += start
            return (match.checkpoint,)
        return None

    # ---- prefill

    def next_prefill(self, turn: int) -> tuple[list[Sequence], int, int]:
        """Prompts that run together now, rows of each group in the call, and the call's width; longest unserved first."""
        waiting = sorted((s for s in self.running if s.prefilling), key=lambda s: (s.served, s.number))
        if not waiting:
            return [], 0, 0
        chunk = self.limits.chunk
        width = self._width(waiting[0])
        most = rows_of(width, chunk, self.limits.slots // len(self.groups))
        counts = [0] * len(self.groups)
        chosen = []
        for sequence in waiting:
            # a prompt that could fill a wider call waits for one of its own
            if counts[sequence.group] < most and self._width(sequence) <= width:
                counts[sequence.group] += 1
                chosen.append(sequence)
                sequence.served = turn
        return chosen, 1 if max(counts) == 1 else most, width

    def _width(self, sequence: Sequence) -> int:
        """Width of the call that its next tokens need: whole where there are images, so that one program serves them all."""
        chunk = self.limits.chunk
        piece = sequence.piece(chunk)
        return chunk if sequence.sees(piece) else bucket(piece, chunk)

    def reach(self, sequence: Sequence, tokens: int) -> None:
        """Books prompt tokens that a call has run, and where a checkpoint is wanted here, takes one to save to."""
        sequence.position += tokens
        if sequence.goals and sequence.position == sequence.goals[0]:
            checkpoint = self.groups[sequence.group].take_checkpoint()
            here = sequence.goals.pop(0)
            if checkpoint is not None:  # otherwise all of them are being saved to by others
                sequence.saved[here] = checkpoint

    def publish(self, sequence: Sequence) -> None:
        """Lets later prompts start from the checkpoint just saved; only where the scores there are finite."""
        group = self.groups[sequence.group]
        group.tree.publish(sequence.ids, sequence.pages, sequence.saved, sequence.marks)
        sequence.saved = {}

    # ---- decode

    def grow(self, steps: int) -> None:
        """Deals pages for up to ``steps`` more decode steps of every decoding request, oldest first.

        One that gets fewer pauses on the device; for one that could not even take one step the newest of its group goes back.
        """
        page = self.limits.page
        for sequence in sorted((s for s in self.running if s.decoding), key=lambda s: s.number):
            if sequence.slot is None:  # taken back for an older one
                continue
            held = len(sequence.pages)
            end, first = (min(sequence.after(count), self.capacity) for count in (steps, 1))
            wanted, least = -(-end // page) - held, -(-first // page) - held
            while not self._deal(sequence, wanted, least):
                newest = max((s for s in self.running if s.group == sequence.group), key=lambda s: s.number)
                self.preempt(newest)
                if newest is sequence:
                    break

    def _deal(self, sequence: Sequence, wanted: int, least: int) -> bool:
        """Between ``least`` and ``wanted`` more pages for a request; whether there were as many."""
        group = self.groups[sequence.group]
        for count in range(wanted, max(least, 1) - 1, -1):
            pages = group.take_pages(count)
            if pages is not None:
                sequence.pages += pages
                return True
        return least <= 0

    def preempt(self, sequence: Sequence) -> None:
        """Takes a request back into the queue; its drawn ids stay."""
        self.preemptions += 1
        self.release(sequence)
        self.enqueue(sequence)

    def release(self, sequence: Sequence) -> None:
        """Frees all that a running request holds."""
        group = self.groups[sequence.group]
        group.slots.drop([sequence.place])
        group.pages.drop(sequence.pages)
        group.checkpoints.drop(sequence.saved.values())
        sequence.slot, sequence.pages, sequence.saved, sequence.goals = None, [], {}, []
        sequence.position, sequence.decoding = 0, False
        self.running.remove(sequence)


def rows_of(width: int, chunk: int, slots: int) -> int:
    """Most rows of one group in a prefill call of a width, of a group with so many slots."""
    return max(1, min(MOST_ROWS, chunk // width, slots))
