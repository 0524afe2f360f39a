"""What tool calls of a served model are worth: each is checked against the schema that its request gave."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_jax.evals.client import Client, ServerError, ask_each
from kimi_jax.evals.tool_cases import kinds


@dataclass(frozen=True)
class Verdict:
    """What one answer is worth.

    Attributes:
      kind: how the request asked for a call.
      finish: the server's finish reason; None where the request failed.
      calls: tool calls in the answer.
      faults: what is wrong, each as (class, explanation).
    """

    kind: str
    finish: str | None
    calls: int = 0
    faults: tuple[tuple[str, str], ...] = ()


def check_all(
    cases: Sequence[dict[str, Any]], url: str, key: str | None, options: dict[str, Any], *, clients: int, stream: bool
) -> list[Verdict]:
    """Asks every case, some at once, and judges the answers, in order of the cases."""
    bodies = [_body(case, options) for case in cases]
    named = list(zip(bodies, kinds(list(cases)), strict=True))

    def ask(client: Client, pair: tuple[dict[str, Any], str]) -> Verdict:
        return _ask(client, *pair, stream)

    return ask_each(named, clients, url, key, ask)


def _body(case: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The request of a case, with the options of this evaluation in the place of its own."""
    return {key: value for key, value in case.items() if key not in ("stream", "stream_options")} | options


def _ask(client: Client, body: dict[str, Any], kind: str, stream: bool) -> Verdict:
    try:
        if stream:
            message, finish = joined(client.stream("/v1/chat/completions", body))
        else:
            choice = client.post("/v1/chat/completions", body)["choices"][0]
            message, finish = choice["message"], choice["finish_reason"]
    except ServerError as error:
        return Verdict(kind, None, 0, (("request failed", str(error)),))
    except (KeyError, IndexError, TypeError) as error:
        return Verdict(kind, None, 0, (("malformed answer", f"{type(error).__name__}: {error}"),))
    return judge(body, kind, message, finish)


def joined(chunks: Iterator[dict[str, Any]]) -> tuple[dict[str, Any], str | None]:
    """A streamed message put together again: its tool calls, and the finish reason."""
    calls: dict[int, dict[str, Any]] = {}
    finish = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            finish = choice.get("finish_reason") or finish
            for delta in choice["delta"].get("tool_calls") or ():
                call = calls.setdefault(delta["index"], {"id": None, "function": {"name": "", "arguments": ""}})
                call["id"] = delta.get("id") or call["id"]
                for key, text in (delta.get("function") or {}).items():
                    call["function"][key] += text or ""
    return {"tool_calls": [calls[place] for place in sorted(calls)]}, finish


def judge(body: dict[str, Any], kind: str, message: dict[str, Any], finish: str | None) -> Verdict:
    """What an answer to a request is worth."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in body["tools"]}
    calls = message.get("tool_calls") or []
    faults = [fault for call in calls for fault in _call_faults(call, schemas)]
    ids = [call.get("id") for call in calls]
    if len(set(ids)) < len(ids) or not all(ids):
        faults.append(("call id missing or twice", str(ids)))
    choice = body.get("tool_choice")
    if choice is not None and choice not in ("auto", "none") and not calls and finish != "length":
        faults.append(("no call", f"tool_choice {choice} and finish_reason {finish}"))
    if isinstance(choice, dict):
        wanted = choice["function"]["name"]
        others = [call["function"]["name"] for call in calls if call["function"]["name"] != wanted]
        faults += [("another tool", f"{other} instead of {wanted}") for other in others]
    if choice == "none" and calls:
        faults.append(("call with tool_choice none", calls[0]["function"]["name"]))
    if finish != "length" and (finish == "tool_calls") != bool(calls):
        faults.append(("finish reason", f"{finish} with {len(calls)} calls"))
    return Verdict(kind, finish, len(calls), tuple(faults))


def _call_faults(call: dict[str, Any], schemas: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for

    name, text = call["function"]["name"], call["function"]["arguments"]
    if name not in schemas:
        yield "unknown tool", str(name)
        return
    try:
        arguments = json.loads(text)
    except ValueError as error:
        yield "arguments are no JSON", f"{name}: {error}: {text[:200]}"
        return
    try:
        kind = validator_for(schemas[name], Draft202012Validator)
        kind.check_schema(schemas[name])
        fault = best_match(kind(schemas[name]).iter_errors(arguments))
    except Exception as error:  # whatever a case from a file brings must not end the evaluation
        yield "the case has no valid schema", f"{name}: {type(error).__name__}: {str(error)[:200]}"
        return
    if fault is not None:
        yield "schema", f"{name}: {fault.json_path}: {fault.message[:200]}"


def report(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Counts and rates of some verdicts, in all and by kind of request."""
    by_kind = {
        kind: [verdict for verdict in verdicts if verdict.kind == kind] for kind in sorted({v.kind for v in verdicts})
    }
    examples = {name: text for verdict in reversed(verdicts) for name, text in verdict.faults}
    return {**_counts(verdicts), "kinds": {kind: _counts(some) for kind, some in by_kind.items()}, "examples": examples}


def _counts(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    faults = Counter(name for verdict in verdicts for name in {name for name, _ in verdict.faults})
    calls = sum(verdict.calls for verdict in verdicts)
    broken = ("unknown tool", "arguments are no JSON", "schema")
    wrong = sum(name in broken for verdict in verdicts for name, _ in verdict.faults)
    finishes = Counter(verdict.finish or "none" for verdict in verdicts)
    return {
        "requests": len(verdicts),
        "without_fault": _share(sum(not verdict.faults for verdict in verdicts), len(verdicts)),
        "with_calls": _share(sum(verdict.calls > 0 for verdict in verdicts), len(verdicts)),
        "calls": calls,
        "valid_calls": _share(calls - wrong, calls),
        "finish_reasons": dict(finishes.most_common()),
        "faults": dict(faults.most_common()),
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
