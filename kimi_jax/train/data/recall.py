"""Finding one line among many: short tables, and notes as long as one likes."""

from kimi_jax.train.data.example import Example, Wording, assistant, user
from kimi_jax.train.data.words import ADJECTIVES, ANIMALS, CITIES, DAYS, FOODS, JOBS, NOUNS, PEOPLE

LEAST = 40
"""Tokens of the shortest notes."""

SHORT = 12
"""Most lines of a table."""

LINE_TOKENS = 8
"""About what a line of notes costs with the vocabulary that is trained for this data."""

PAIRS = (
    "What is the number of the {key}?",
    "Which number has the {key}?",
    "Give me the number of the {key}.",
    "Find the number of the {key}.",
    "What number does the {key} have?",
    "Please look up the {key}.",
    "The {key}: which number is it?",
    "I need the number of the {key}.",
)
BEFORE = (
    "Here are my notes.\n{notes}\n{ask}",
    "{notes}\n\n{ask}",
    "{ask}\n{notes}",
    "Read this.\n{notes}\n{ask}",
    "Notes:\n{notes}\nQuestion: {ask}",
)
LINES = (
    "The {key} has the number {value}.",
    "The number of the {key} is {value}.",
    "{value} is the number of the {key}.",
    "Number {value} is for the {key}.",
)
TABLE = ("{key}: {value}", "{key} = {value}", "{key} {value}", "- {key}: {value}")
FILLERS = (
    "{name} saw a {animal} in {city}.",
    "On {day} {name} buys {food} and {other}.",
    "The {job} goes to {city} on {day}.",
    "{name} likes {food} but not {other}.",
    "A {animal} sleeps behind the {noun}.",
    "It rains in {city}, and the {job} waits.",
    "{name} puts the {noun} beside the {second}.",
    "The {animal} of {name} is old and quiet.",
)


def pairs(wording: Wording, thinking: bool, effort: str | None) -> Example:
    """A short table of things and numbers, and a question for one of them."""
    chance = wording.chance
    chosen = _keys(wording, chance.randint(3, SHORT))
    form = chance.choice(TABLE)
    lines = [form.format(key=key, value=value) for key, value in chosen.items()]
    return _asked(wording, "pairs", lines, chosen, chance.choice(list(chosen)), thinking, effort)


def needle(wording: Wording, thinking: bool, effort: str | None, length: int = 0) -> Example:
    """One line, with a few that look like it, in notes about other things.

    Args:
      wording: what to draw from.
      thinking, effort: mode of the reply.
      length: tokens of the notes, roughly; drawn between 60 and 400 where it is 0.
    """
    chance = wording.chance
    length = length or chance.randint(60, 400)
    count = max(3, length // LINE_TOKENS)
    chosen = _keys(wording, min(4, count - 1))
    lines = [_filler(wording) for _ in range(count - len(chosen))]
    for key, value in chosen.items():
        lines.insert(chance.randint(0, len(lines)), chance.choice(LINES).format(key=key, value=value))
    return _asked(wording, "needle", lines, chosen, chance.choice(list(chosen)), thinking, effort, length)


def _asked(
    wording: Wording,
    task: str,
    lines: list[str],
    chosen: dict[str, str],
    key: str,
    thinking: bool,
    effort: str | None,
    length: int = 0,
) -> Example:
    before, ask = wording.template(BEFORE, PAIRS)
    content = before.format(notes="\n".join(lines), ask=ask.format(key=key))
    line = next(line for line in lines if f"{key}" in line)
    reply = assistant(f"The number of the {key} is {chosen[key]}.", f"{key}: {line}")
    facts = {"lines": lines, "key": key, "length": length}
    return Example(task, (user(content), reply), chosen[key], facts, thinking=thinking, effort=effort)


def _keys(wording: Wording, count: int) -> dict[str, str]:
    """Different things, none part of another, with numbers of three digits."""
    chance = wording.chance
    nouns = chance.sample(NOUNS, count)
    values = chance.sample(range(100, 1000), count)
    return {f"{chance.choice(ADJECTIVES)} {noun}": str(value) for noun, value in zip(nouns, values, strict=True)}


def _filler(wording: Wording) -> str:
    chance = wording.chance
    food, other = chance.sample(FOODS, 2)
    noun, second = chance.sample(NOUNS, 2)
    return chance.choice(FILLERS).format(
        name=chance.choice(PEOPLE),
        animal=chance.choice(ANIMALS),
        city=chance.choice(CITIES),
        day=chance.choice(DAYS),
        job=chance.choice(JOBS),
        food=food,
        other=other,
        noun=noun,
        second=second,
    )
