"""Tool calls: one, several at once, what to say after a result, and when not to call."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_jax.train.data.example import Example, Message, Wording, assistant, user
from kimi_jax.train.data.talk import TOPICS
from kimi_jax.train.data.tool_families import FAMILIES, Family, Said

JOINS = (
    "{first} {second}",
    "{first} And then: {second}",
    "First: {first} Second: {second}",
    "First: {first} And then: {second}",
    "{first} Also: {second}",
)
NO_TOOL = "I have no tool for that."
REQUIRED_OF_ALL = {"type": "object", "additionalProperties": False}


@dataclass(frozen=True)
class Declared:
    """A tool under one of its names.

    Attributes:
      family: which.
      name: declared.
      keys: argument as the sentences name it -> declared name.
      declaration: as a client sends it.
    """

    family: Family
    name: str
    keys: Mapping[str, str]
    declaration: Mapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """One request for one call.

    Attributes:
      text: what the user says.
      name: of the tool.
      arguments: by declared name, in declared order.
      result: what the tool answers.
      final: what the model then says.
    """

    text: str
    name: str
    arguments: dict[str, Any]
    result: str
    final: str


def call(wording: Wording, thinking: bool, effort: str | None) -> Example:
    """One call."""
    offered, asked = _scene(wording, 1)
    return _calling("call", asked[0].text, offered, asked, thinking, effort)


def parallel_calls(wording: Wording, thinking: bool, effort: str | None) -> Example:
    """Two calls in one message."""
    offered, asked = _scene(wording, 2)
    text = wording.one(JOINS).format(first=asked[0].text, second=asked[1].text)
    return _calling("parallel-calls", text, offered, asked, thinking, effort)


def after_result(wording: Wording, thinking: bool, effort: str | None) -> Example:
    """The answer after the results of one or two calls."""
    offered, asked = _scene(wording, wording.chance.choice((1, 1, 2)))
    text = asked[0].text
    if len(asked) == 2:
        text = wording.one(JOINS).format(first=text, second=asked[1].text)
    calling = _calling("result", text, offered, asked, thinking, effort)
    results: list[Message] = [
        {"role": "tool", "tool_call_id": f"call-{at}", "content": one.result} for at, one in enumerate(asked)
    ]
    said = " ".join(one.final for one in asked)
    thoughts = f"Result: {', '.join(one.result for one in asked)}."
    messages = (*calling.messages, *results, assistant(said, thoughts))
    facts = {"finals": [one.final for one in asked], "calls": calling.answer}
    return Example("result", messages, said, facts, tools=calling.tools, thinking=thinking, effort=effort)


def no_call(wording: Wording, thinking: bool, effort: str | None) -> Example:
    """Tools on offer, and nothing to call them for: small talk, or a wish that none of them fits."""
    chance = wording.chance
    offered, asked = _scene(wording, 1)
    if chance.random() < 0.5:
        # the one that is asked for is not there; the wording alone says which half this belongs to
        missing = next(tool for tool in offered if tool.name == asked[0].name)
        left = [tool for tool in offered if tool is not missing] or [_other(wording, offered)]
        text = _asked(chance, missing, wording.one(missing.family.asks)).text
        thoughts, said, needs = "No tool fits.", NO_TOOL, ["no tool"]
    else:
        name = chance.choice(("hello", "who", "thanks", "bye"))
        topic, left = TOPICS[name], offered
        text, thoughts = wording.one(topic.says), topic.thoughts
        said, needs = topic.replies[0], list(topic.needs)
    messages = (user(text), assistant(said, thoughts))
    tools = tuple(tool.declaration for tool in left)
    return Example("no-call", messages, needs, {"needs": needs}, tools=tools, thinking=thinking, effort=effort)


def _calling(
    task: str, text: str, offered: Sequence[Declared], asked: Sequence[Asked], thinking: bool, effort: str | None
) -> Example:
    calls: list[Message] = [
        {
            "id": f"call-{at}",
            "type": "function",
            "function": {"name": one.name, "arguments": json.dumps(one.arguments, ensure_ascii=False)},
        }
        for at, one in enumerate(asked)
    ]
    thoughts = " ".join(f"{one.name}: {_shown(one.arguments)}." for one in asked)
    answer = [{"name": one.name, "arguments": one.arguments} for one in asked]
    messages = (user(text), assistant("", thoughts, calls))
    tools = tuple(tool.declaration for tool in offered)
    return Example(task, messages, answer, {"text": text}, tools=tools, thinking=thinking, effort=effort)


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in arguments.items()
    )


def _scene(wording: Wording, calls: int) -> tuple[list[Declared], list[Asked]]:
    """Up to three tools on offer, and requests for some of them."""
    chance = wording.chance
    families = chance.sample(FAMILIES, chance.randint(1, 3))
    declared, texts = [], []
    for family in families:
        name, ask = wording.template(family.names, family.asks)
        tool = _declared(chance, family, name, declared)
        declared.append(tool)
        texts.append(ask)
    wanted = [chance.randrange(len(declared)) for _ in range(calls)]
    if len(set(wanted)) == len(declared) > 1 or chance.random() < 0.5:
        wanted = [wanted[0]] * calls if chance.random() < 0.5 else wanted
    asked: list[Asked] = []
    for at in wanted:
        one = _asked(chance, declared[at], texts[at])
        while any(one.arguments == other.arguments for other in asked):  # a call is never asked for twice
            one = _asked(chance, declared[at], texts[at])
        asked.append(one)
    return declared, asked


def _other(wording: Wording, offered: Sequence[Declared]) -> Declared:
    used = [tool.family for tool in offered]
    family = wording.chance.choice([family for family in FAMILIES if family not in used])
    name, _ = wording.template(family.names, family.asks)
    return _declared(wording.chance, family, name, offered)


def _declared(chance: random.Random, family: Family, name: str, before: Sequence[Declared]) -> Declared:
    assert all(tool.name != name for tool in before)  # names of families differ
    kept = [key for key, param in family.params.items() if not param.phrase or chance.random() < 0.7]
    keys = {key: chance.choice(family.params[key].names) for key in kept}
    function = {
        "name": name,
        "description": family.about,
        "parameters": REQUIRED_OF_ALL
        | {
            "properties": {keys[key]: family.params[key].schema for key in kept},
            "required": [keys[key] for key in kept if not family.params[key].phrase],
        },
    }
    return Declared(family, name, keys, {"type": "function", "function": function})


def _asked(chance: random.Random, tool: Declared, ask: str) -> Asked:
    said: dict[str, Said] = {}
    words = dict.fromkeys(tool.family.params, "")
    for key in tool.keys:
        param = tool.family.params[key]
        if param.phrase and chance.random() < 0.5:
            continue
        said[key] = param.draw(chance)
        words[key] = param.phrase.format(**{key: said[key].words}) if param.phrase else said[key].words
    arguments = {tool.keys[key]: one.value for key, one in said.items()}
    number = chance.randint(1, tool.family.most)
    if tool.family.computes is not None:
        number = tool.family.computes({key: one.value for key, one in said.items()})
    result = chance.choice(tool.family.results).format(n=number)
    plain = {key: one.words for key, one in said.items()}
    return Asked(ask.format(**words), tool.name, arguments, result, tool.family.final.format(**plain, result=result))
