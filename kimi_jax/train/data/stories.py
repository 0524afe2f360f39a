"""Arithmetic word problems of one, two and three steps, and bare sums.

A story is an opening, some events and a question. The numbers are those of the problem's chain: a start value and one
(sign, number) for each step, whole and small all the way.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from kimi_jax.train.data.example import Example, Wording, assistant, user
from kimi_jax.train.data.words import HOLDERS, PEOPLE, THINGS, counted, his, she
from kimi_jax.train.data.working import result, short, worked

MOST = 300
"""Largest number of a problem."""

# {n} is the number of things the sentence brings, {q} the number alone; {she} begins a sentence
START = (
    "{name} has {n}.",
    "There are {n} on the table of {name}.",
    "{name} starts the day with {n}.",
    "In the morning {name} counts {n}.",
    "{name} owns {n}.",
)
GROUPS = (
    "{name} has {k} {holders} with {n} in each.",
    "There are {k} {holders} in the room of {name}, and each holds {n}.",
    "{name} fills {k} {holders}. {she} puts {n} into each.",
    "In the morning {name} counts {k} {holders} of {n} each.",
    "{name} owns {k} {holders} of {n}.",
)
MORE = (
    "{she} finds {q} more.",
    "{other} gives {name} {q} more.",
    "{she} buys {n}.",
    "Then {q} more arrive.",
    "{she} gets {n} from {other}.",
    "{other} brings {q} more.",
    "{she} wins {q} more.",
)
FEWER = (
    "{she} loses {q} of them.",
    "{she} gives {n} to {other}.",
    "{she} sells {q} of them.",
    "Then {q} of them break.",
    "{other} takes {q} of them.",
    "{she} gives away {n}.",
    "{she} needs {q} of them and uses them up.",
)
PLAIN = (
    "How many {things} does {name} have now?",
    "How many {things} are there now?",
    "How many {things} are there in the end?",
    "What is the number of {things} now?",
    "How many {things} does {name} have in the end?",
)
SHARES = (
    "{she} shares the {things} equally among {k} friends. How many {things} does each friend get?",
    "The {things} go into {k} {holders}, the same number in each. How many {things} are in each?",
    "{k} friends divide the {things} equally. How many {things} does each get?",
    "{she} puts the {things} into {k} equal groups. How many {things} are in one group?",
    "How many {things} does each of {k} friends get if {name} shares them equally?",
)
TIMES = (
    "{third} has {k} times as many {things}. How many {things} does {third} have?",
    "Then the number of {things} becomes {k} times as large. How many {things} are there now?",
    "{k} friends have as many {things} each. How many {things} do the {k} friends have together?",
    "How many {things} does {third} have, who has {k} times as many?",
    "{she} gets the same number on each of {k} days. How many {things} is that in all?",
)
TOGETHER = (
    "{third} has {q}. How many {things} do they have together?",
    "{third} has {q} more {things} than {name}. How many {things} does {third} have?",
    "How many {things} do they have together if {third} has {q}?",
    "{third} adds {q}. How many {things} are there in the end?",
    "How many {things} does {third} have, who has {q} more than {name}?",
)

SUMS = (
    "What is {sum}?",
    "{sum} = ?",
    "How much is {sum}?",
    "What is the result of {sum}?",
    "Work out {sum}, please.",
    "What do you get for {sum}?",
    "Please calculate the result of {sum}.",
    "Tell me the result of {sum}.",
    "Can you calculate {sum}?",
    "Please tell me what {sum} is.",
)

_KINDS = {"+": MORE, "-": FEWER}
_ENDS = {"": PLAIN, "+": TOGETHER, "*": TIMES, "/": SHARES}


class Chain(NamedTuple):
    """A start value and what is done to it, step by step."""

    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def values(self) -> list[int]:
        """The start value and what each step gives."""
        values = [self.start]
        for sign, number in self.steps:
            values.append(result(values[-1], sign, number))
        return values


def chain(chance: random.Random, signs: Sequence[str]) -> Chain:
    """Numbers for some signs: whole, at least 1, at most `MOST`, never a step that changes nothing."""
    while True:
        value = start = chance.randint(2, 20) if signs[0] == "*" else chance.randint(2, 99)
        steps = []
        for sign in signs:
            number = _operand(chance, value, sign)
            if number is None:
                break
            steps.append((sign, number))
            value = result(value, sign, number)
        if len(steps) == len(signs):
            return Chain(start, tuple(steps))


def _operand(chance: random.Random, value: int, sign: str) -> int | None:
    if sign == "+":
        return chance.randint(2, 99) if value <= MOST - 99 else None
    if sign == "-":
        return chance.randint(1, min(value - 1, 99)) if value > 2 else None
    if sign == "*":
        fits = [number for number in range(2, 10) if value * number <= MOST]
    else:
        fits = [number for number in range(2, 10) if value % number == 0 and value > number]
    return chance.choice(fits) if fits else None


def story(wording: Wording, steps: int, thinking: bool, effort: str | None) -> Example:
    """A word problem with a number of steps."""
    chance = wording.chance
    first = "*" if steps > 1 and chance.random() < 0.3 else ""
    last = chance.choice(("", "+", "*", "/")) if steps > 1 or chance.random() < 0.5 else ""
    events = [chance.choice("+-") for _ in range(steps - len(first) - len(last))]
    problem = chain(chance, [*first, *events, *last])
    name, other, third = chance.sample(PEOPLE, 3)
    words: dict[str, Any] = {"name": name, "other": other, "third": third, "she": she(name), "his": his(name)}
    things = words["things"] = chance.choice(THINGS)
    words["holders"] = chance.choice([holder for holder in HOLDERS if holder != things])
    opening, *between, ending = wording.template(
        GROUPS if first else START, *(_KINDS[sign] for sign in events), _ENDS[last]
    )
    numbers = [problem.start, *(number for _, number in problem.steps)]
    if first:
        # k holders of n things: the chain starts with n
        parts = [opening.format(**words, n=counted(numbers[0], things), k=numbers[1])]
        numbers = numbers[2:]
    else:
        parts = [opening.format(**words, n=counted(numbers[0], things))]
        numbers = numbers[1:]
    for sentence, number in zip(between, numbers, strict=False):
        parts.append(sentence.format(**words, n=counted(number, things), q=number))
    parts.append(ending.format(**words, q=numbers[-1] if last else "", k=numbers[-1] if last else ""))
    return _asked(f"{('one', 'two', 'three')[steps - 1]}-step", " ".join(parts), problem, things, thinking, effort)


def bare_sum(wording: Wording, thinking: bool, effort: str | None) -> Example:
    """One operation without a story."""
    problem = chain(wording.chance, [wording.chance.choice("+-*/")])
    sign, number = problem.steps[0]
    written = wording.chance.choice((f"{problem.start} {sign} {number}", f"{problem.start}{sign}{number}"))
    return _asked("sum", wording.one(SUMS).format(sum=written), problem, "", thinking, effort)


def _asked(task: str, question: str, problem: Chain, things: str, thinking: bool, effort: str | None) -> Example:
    values = problem.values
    write = short if thinking and effort == "low" else worked
    lines = [write(value, sign, number) for value, (sign, number) in zip(values, problem.steps, strict=False)]
    working, unit = ".\n".join(lines) + ".", counted(values[-1], things).partition(" ")[2] if things else ""
    content = f"The answer is {values[-1]}{' ' + unit if unit else ''}."
    facts = {"start": problem.start, "steps": problem.steps}
    reply = assistant(content if thinking else f"{working}\n{content}", working)
    return Example(task, (user(question), reply), str(values[-1]), facts, thinking=thinking, effort=effort)
