"""What a completion of an example is worth, and whether an example is right itself."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kimi_jax.train.data.example import Example
from kimi_jax.train.data.schema import misfits

CALLS = frozenset(("call", "parallel-calls"))
"""Tasks whose answer is calls."""

NUMBERS = frozenset(("sum", "one-step", "two-step", "three-step", "count", "compare", "shapes", "pairs", "needle"))
"""Tasks whose answer is the number that the rule of `number_of` finds."""

_NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")


class Call(Protocol):
    """One tool call of a completion."""

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> str: ...


class Completion(Protocol):
    """What a model answered: ``kimi_jax.Completion`` is one."""

    @property
    def text(self) -> str: ...

    @property
    def tool_calls(self) -> Sequence[Call]: ...


@dataclass(frozen=True)
class GivenCall:
    """A call as an example has it; ``arguments`` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Given:
    """A completion as an example has it."""

    text: str
    tool_calls: tuple[GivenCall, ...] = ()


@dataclass(frozen=True)
class Score:
    """What a completion is worth.

    Attributes:
      right: whether it is the answer, in full.
      valid: of a completion with calls, whether each names a declared tool and fits its schema; None without calls.
    """

    right: bool
    valid: bool | None = None


def reference(example: Example) -> Given:
    """The completion that an example teaches."""
    calls = [call["function"] for call in example.reply.get("tool_calls", ())]
    return Given(example.reply["content"], tuple(GivenCall(call["name"], call["arguments"]) for call in calls))


def score(example: Example, completion: Completion) -> float:
    """1.0 for a right completion, 0.0 for any other."""
    return float(scores(example, completion).right)


def scores(example: Example, completion: Completion) -> Score:
    """Right or not, and whether the calls fit their schemas."""
    calls = list(completion.tool_calls)
    valid = all(valid_call(example, call) for call in calls) if calls else None
    if example.task in CALLS:
        return Score([_read(call) for call in calls] == example.answer, valid)
    return Score(not calls and _right(example, completion.text), valid)


def valid_call(example: Example, call: Call) -> bool:
    """Whether a call names a declared tool, with arguments that its schema allows."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in example.tools}
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return False
    return call.name in schemas and not any(misfits(schemas[call.name], arguments))


def number_of(task: str, text: str) -> str | None:
    """The number that a text gives as its answer: the first of a comparison, a table's and the shapes', else the last."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    return found[0] if task in ("compare", "shapes") else found[-1] if task != "count" else _times(text, found)


def _times(text: str, found: list[str]) -> str:
    stated = re.search(r"(\d+) times?\b(?!.*\d+ times?\b)", text, re.DOTALL)
    return stated[1] if stated else found[-1]


def _read(call: Call) -> Any:
    try:
        return {"name": call.name, "arguments": json.loads(call.arguments)}
    except ValueError:
        return None


def _right(example: Example, text: str) -> bool:
    if example.task in NUMBERS:
        return number_of(example.task, text) == example.answer
    words, answer = _words(text), example.answer
    if isinstance(answer, list):  # any of some words
        return any(f" {_words(word)} " in f" {words} " for word in answer)
    if example.task == "passage":
        others = example.facts["others"]
        return _has(words, answer) and not any(_has(words, other) for other in others)
    return words == _words(answer)


def _has(words: str, wanted: str) -> bool:
    return f" {_words(wanted)} " in f" {words} "


def _words(text: str) -> str:
    """Small letters, one space between words, no full stop, question or exclamation mark at the end of one."""
    return " ".join(re.sub(r"[.,!?:]+(?=\s|$)", " ", text.lower()).split())
