"""Which call a tool result answers, and the order of results. Source: chat-format, sections 5.5 and 5.6."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from kimi_jax.text.errors import ChatError, shown

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Placed:
    """A message at its place in the prompt.

    Attributes:
      index: its place in the request, for errors.
      message: as the client sent it.
      tool: for a tool result, the function whose result it is.
      number: for a tool result, its count since the last assistant message, from 1.
    """

    index: int
    message: Message
    tool: str | None = None
    number: int = 0


@dataclass
class _Turn:
    """The calls of the last assistant message and the results since."""

    names: list[str] = field(default_factory=list)
    by_id: dict[str, int] = field(default_factory=dict)
    results: int = 0


def call_names(message: Message) -> list[str]:
    """The function names of an assistant message's calls; empty where a call is malformed."""
    functions = [call.get("function") if isinstance(call, Mapping) else None for call in _calls(message)]
    names = [function.get("name") if isinstance(function, Mapping) else None for function in functions]
    return [name if isinstance(name, str) else "" for name in names]


def placed(messages: Sequence[Message]) -> Iterator[Placed | ChatError]:
    """The messages in the order in which they are rendered; an error in the place of a result that has no name."""
    turn = _Turn()
    for is_tool, run in groupby(enumerate(messages), key=lambda item: item[1].get("role") == "tool"):
        if is_tool:
            yield from _placed_results(list(run), turn)
            continue
        for index, message in run:
            if message.get("role") == "assistant":
                turn = _turn(message)
            yield Placed(index, message)


def _turn(message: Message) -> _Turn:
    names = call_names(message)
    ids: dict[str, int] = {}
    for position, call in enumerate(_calls(message)):
        given = call.get("id") if isinstance(call, Mapping) else None
        if isinstance(given, str):
            ids.setdefault(given, position)
    for position, name in enumerate(names):
        ids.setdefault(f"{name}:{position}", position)
    return _Turn(names, ids)


def _placed_results(run: list[tuple[int, Message]], turn: _Turn) -> Iterator[Placed | ChatError]:
    positions = [_position(message, turn) for _, message in run]
    matched = all(position is not None for position in positions)
    if matched:
        order = sorted(range(len(run)), key=lambda at: positions[at] or 0)
        run, positions = [run[at] for at in order], [positions[at] for at in order]
    for (index, message), position in zip(run, positions, strict=True):
        turn.results += 1
        name = turn.names[position] if matched and position is not None else _own_name(message, turn)
        if name:
            yield Placed(index, message, name, turn.results)
        else:
            yield ChatError(
                f"messages[{index}] is a tool result that no call can be found for: its tool_call_id is "
                f"{shown(_id(message))} and the last assistant message has {len(turn.names)} calls; "
                "the id of one of its calls works, or a name"
            )


def _position(message: Message, turn: _Turn) -> int | None:
    given = _id(message)
    return turn.by_id.get(given) if isinstance(given, str) else None


def _id(message: Message) -> Any:
    return message.get("tool_call_id") or message.get("id")


def _own_name(message: Message, turn: _Turn) -> str | None:
    for key in ("tool", "name"):
        given = message.get(key)
        if isinstance(given, str) and given:
            return given
    return turn.names[turn.results - 1] if turn.results <= len(turn.names) else None


def _calls(message: Message) -> Sequence[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list | tuple) else ()
