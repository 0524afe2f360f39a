"""Questions about drawings: read a word, read a number, count shapes."""

import random
from collections.abc import Mapping
from typing import Any

from kimi_jax.train.data.drawing import PAINTS, PATCH, SHAPES, TOKEN, canvas, shape_mask, stamp
from kimi_jax.train.data.example import ONE_IN, Example, Pixels, Wording, assistant, user
from kimi_jax.train.data.font import HEIGHT, dots
from kimi_jax.train.data.lists import spelled
from kimi_jax.train.data.words import WORDS

LONGEST = 6
"""Letters of a word on a drawing."""

DRAWN = tuple(word for word in WORDS if len(word) <= LONGEST)
READS = (
    "What does it say?",
    "Read the word.",
    "Which word is this?",
    "What is the word in the picture?",
    "Please read the word.",
    "What word do you see?",
    "Read this.",
    "Which word is in the picture?",
)
NUMBERS = (
    "Which number is this?",
    "Read the number.",
    "What is the number in the picture?",
    "What number do you see?",
    "Please read the number.",
    "Which number is in the picture?",
    "What number does it show?",
    "Tell me the number.",
)
COUNTS = (
    "How many {what} are there?",
    "Count the {what}.",
    "How many {what} do you see?",
    "What is the number of {what}?",
    "How many {what} are in the picture?",
    "Please count the {what}.",
    "Tell me how many {what} there are.",
    "Count the {what} in the picture.",
)
PLURALS = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
LIGHT = ((250, 250, 250), (235, 235, 220), (220, 230, 245), (255, 245, 200))
DARK = ((20, 20, 20), (30, 30, 120), (120, 20, 20), (10, 80, 30))


def word(wording: Wording, thinking: bool, effort: str | None) -> Example:
    """A written word. Every fourth word is drawn in the held-out half only: it must be read, not recognised."""
    kept = [one for at, one in enumerate(DRAWN) if (at % ONE_IN == 3) == (wording.split == "held-out")]
    shown = wording.chance.choice(kept)
    thoughts = f"{spelled(shown)}: {shown}."
    image = _written(wording.chance, shown, -(-LONGEST // 2))
    return _asked("word", wording.one(READS), image, shown, shown, thoughts, thinking, effort)


def number(wording: Wording, thinking: bool, effort: str | None) -> Example:
    """A written number of one to four digits."""
    digits = wording.chance.randint(1, 4)
    shown = str(wording.chance.randint(10 ** (digits - 1), 10**digits - 1))
    image = _written(wording.chance, shown, 2)
    return _asked("number", wording.one(NUMBERS), image, shown, shown, f"{spelled(shown)}.", thinking, effort)


def shapes(wording: Wording, thinking: bool, effort: str | None) -> Example:
    """Shapes of two kinds on a grid, and how many of one there are."""
    chance = wording.chance
    columns, rows = chance.randint(2, 4), chance.randint(1, 2)
    kinds = chance.sample(SHAPES, 2)
    cells = [chance.choice((*kinds, None)) for _ in range(columns * rows)]
    image = canvas(columns, rows, chance.choice(LIGHT))
    paint = PAINTS[chance.choice(("red", "green", "blue", "black"))]
    for at, kind in enumerate(cells):
        if kind is not None:
            size = chance.randint(14, 22)
            top, left = (chance.randint(1, TOKEN - 1 - size) for _ in "yx")
            stamp(image, shape_mask(kind, size), at // columns * TOKEN + top, at % columns * TOKEN + left, paint)
    asked, count = kinds[0], cells.count(kinds[0])
    ask = wording.one(COUNTS).format(what=PLURALS[asked])
    seen = ", ".join(kind or "empty" for kind in cells)
    told = f"{count} {asked if count == 1 else PLURALS[asked]}."
    thoughts, facts = f"{seen}: {count}.", {"cells": cells, "asked": asked}
    return _asked("shapes", ask, image, str(count), told, thoughts, thinking, effort, facts)


def _written(chance: random.Random, text: str, columns: int) -> Pixels:
    """Text on a strip, two characters to a place of the prompt; it may start a little further right or down."""
    dark, light = chance.choice(DARK), chance.choice(LIGHT)
    ink, paper = (light, dark) if chance.random() < 0.3 else (dark, light)
    image = canvas(columns, 1, paper)
    room = TOKEN - HEIGHT * 2
    stamp(image, dots(text, 2, PATCH), chance.randint(2, room - 2), chance.randint(0, 4), ink)
    return image


def _asked(
    task: str,
    ask: str,
    image: Pixels,
    answer: str,
    content: str,
    thoughts: str,
    thinking: bool,
    effort: str | None,
    facts: Mapping[str, Any] | None = None,
) -> Example:
    message = user([{"type": "image"}, {"type": "text", "text": ask}])
    reply = assistant(content, thoughts)
    return Example(
        task, (message, reply), answer, facts or {"shown": answer}, (image,), thinking=thinking, effort=effort
    )
