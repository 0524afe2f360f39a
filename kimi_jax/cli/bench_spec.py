"""``kimi-jax bench spec``: the same requests with and without a draft, in one run.

Keys of ``--json``: ``model``, ``draft``, ``layout``, ``rows``, ``input_len``, ``output_len``, ``temperature`` as asked;
``tokens_per_s`` and ``runs_s`` each ``plain`` and ``drafted``; ``speedup``; ``same_ids``, the share of ids at the same place in
both answers (without a temperature; below 1 only by rounding); and ``drafts``, as in the usage of an answer, over all requests.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kimi_jax.cli.model_args import ArgumentError, add_model_arguments, load_model


def add_parser(subparsers: Any) -> None:
    """Adds the verb below ``bench``."""
    parser = subparsers.add_parser("spec", help="the same requests with and without a draft")
    add_model_arguments(parser)
    parser.add_argument(
        "--ids", metavar="FILE", help="JSON list of prompts, each a list of token ids (default: random)"
    )
    parser.add_argument("--rows", type=int, default=1, help="random prompts, all at once (default: 1)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a random prompt (default: 128)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def run(args: argparse.Namespace) -> int:
    """Measures both ways and prints them side by side."""
    low = {name: getattr(args, name) for name in ("rows", "input_len", "output_len", "repeats")}
    problems = [f"--{name.replace('_', '-')} {value}; it must be 1 or more" for name, value in low.items() if value < 1]
    if args.draft is None:
        problems.append("--draft is missing: there is nothing to compare with")
    if problems:
        raise ArgumentError("This measurement cannot be made", problems)
    prompts = _given(Path(args.ids)) if args.ids else None
    model = load_model(args)
    found = _measure(model, args, prompts or _random(args, model.config.vocab))
    if args.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0


def _measure(model: Any, args: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    from kimi_jax.completion import DraftUsage
    from kimi_jax.engine.drafted import DraftedRunner
    from kimi_jax.engine.measure import time_answers

    drafted = model.runner
    assert isinstance(drafted, DraftedRunner)
    asked = (prompts, args.output_len, args.temperature, args.repeats)
    plain_time, plain_ids, _ = time_answers(drafted.without_draft(), *asked)
    time, ids, counts = time_answers(drafted, *asked)
    assert counts is not None
    pairs = [a == b for mine, other in zip(plain_ids, ids, strict=True) for a, b in zip(mine, other, strict=False)]
    return {
        "model": args.model,
        "draft": args.draft,
        "layout": model.layout.name,
        "rows": len(prompts),
        "input_len": max(map(len, prompts)),
        "output_len": args.output_len,
        "temperature": args.temperature,
        "tokens_per_s": {"plain": round(plain_time.tokens_per_second, 2), "drafted": round(time.tokens_per_second, 2)},
        "runs_s": {"plain": [round(s, 4) for s in plain_time.runs], "drafted": [round(s, 4) for s in time.runs]},
        "speedup": round(plain_time.seconds / time.seconds, 3),
        "same_ids": round(sum(pairs) / len(pairs), 4),
        "drafts": asdict(DraftUsage.of(counts)),
    }


def _given(file: Path) -> list[list[int]]:
    from kimi_jax.cli.generate import read_json

    prompts = read_json(file)
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, list) and p for p in prompts):
        raise ArgumentError(f"{file} holds no prompts", ["expected a JSON list of lists of token ids"])
    return prompts


def _random(args: argparse.Namespace, vocab: int) -> list[list[int]]:
    import numpy as np

    return np.random.default_rng(5).integers(4, vocab, (args.rows, args.input_len)).tolist()


def _print(found: dict[str, Any]) -> None:
    drafts = found["drafts"]
    print(f"{'':8} {'tok/s':>9}")
    for way, speed in found["tokens_per_s"].items():
        print(f"{way:8} {speed:9.2f}")
    print(
        f"speedup {found['speedup']:.2f}; {drafts['mean_length']:.2f} tokens per step; same ids {found['same_ids']:.1%}"
    )
    shares = " ".join(f"{share:.2f}" for share in drafts["by_position"])
    print(f"accepted by position: {shares}", file=sys.stderr)
