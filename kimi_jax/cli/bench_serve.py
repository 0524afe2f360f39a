"""``kimi-jax bench serve``: how fast a server answers several clients at once.

TTFT is the time to the first token, E2EL to the last; TPOT the time of one token after the first, averaged over an answer;
ITL the time between two chunks that reach the client.

Keys of ``--json``: ``url``, ``model``, ``input_len``, ``shared_len``, ``output_len``, ``temperature``, ``seed`` as
asked, and ``rows``, one for each number of clients: ``concurrency``, ``completed``, ``failed``, ``errors`` (text ->
count), ``seconds``, ``prompt_tokens``, ``output_tokens``, ``requests_per_s``, ``output_tokens_per_s``, and ``ttft_ms``,
``tpot_ms``, ``itl_ms``, ``e2el_ms``, each ``mean``, ``median`` and ``p99`` or null where nothing was timed.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from kimi_jax.cli.model_args import ArgumentError
from kimi_jax.evals.client import Client, ServerError, ask_each

BYTES = 256
"""Ids below it are ordinary tokens of every vocabulary: each byte is one."""

MOST_CLIENTS, MOST_TOKENS = 1024, 1 << 20

METRICS = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")


@dataclass
class Answer:
    """One request and when its answer came, in seconds of the performance counter."""

    sent: float
    stamps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None


def add_parser(subparsers: Any) -> None:
    """Adds the verb below ``bench``."""
    parser = subparsers.add_parser("serve", help="measure a server under several clients at once")
    parser.add_argument("--url", "--base-url", dest="url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--model", default=None, help="name to ask for (default: the first that is served)")
    parser.add_argument(
        "--concurrency", default="1,8", metavar="N,N", help="clients at once, one measurement each (default: 1,8)"
    )
    parser.add_argument("--requests", type=int, default=None, help="of one measurement (default: 8 for each client)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--shared-len", type=int, default=0, help="of them, those that all prompts begin with")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts, random token ids")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def run(args: argparse.Namespace) -> int:
    """Measures each number of clients and prints a table; 1 where a request failed."""
    levels = _levels(args)
    try:
        with Client(args.url, args.api_key) as client:
            model = args.model or client.models()[0]
            for _ in range(2):  # the first may compile, the second may be the first to hit a cache
                if error := _ask(client, _body(args, model, _prompt(args, -1))).error:
                    raise ServerError(error)
    except ServerError as error:
        raise ArgumentError(f"{args.url} cannot be measured", [str(error)], "kimi-jax serve starts a server.") from None
    rows = []
    for level in levels:
        answers, seconds = measure(args, model, level)
        rows.append(summary(level, answers, seconds))
        if not args.json:
            _print(rows[-1], first=len(rows) == 1)
    if args.json:
        shape = {name: getattr(args, name) for name in ("input_len", "shared_len", "output_len", "temperature", "seed")}
        print(json.dumps({"url": args.url, "model": model, **shape, "rows": rows}, allow_nan=False))
    return 1 if any(row["failed"] for row in rows) else 0


def measure(args: argparse.Namespace, model: str, clients: int) -> tuple[list[Answer], float]:
    """The answers to all requests of one measurement and the seconds they took together."""
    bodies = [_body(args, model, _prompt(args, number)) for number in range(args.requests or 8 * clients)]
    began = time.perf_counter()
    answers = ask_each(bodies, clients, args.url, args.api_key, _ask)
    return answers, time.perf_counter() - began


def summary(clients: int, answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """What a measurement comes to: counts, throughput, and each time's mean, median and 99th percentile."""
    good = [answer for answer in answers if answer.error is None and answer.stamps]
    ends = [(answer, answer.stamps[0] - answer.sent, answer.stamps[-1] - answer.sent) for answer in good]
    times = {
        "ttft_ms": [first for _, first, _ in ends],
        "tpot_ms": [(last - first) / (answer.tokens - 1) for answer, first, last in ends if answer.tokens > 1],
        "itl_ms": [after - before for answer in good for before, after in pairwise(answer.stamps)],
        "e2el_ms": [last for *_, last in ends],
    }
    tokens = sum(answer.tokens for answer in good)
    errors = Counter(answer.error or "an answer without text" for answer in answers if answer not in good)
    return {
        "concurrency": clients,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "errors": dict(errors.most_common(5)),
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "output_tokens": tokens,
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(tokens / seconds, 2),
        **{name: _spread(values) for name, values in times.items()},
    }


