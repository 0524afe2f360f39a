"""``kimi-jax compile``: a full-size step compiled or lowered for a target, without weights and without its devices."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kimi_jax.cli.model_args import ArgumentError, chosen_layout, prepare_devices
from kimi_jax.cli.shipped_config import shipped_config

if TYPE_CHECKING:
    from kimi_jax.placement.layout import Layout
    from kimi_jax.planning.compile import Compiled
    from kimi_jax.planning.lower import Lowered

PHASES = ("decode", "prefill", "verify")
FALLBACK = (
    "What works without that compiler: --lower holds the program itself against the plan (weaker: no registers, temporary "
    "memory or launches; any ROCm target); --target cpu compiles the same step for fake devices of this machine."
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("compile", help="compile the full-size steps for a target, without devices")
    parser.add_argument("config", metavar="CONFIG", help="k3, a config.json, or a model folder")
    parser.add_argument("--layout", default=None, help="shipped layout name or layout file (default: tp8)")
    parser.add_argument(
        "-tp", "--tensor-parallel-size", type=int, default=None, metavar="N",
        help="shortcut for the tp8 layout over N devices",
    )  # fmt: skip
    parser.add_argument("--target", "--device", dest="target", default="mi355x", help="mi355x (default), or cpu")
    parser.add_argument(
        "--phase",
        choices=PHASES,
        default="decode",
        help="the decode loop, a chunk of a prompt, or the loop that drafts and verifies",
    )
    parser.add_argument(
        "--context", "--max-model-len", "--max-seq-len", dest="context", type=int,
        help="tokens of a sequence (default: the model's limit)",
    )  # fmt: skip
    parser.add_argument("--batch", "--max-num-seqs", dest="batch", type=int, default=1, help="sequences of the call")
    parser.add_argument("--prefill-chunk", type=int, default=2048, help="prompt tokens of a chunk (default: 2048)")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, or float32 for the exact mode")
    parser.add_argument(
        "--kv-dtype", "--kv-cache-dtype", dest="kv_dtype", help="latent rows: fp8 (default here), bfloat16, float32"
    )
    parser.add_argument("--index-dtype", help="index keys of K3.1 Pro: fp8 (default here), bfloat16, mxfp4")
    parser.add_argument(
        "--draft", metavar="DRAFT",
        help="of --phase verify: k3-mla, k3.1-gqa, k3.1-mla, a draft's folder or its config.json",
    )  # fmt: skip
    parser.add_argument("--experts", default=None, help="packed or codes (default: as load would on the target)")
    parser.add_argument(
        "--fp8",
        nargs="?",
        const="ptpc",
        default="none",
        metavar="GROUPS",
        help="projections in FP8: none (default), ptpc (also without a value), or groups such as ptpc+latent+router+head",
    )
    parser.add_argument("--random", action="store_true", help="the program that may draw with a temperature")
    parser.add_argument(
        "--impl", default=None, help="what every op runs: reference or pallas (default: as the target would run)"
    )
    parser.add_argument(
        "--lower", action="store_true", help="only lower the step: weaker evidence, but needs no ROCm compiler"
    )
    parser.add_argument("--budget", metavar="NAME", help="hold it against a shipped budget or a budget file")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Compiles or lowers, and prints; 1 where the step differs from its plan or breaks its budget."""
    if args.lower and args.budget is not None:
        raise ArgumentError(
            "A lowered step has no budget",
            [f"--lower and --budget {args.budget}: a budget limits what only the compiler knows"],
            "Give one.",
        )
    layout = args.layout or "tp8" if args.tensor_parallel_size is None else chosen_layout(args)
    import jax

    from kimi_jax.placement.layout import LayoutError, load_layout

    with suppress(LayoutError):  # the plan says it, together with what the layout cannot place
        prepare_devices(load_layout(layout))
    jax.config.update("jax_platforms", "cpu")  # a compile needs no accelerator, and must not wait for one
    if args.lower:
        lowered = _lowered(args, layout)
        return _show(args, lowered, lowered.problems)
    compiled = _compiled(args, layout)
    return _show(args, compiled, [*compiled.problems, *(compiled.over or ())])


def _show(args: argparse.Namespace, found: "Compiled | Lowered", wrong: Sequence[str]) -> int:
    print(json.dumps(found.to_json(), allow_nan=False) if args.json else found)
    for line in wrong:
        print(f"kimi-jax compile: {line}", file=sys.stderr)
    return 1 if wrong else 0


def _compiled(args: argparse.Namespace, layout: "str | Layout") -> "Compiled":
    """The step through the target's compiler; where that cannot be had, the error says what can."""
    from kimi_jax.placement.rocm.problem import TargetError
    from kimi_jax.planning.compile import compile_step

    try:
        return compile_step(*_asked(args, layout), **_options(args), budget=args.budget)
    except TargetError as error:
        raise TargetError(error.title, error.problems, " ".join(filter(None, (error.hint, FALLBACK)))) from error


def _lowered(args: argparse.Namespace, layout: "str | Layout") -> "Lowered":
    from kimi_jax.planning.lower import lower_step

    return lower_step(*_asked(args, layout), **_options(args))


def _asked(args: argparse.Namespace, layout: "str | Layout") -> tuple[Any, ...]:
    return shipped_config(args.config), layout, args.target, args.phase, args.context, args.batch


def _options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("dtype", "kv_dtype", "index_dtype", "experts", "fp8", "draft", "random", "impl")
    return {"tokens": args.prefill_chunk, **{name: getattr(args, name) for name in names}}
