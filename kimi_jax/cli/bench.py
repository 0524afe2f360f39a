"""``kimi-jax bench``: prefill and decode speed, beside the bytes moved, the machine's bound, and the share of it reached.

``kimi-jax bench serve`` measures a server: `bench_serve`. ``kimi-jax bench spec`` compares with and without a draft: `bench_spec`.
``kimi-jax bench quality`` compares forms of one model: `bench_quality`.
"""

import argparse
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from kimi_jax.cli import bench_quality, bench_serve, bench_spec
from kimi_jax.cli.model_args import ArgumentError, add_model_arguments, load_model, refuse_draft
from kimi_jax.testing.shipped import BENCH_MODELS

if TYPE_CHECKING:
    from kimi_jax.api import Kimi
    from kimi_jax.planning.machine import Machine

TESTS = "prefill512,decode1,decode8"
_TEST = re.compile(r"(?P<kind>prefill|decode)(?P<size>\d{1,6})(?:@(?P<context>\d{1,7}))?")


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("bench", help="measure prefill and decode")
    add_model_arguments(parser)
    models = ", ".join(BENCH_MODELS)
    parser.add_argument(
        "--tests",
        default=TESTS,
        help=f"comma-separated prefillN and decodeB[@CONTEXT] (default: {TESTS}); models made on demand: {models}",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64, help="decode steps of one measured run")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    measured = parser.add_subparsers(dest="measured", metavar="serve|spec|quality", title="other measurements")
    bench_serve.add_parser(measured)
    bench_spec.add_parser(measured)
    bench_quality.add_parser(measured)


def run(args: argparse.Namespace) -> int:
    """Measures and prints one row per test."""
    if args.measured == "serve":
        return bench_serve.run(args)
    if args.measured == "spec":
        return bench_spec.run(args)
    if args.measured == "quality":
        return bench_quality.run(args)
    tests = [_parse(test) for test in args.tests.split(",")]
    if args.repeats < 1 or args.new_tokens < 1:
        raise ArgumentError("This measurement cannot be made", ["--repeats and --new-tokens must be 1 or more"])
    refuse_draft(args, "bench")
    model = load_model(args)
    from kimi_jax.planning.machine import measure_machine

    products = model.runner.steps.precision.projection
    machine = measure_machine(products)
    rows = [_measure(model, machine, args, *test) for test in tests]
    held = _held(model)
    if args.json:
        limits = {"bandwidth_bytes_per_s": machine.bandwidth, "flop_per_s": machine.peak, "products": products.name}
        print(
            json.dumps(
                {"model": args.model, "layout": model.layout.name, "held": held, "machine": limits, "rows": rows}
            )
        )
    else:
        print("held as: " + ", ".join(f"{what} {form}" for what, form in held.items()), file=sys.stderr)
        _print(rows, machine, products.name)
    return 0


def _held(model: "Kimi") -> dict[str, str]:
    """The forms in which this platform holds the model: what the bytes below are bytes of."""
    precision = model.runner.steps.precision
    forms = {
        "activations": precision.activation,
        "projections": precision.projection,
        "other_weights": precision.operand,
        "latent_rows": precision.latent,
    }
    held = {name: dtype.name for name, dtype in forms.items()}
    return {**held, "experts": precision.experts, "ops": str(model.runner.steps.implementations)}


def _parse(test: str) -> tuple[str, int, int]:
    found = _TEST.fullmatch(test.strip())
    if not found or int(found["size"]) < 1 or (found["kind"] == "prefill" and found["context"]):
        raise ArgumentError(
            f"No such test: {test!r}", ["expected prefillN, decodeB or decodeB@CONTEXT"], f"For example: {TESTS}."
        )
    return found["kind"], int(found["size"]), int(found["context"] or 32)


def _measure(
    model: "Kimi", machine: "Machine", args: argparse.Namespace, kind: str, size: int, context: int
) -> dict[str, Any]:
    from kimi_jax.engine.measure import time_decode, time_prefill
    from kimi_jax.planning.step import step

    steps = model.runner.steps
    if kind == "prefill":
        timing, units = time_prefill(model.runner, size, args.repeats), 1
        rows, tokens, seen = 1, size, 0
    else:
        timing, units = time_decode(model.runner, size, context, args.new_tokens, args.repeats), args.new_tokens
        rows, tokens, seen = size, 1, context + args.new_tokens // 2
    cache = steps.describe_cache(model.runner.rows_for(rows))
    sizes = {"rows": rows, "tokens": tokens, "context": seen}
    work = step(model.config, model.layout, steps.parameters, cache, steps.precision, **sizes)
    # fake devices share the machine: what all of them move and multiply counts
    moved, flops = work.bytes * model.layout.devices, work.flops * model.layout.devices
    reading, computing = moved / machine.bandwidth, flops / machine.peak
    bound = max(reading, computing) * units
    return {
        "test": f"{kind}{size}" + (f"@{context}" if kind == "decode" else ""),
        "tokens_per_s": round(timing.tokens_per_second, 2),
        "ms_per_token": round(1e3 / timing.tokens_per_second, 4),
        "step_bytes": round(moved),
        "step_flops": round(flops),
        "bound_tokens_per_s": round(timing.tokens / bound, 2),
        "bound_by": "memory" if reading >= computing else "arithmetic",
        "share_of_bound": round(bound / timing.seconds, 4),
        "first_s": round(timing.first, 3),
        "runs_s": [round(seconds, 4) for seconds in timing.runs],
    }


def _print(rows: list[dict[str, Any]], machine: "Machine", products: str) -> None:
    print(
        f"machine, measured: {machine.bandwidth / 1e9:.1f} GB/s read, {machine.peak / 1e9:.0f} GFLOP/s {products}",
        file=sys.stderr,
    )
    print(
        f"{'test':14} {'tok/s':>9} {'ms/token':>9} {'MB/step':>9} {'GFLOP/step':>10} {'bound tok/s':>12} {'share':>7}  bound by"
    )
    for row in rows:
        print(
            f"{row['test']:14} {row['tokens_per_s']:9.1f} {row['ms_per_token']:9.2f} {row['step_bytes'] / 1e6:9.1f} "
            f"{row['step_flops'] / 1e9:10.2f} {row['bound_tokens_per_s']:12.1f} {row['share_of_bound']:7.1%}  {row['bound_by']}"
        )
