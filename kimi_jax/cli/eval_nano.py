"""``kimi-jax eval nano``: held-out accuracy on kimi-nano's own tasks, offline.

Keys of ``--json``: ``evaluation``, ``model``, ``seed``, ``thinking``, ``effort``, ``left_out`` (notes about tasks that the model
cannot be asked), ``seconds``, and ``tasks``, one object each: ``task``, ``rows``, ``right`` (share of 1), ``valid`` (of the answers
with tool calls, those that fit their schemas; null without any), ``cut`` (answers that did not end by themselves),
``prompt_tokens``, ``completion_tokens`` (means), and ``draft_length`` (tokens per step with a draft; null without one). With
``--export-lm-eval``: ``evaluation``, ``exported`` (the file), ``rows``, ``seed``.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_jax.cli.model_args import ArgumentError, add_model_arguments, load_model
from kimi_jax.text.effort import EFFORTS

if TYPE_CHECKING:
    from kimi_jax.evals.nano import Answered, Row

MOST = 100_000


def add_parser(subparsers: Any) -> None:
    """Adds the evaluation below ``eval``."""
    parser = subparsers.add_parser("nano", help="held-out accuracy on kimi-nano's own tasks, offline")
    add_model_arguments(parser)
    parser.add_argument(
        "--tasks", metavar="NAMES", help="separated by commas, such as two-step,needle:1000,word (default: all)"
    )
    parser.add_argument("--rows", type=int, default=100, help="examples of each task (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the examples (default: 0)")
    parser.add_argument("--batch", type=int, default=16, help="examples at a time (default: 16)")
    parser.add_argument("--max-tokens", type=int, help="of an answer (default: twice the longest right one)")
    parser.add_argument("--no-thinking", dest="thinking", action="store_false", help="answers without thoughts")
    parser.add_argument("--effort", choices=EFFORTS, default="max", help="how much to think (default: max)")
    parser.add_argument("--wrong", type=int, default=0, metavar="N", help="show so many wrong answers of each task")
    parser.add_argument(
        "--export-lm-eval",
        type=Path,
        metavar="FOLDER",
        help="only write the word problems as a task of lm-evaluation-harness",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluates, or exports, and prints."""
    _check(args)
    if args.export_lm_eval is not None:
        return _export(args)
    from kimi_jax.train.data.tasks import TASKS, task

    names = list(dict.fromkeys(args.tasks.split(","))) if args.tasks else list(TASKS)
    for name in names:
        task(name)  # before anything is loaded
    model = load_model(args)
    from kimi_jax.evals.nano import askable, evaluate

    names, notes = askable(model, names, named=args.tasks is not None)
    print("\n".join(notes), file=sys.stderr, end="\n" if notes else "")
    mode = (True, args.effort) if args.thinking else (False, None)
    began, rows = time.perf_counter(), []
    if not args.json:
        print(f"{'task':16} {'rows':>5} {'right':>7} {'valid':>7} {'cut':>7} {'prompt':>7} {'answer':>7} {'draft':>6}")
    for name in names:
        row, answered = evaluate(
            model, name, args.rows, args.seed, mode=mode, batch=args.batch, max_tokens=args.max_tokens
        )
        rows.append(row)
        if not args.json:
            print(_line(row), flush=True)
        _show_wrong(answered, args.wrong)
    seconds = round(time.perf_counter() - began, 1)
    if args.json:
        about = {"evaluation": "nano", "model": args.model, "seed": args.seed}
        asked = {"thinking": mode[0], "effort": mode[1], "left_out": notes, "seconds": seconds}
        print(json.dumps({**about, **asked, "tasks": [asdict(row) for row in rows]}, allow_nan=False))
    else:
        print(f"[{seconds} s]", file=sys.stderr)
    return 0


def _export(args: argparse.Namespace) -> int:
    from kimi_jax.evals.nano_export import NAME, export

    made = export(args.export_lm_eval, args.rows, args.seed)
    if args.json:
        print(json.dumps({"evaluation": "nano", "exported": str(made), "rows": args.rows, "seed": args.seed}))
    else:
        print(f"{made}: {args.rows} held-out questions. lm_eval --tasks {NAME} --include_path {args.export_lm_eval}")
    return 0


def _line(row: "Row") -> str:
    draft = "-" if row.draft_length is None else f"{row.draft_length:.2f}"
    valid = "-" if row.valid is None else f"{row.valid:.1%}"
    return (
        f"{row.task:16} {row.rows:5} {row.right:7.1%} {valid:>7} {row.cut:7.1%} {row.prompt_tokens:7.0f} "
        f"{row.completion_tokens:7.0f} {draft:>6}"
    )


def _show_wrong(answered: "list[Answered]", most: int) -> None:
    wrong = [one for one in answered if not one.score.right][:most]
    for one in wrong:
        content = one.example.prompt[-1]["content"]
        asked = content if isinstance(content, str) else content[-1]["text"]
        said = [one.given.text, *(f"{call.name} {call.arguments}" for call in one.given.tool_calls)]
        print(f"  asked {asked[-200:]!r}\n  wanted {one.example.answer!r}\n  got {said!r}", file=sys.stderr)


def _check(args: argparse.Namespace) -> None:
    limits = {"rows": MOST, "batch": 1024, "max_tokens": 1 << 20}
    problems = [
        f"--{name.replace('_', '-')} {value}; from 1 to {high:,} works"
        for name, high in limits.items()
        if (value := getattr(args, name)) is not None and not 1 <= value <= high
    ]
    if problems:
        raise ArgumentError("This cannot be evaluated", problems)
