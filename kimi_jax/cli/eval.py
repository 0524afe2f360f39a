"""``kimi-jax eval``: what a model's answers are worth. ``gsm8k`` and ``tools`` over HTTP as any client would; ``nano`` offline.

Keys of ``--json``: ``evaluation``, ``url``, ``model``, ``seconds``. For gsm8k also ``fewshot``, ``endpoint``,
``questions``, and ``strict``, ``strict_error``, ``flexible``, ``flexible_error``: the harness's two ways to read an
answer, shares of 1. For tools also ``requests``, ``without_fault``, ``with_calls``, ``calls``, ``valid_calls`` (shares
of 1), ``finish_reasons``, ``faults`` (kind of fault -> answers), the same by kind of request under ``kinds``, and
``examples``, a text for each fault. Those of nano are in ``cli/eval_nano.py``.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kimi_jax.cli import eval_nano
from kimi_jax.cli.model_args import ArgumentError
from kimi_jax.evals.client import Client, ServerError

MOST = 100_000


def add_parser(subparsers: Any) -> None:
    """Adds the verb and what can be evaluated."""
    parser = subparsers.add_parser("eval", help="run public evaluations of a served model, or kimi-nano's own")
    evaluations = parser.add_subparsers(dest="evaluation", metavar="EVALUATION", required=True)
    gsm8k = evaluations.add_parser("gsm8k", help="school mathematics, by lm-evaluation-harness")
    _add_server(gsm8k)
    gsm8k.add_argument(
        "--data", type=Path, metavar="FOLDER", help="with a train and a test file (default: the network)"
    )
    gsm8k.add_argument(
        "--task", type=Path, metavar="FILE", help="another task in its place: one that eval nano --export-lm-eval wrote"
    )
    gsm8k.add_argument(
        "--num-fewshot", type=int, default=None, help="worked examples before a question (default: 5; with --task: 0)"
    )
    gsm8k.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    gsm8k.add_argument(
        "--max-tokens", type=int, default=None, help="of an answer (default: 512; chat, which thinks: 16384)"
    )
    gsm8k.add_argument("--limit", type=int, default=None, help="questions (default: all 1,319)")
    gsm8k.add_argument("--samples", type=Path, metavar="FILE", help="keep all prompts and answers there")
    tools = evaluations.add_parser("tools", help="tool calls, each checked against its schema")
    _add_server(tools)
    tools.add_argument("--cases", type=Path, metavar="FILE", help="request bodies, one a line (default: they are made)")
    tools.add_argument("--limit", type=int, default=None, help="cases (default: 100, or all of the file)")
    tools.add_argument("--seed", type=int, default=0, help="of the cases that are made")
    tools.add_argument("--max-tokens", type=int, default=4096, help="of an answer (default: 4096)")
    tools.add_argument("--temperature", type=float, default=0.0)
    tools.add_argument("--no-thinking", dest="thinking", action="store_false", help="answers without thoughts")
    tools.add_argument("--stream", action="store_true", help="read streamed answers")
    eval_nano.add_parser(evaluations)


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", "--base-url", dest="url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--model", default=None, help="name to ask for (default: the first that is served)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at once (default: 8)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluates and prints the rates; 1 where requests failed or answers were malformed."""
    if args.evaluation == "nano":
        return eval_nano.run(args)
    _check(args)
    try:
        with Client(args.url, args.api_key, timeout=60.0) as client:
            args.model = args.model or client.models()[0]
    except ServerError as error:
        raise ArgumentError(f"{args.url} cannot be asked", [str(error)], "kimi-jax serve starts a server.") from None
    began = time.perf_counter()
    status, found = (_gsm8k if args.evaluation == "gsm8k" else _tools)(args)
    about = {"evaluation": args.evaluation, "url": args.url, "model": args.model}
    seconds = round(time.perf_counter() - began, 1)
    if args.json:
        print(json.dumps({**about, **found, "seconds": seconds}, ensure_ascii=False, allow_nan=False))
    else:
        print(f"[{seconds} s]", file=sys.stderr)
    return status


def _gsm8k(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from kimi_jax.evals.harness import Run, gsm8k

    fewshot = args.num_fewshot if args.num_fewshot is not None else 0 if args.task else 5
    score = gsm8k(
        Run(
            url=args.url.rstrip("/").removesuffix("/v1"),
            model=args.model,
            endpoint=args.endpoint,
            concurrency=args.concurrency,
            fewshot=fewshot,
            max_tokens=args.max_tokens or (16384 if args.endpoint == "chat" else 512),
            limit=args.limit,
            data=args.data,
            key=args.api_key,
            samples=args.samples,
            task=args.task,
        )
    )
    if not args.json:
        print(
            f"{args.task.stem if args.task else 'gsm8k'}, {fewshot}-shot, {score.questions:,} questions, {args.endpoint}"
        )
        for name, value, error in (
            ("strict-match", score.strict, score.strict_error),
            ("flexible-extract", score.flexible, score.flexible_error),
        ):
            print(f"{name:18} {value:7.2%}" + ("" if error is None else f" ± {error:.2%}"))
    return 0, {"fewshot": fewshot, "endpoint": args.endpoint, **asdict(score)}


def _tools(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from kimi_jax.evals.tool_cases import made_cases, read_cases
    from kimi_jax.evals.tool_check import check_all, report

    _need_jsonschema()
    cases = read_cases(args.cases, args.limit) if args.cases else made_cases(args.limit or 100, args.seed)
    options = {"model": args.model, "max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    options |= {} if args.thinking else {"reasoning_effort": "none"}
    verdicts = check_all(cases, args.url, args.api_key, options, clients=args.concurrency, stream=args.stream)
    found = report(verdicts)
    if not args.json:
        _print(found)
    failed = found["faults"].get("request failed", 0) + found["faults"].get("malformed answer", 0)
    return 1 if failed else 0, found


def _print(found: dict[str, Any]) -> None:
    print(f"{'asked by':10} {'requests':>8} {'no fault':>9} {'called':>8} {'calls':>6} {'valid':>8}")
    for kind, row in [*found["kinds"].items(), ("all", found)]:
        shares = [_percent(row[name]) for name in ("without_fault", "with_calls", "valid_calls")]
        print(f"{kind:10} {row['requests']:8} {shares[0]:>9} {shares[1]:>8} {row['calls']:6} {shares[2]:>8}")
    print("finish reasons: " + ", ".join(f"{name} {count}" for name, count in found["finish_reasons"].items()))
    for name, count in found["faults"].items():
        print(f"{count} with fault: {name}, for example {found['examples'][name]}")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _need_jsonschema() -> None:
    try:
        import jsonschema  # noqa: F401
    except ImportError:
        problems = ["jsonschema, which checks the calls, is not installed"]
        raise ArgumentError("Tool calls cannot be judged", problems, "pip install 'kimi-jax[eval]'") from None


def _check(args: argparse.Namespace) -> None:
    limits = {"concurrency": 1024, "limit": MOST, "num_fewshot": 64, "max_tokens": 1 << 20}
    problems = []
    for name, high in limits.items():
        value, low = getattr(args, name, None), 0 if name == "num_fewshot" else 1
        if value is not None and not low <= value <= high:
            problems.append(f"--{name.replace('_', '-')} {value}; from {low} to {high:,} works")
    if problems:
        raise ArgumentError("This cannot be evaluated", problems)
