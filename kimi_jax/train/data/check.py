"""Whether an example is right: its answer found again from the problem behind the words, its working read as arithmetic."""

import re
from collections.abc import Iterator

from kimi_jax.train.data.example import Example
from kimi_jax.train.data.lists import spelled
from kimi_jax.train.data.score import CALLS, reference, scores, valid_call
from kimi_jax.train.data.working import result, wrong_equations, wrong_working


def faults(example: Example) -> list[str]:
    """Everything wrong with an example; empty for a good one."""
    return list(_faults(example))


def _faults(example: Example) -> Iterator[str]:
    said = reference(example)
    if not scores(example, said).right:
        yield f"its own reply does not score: {said}"
    recomputed = _recomputed(example)
    if recomputed is not None and recomputed != example.answer:
        yield f"its answer is {example.answer!r}; the problem gives {recomputed!r}"
    for message in example.messages:
        if message["role"] != "assistant":
            continue
        texts = (message["content"], message["reasoning_content"]) if example.task not in ("call", "result") else ()
        yield from (f"{equation} does not hold" for text in texts for equation in wrong_equations(text))
        yield from (f"{working} does not add up" for text in texts for working in wrong_working(text))
        if message["content"] == "" and not message.get("tool_calls"):
            yield "a reply says nothing"
    yield from (f"a call does not fit: {call}" for call in said.tool_calls if not valid_call(example, call))
    if (example.task in CALLS) != bool(said.tool_calls):
        yield f"a {example.task} example with {len(said.tool_calls)} calls"
    places = sum(
        part["type"] == "image" for message in example.messages for part in message["content"] if isinstance(part, dict)
    )
    if places != len(example.images):
        yield f"{places} image parts for {len(example.images)} images"
    if "inner" in example.facts:
        yield from _faults(example.facts["inner"])


def _recomputed(example: Example) -> str | None:
    """The answer from the facts, by another way than the generator's; None where there is nothing to compute."""
    facts = example.facts
    match example.task:
        case "sum" | "one-step" | "two-step" | "three-step":
            value = facts["start"]
            for sign, number in facts["steps"]:
                value = result(value, sign, number)
            return str(value)
        case "sort":
            key = int if facts["kind"] == "numbers" else str
            return ", ".join(sorted(facts["items"], key=key))
        case "count":
            return str(sum(item == facts["item"] for item in facts["items"]))
        case "compare":
            ordered = sorted((facts["left"], facts["right"]))
            return str(ordered[-1] if facts["more"] == "larger" else ordered[0])
        case "spell":
            return spelled(facts["word"]) if "-" in facts["to"] else facts["word"]
        case "pairs" | "needle":
            holding = [line for line in facts["lines"] if re.search(rf"\b{facts['key']}\b", line)]
            return ", ".join(number for line in holding for number in re.findall(r"\d+", line))
        case "passage":
            told = facts["told"][facts["kind"]]
            return told[facts["name"]] if example.answer not in told else _only(told, told[facts["name"]])
        case "shapes":
            return str(sum(cell == facts["asked"] for cell in facts["cells"]))
        case "result":
            return " ".join(facts["finals"])
    return None


def _only(told: dict[str, str], value: str) -> str:
    return ", ".join(name for name, own in told.items() if own == value)
