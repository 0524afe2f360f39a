"""All generators by name, and streams of examples as pure functions of (seed, index)."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count

from kimi_jax.problems import ProblemsError, nearest
from kimi_jax.train.data import lists, recall, sight, stories, talk, tools
from kimi_jax.train.data.example import SPLITS, Example, Split, Wording
from kimi_jax.train.data.passage import passage

Make = Callable[[Wording, bool, str | None], Example]
Mode = tuple[bool, str | None]

TASKS: dict[str, Make] = {
    "sum": stories.bare_sum,
    "one-step": lambda wording, *mode: stories.story(wording, 1, *mode),
    "two-step": lambda wording, *mode: stories.story(wording, 2, *mode),
    "three-step": lambda wording, *mode: stories.story(wording, 3, *mode),
    "sort": lists.sort,
    "count": lists.count,
    "compare": lists.compare,
    "spell": lists.spell,
    "pairs": recall.pairs,
    "needle": recall.needle,
    "passage": passage,
    "call": tools.call,
    "parallel-calls": tools.parallel_calls,
    "result": tools.after_result,
    "no-call": tools.no_call,
    "talk": talk.talk,
    "chat": talk.chat,
    "word": sight.word,
    "number": sight.number,
    "shapes": sight.shapes,
}
"""Name -> generator. ``needle:1000`` is the needle task with notes of about 1,000 tokens."""

PICTURES = frozenset(("word", "number", "shapes"))
"""Tasks that need eyes."""

MODES: tuple[tuple[Mode, float], ...] = (
    ((True, "max"), 0.4),
    ((True, None), 0.25),
    ((True, "high"), 0.06),
    ((True, "low"), 0.06),
    ((False, None), 0.23),
)
"""How replies are asked for, and how often: as every command asks by default, most of all. The message about effort costs 63
tokens of an example, so a good part goes without."""

DEFAULT_MODE: Mode = (True, "max")

WEIGHTS: dict[str, float] = {
    "sum": 3, "one-step": 3, "two-step": 4, "three-step": 2, "sort": 1.5, "count": 1, "compare": 1, "spell": 2, "pairs": 2,
    "needle": 2, "passage": 2, "call": 3, "parallel-calls": 1.5, "result": 1.5, "no-call": 0.7, "talk": 1.5, "chat": 0.8,
    "word": 3, "number": 1.5, "shapes": 1.5,
}  # fmt: skip
"""How often each task comes, in proportion; a starting point for training."""

LONGEST = 1 << 20
"""Most tokens that notes can be asked for."""


class TaskError(ProblemsError):
    """Tasks that do not exist, or weights that are none."""


def task(name: str) -> Make:
    """The generator of a name.

    Raises:
      TaskError: no such task, or a length that cannot be made.
    """
    plain, colon, length = name.partition(":")
    if plain not in TASKS:
        raise TaskError(f"No task is called {name!r}", [f"{plain!r} is none{nearest(plain, TASKS)}"])
    if not colon:
        return TASKS[plain]
    sound = length.isascii() and length.isdecimal() and len(length) < 8
    if plain != "needle" or not sound or not recall.LEAST <= int(length) <= LONGEST:
        problems = [
            f"{length!r}: only needle has a length, from {recall.LEAST} to {LONGEST:,} tokens, such as needle:1000"
        ]
        raise TaskError(f"No task is called {name!r}", problems)
    return partial(recall.needle, length=int(length))


def example(name: str, split: Split, seed: int, index: int, mode: Mode | None = None) -> Example:
    """One example of a task; the same arguments give the same one, on every machine.

    Args:
      name: of the task, such as ``two-step`` or ``needle:1000``.
      split: ``train`` or ``held-out``; they share words, and neither templates nor random numbers.
      seed: of the stream.
      index: of the example in it.
      mode: (thinking, effort) of the reply; drawn from `MODES` where omitted.

    Raises:
      TaskError: no such task or split.
    """
    make = task(name)
    if split not in SPLITS:
        raise TaskError(f"No half of the data is called {split!r}", [f"known: {', '.join(SPLITS)}"])
    chance = random.Random(f"{name}/{split}/{seed}/{index}")
    drawn = chance.choices([drawn for drawn, _ in MODES], [weight for _, weight in MODES])[0]
    return make(Wording(chance, split), *(drawn if mode is None else mode))


def examples(name: str, split: Split, seed: int, mode: Mode | None = None) -> Iterator[Example]:
    """The stream of a task, without end."""
    return (example(name, split, seed, index, mode) for index in count())


@dataclass(frozen=True)
class Mixture:
    """A stream of several tasks, without end: example ``index`` is a pure function of seed and index.

    Attributes:
      weights: task -> how often it comes, in proportion.
      seed: of the stream.
      split: the half of the data.
      mode: (thinking, effort) of all replies; drawn where None.
    """

    weights: Mapping[str, float]
    seed: int
    split: Split = "train"
    mode: Mode | None = None
    _sums: list[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = [f"{name} = {weight}; it must be above 0" for name, weight in self.weights.items() if not weight > 0]
        for name in self.weights:
            try:
                task(name)
            except TaskError as error:
                problems += error.problems
        if problems or not self.weights:
            raise TaskError("This mixture cannot be made", problems or ["it has no task"])
        object.__setattr__(self, "_sums", list(accumulate(self.weights.values())))

    def __call__(self, index: int) -> Example:
        """Example number ``index``."""
        chance = random.Random(f"mixture/{self.split}/{self.seed}/{index}")
        name = chance.choices(list(self.weights), cum_weights=self._sums)[0]
        return example(name, self.split, self.seed, index, self.mode)


def mixture(
    weights: Mapping[str, float] | None = None, seed: int = 0, split: Split = "train", mode: Mode | None = None
) -> Mixture:
    """The stream of some tasks by weight; `WEIGHTS` where omitted.

    Raises:
      TaskError: unknown tasks, or weights that are not above 0; all at once.
    """
    return Mixture(dict(WEIGHTS if weights is None else weights), seed, split, mode)