def _spread(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    milliseconds = 1e3 * np.array(seconds)
    values = milliseconds.mean(), np.median(milliseconds), np.percentile(milliseconds, 99)
    return {name: round(float(value), 3) for name, value in zip(("mean", "median", "p99"), values, strict=True)}


def _ask(client: Client, body: dict[str, Any]) -> Answer:
    answer = Answer(time.perf_counter())
    try:
        for chunk in client.stream("/v1/completions", body):
            if any(choice.get("text") for choice in chunk["choices"]):
                answer.stamps.append(time.perf_counter())
            if usage := chunk.get("usage"):
                answer.prompt_tokens, answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]
    except ServerError as error:
        answer.error = str(error)
    return answer


def _prompt(args: argparse.Namespace, number: int) -> list[int]:
    """Random ids: the same for all requests up to the shared length, others after it."""
    shared, own = random.Random(args.seed), random.Random(f"{args.seed} {number}")
    return [(shared if place < args.shared_len else own).randrange(BYTES) for place in range(args.input_len)]


def _body(args: argparse.Namespace, model: str, prompt: list[int]) -> dict[str, Any]:
    drawn = {"max_tokens": args.output_len, "temperature": args.temperature, "ignore_eos": True, "seed": args.seed}
    return {"model": model, "prompt": prompt, **drawn, "stream_options": {"include_usage": True}}


def _levels(args: argparse.Namespace) -> list[int]:
    words = args.concurrency.split(",")
    levels = [int(word) for word in words if word.strip().isdecimal()]
    problems = []
    if len(levels) != len(words) or not all(1 <= level <= MOST_CLIENTS for level in levels):
        problems.append(f"--concurrency {args.concurrency}; numbers from 1 to {MOST_CLIENTS:,} with commas work")
    for name, low in (("input_len", 1), ("output_len", 1), ("shared_len", 0), ("requests", 1)):
        value = getattr(args, name)
        if value is not None and not low <= value <= MOST_TOKENS:
            problems.append(f"--{name.replace('_', '-')} {value}; from {low} to {MOST_TOKENS:,} works")
    if args.shared_len > args.input_len:
        problems.append(f"--shared-len {args.shared_len} is more than --input-len {args.input_len}")
    if problems:
        raise ArgumentError("This measurement cannot be made", problems)
    return levels


def _print(row: dict[str, Any], *, first: bool) -> None:
    if first:
        print(
            f"{'clients':>7} {'done':>6} {'req/s':>8} {'tok/s':>9}  "
            + "".join(f"{_head(name):>27}" for name in METRICS)
        )
        print(f"{'':33}  " + f"{'mean':>11}{'median':>8}{'p99':>8}" * len(METRICS))
    cells = "".join(_cells(row[name]) for name in METRICS)
    print(
        f"{row['concurrency']:7} {row['completed']:6} {row['requests_per_s']:8.2f} {row['output_tokens_per_s']:9.1f}  {cells}",
        flush=True,
    )
    for error, count in row["errors"].items():
        print(f"{count} requests failed: {error}", file=sys.stderr)


def _head(name: str) -> str:
    return name.removesuffix("_ms").upper() + " ms"


def _cells(spread: dict[str, float] | None) -> str:
    if spread is None:
        return f"{'-':>11}{'-':>8}{'-':>8}"
    return f"{spread['mean']:11.1f}{spread['median']:8.1f}{spread['p99']:8.1f}"
