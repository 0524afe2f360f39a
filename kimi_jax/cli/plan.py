"""``kimi-jax plan``: bytes, bounds and fit of a configuration under a layout, without weights or devices."""

import argparse
import json
import sys

from kimi_jax.cli.model_args import chosen_layout
from kimi_jax.cli.shipped_config import shipped_config

GOALS = ("latency", "throughput", "longest-context")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = subparsers.add_parser(
        "plan", help="bytes, bounds and fit of a model under a layout, without weights or devices"
    )
    parser.add_argument("config", metavar="CONFIG", help="k3, k3.1-pro, a config.json, or a model folder")
    parser.add_argument("--layout", default=None, help="shipped layout name or layout file (default: tp8)")
    parser.add_argument(
        "-tp",
        "--tensor-parallel-size",
        type=int,
        default=None,
        metavar="N",
        help="shortcut for the tp8 layout over N devices",
    )
    parser.add_argument("--device", default="mi355x", help="shipped device name or device file (default: mi355x)")
    parser.add_argument(
        "--context",
        "--max-model-len",
        "--max-seq-len",
        dest="context",
        type=int,
        help="tokens of a sequence (default: the model's limit)",
    )
    parser.add_argument("--batch", "--max-num-seqs", dest="batch", type=int, default=1, help="sequences held at once")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, or float32 for the exact mode")
    parser.add_argument(
        "--kv-dtype",
        "--kv-cache-dtype",
        "--kv_cache_dtype",
        dest="kv_dtype",
        help="latent rows: fp8 (default here), bfloat16, float32",
    )
    parser.add_argument("--index-dtype", help="index keys of K3.1 Pro: fp8 (default), bfloat16, mxfp4")
    parser.add_argument("--experts", default=None, help="packed or codes (default: as load would on the device)")
    parser.add_argument(
        "--fp8",
        nargs="?",
        const="ptpc",
        default="none",
        metavar="GROUPS",
        help="projections in FP8: none (default), ptpc (also without a value), or groups such as ptpc+latent+router+head",
    )
    parser.add_argument(
        "--vision", default="off", help="off (default), replicated, or split over the devices that share the heads"
    )
    parser.add_argument(
        "--draft", default=None, help="count a draft: k3-mla, k3.1-gqa, k3.1-mla, a draft's folder or its config.json"
    )
    parser.add_argument(
        "--acceptance", type=_chances, metavar="P,P,...",
        help="with --draft: chance of each drafted token to be kept once those before it are (one number: of all); "
        "prints tokens per second for every length of a block",
    )  # fmt: skip
    parser.add_argument("--draft-place", default="split", help="split (default) or replicated")
    parser.add_argument(
        "--prefill-chunk", type=int, default=8192, help="most prompt tokens in one call (default: 8192)"
    )
    parser.add_argument(
        "--memory-fraction", "--gpu-memory-utilization", dest="memory_fraction", type=float, default=0.93,
        help="share of a device's memory for weights and state (default: 0.93)",
    )  # fmt: skip
    parser.add_argument(
        "--search", metavar="GOAL", choices=GOALS, help=f"also rank the shipped layouts: {', '.join(GOALS)}"
    )
    parser.add_argument("--figure", metavar="FILE", help="draw what fills a device, stacked; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _chances(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


_chances.__name__ = "list of numbers"  # what argparse calls a wrong one


def run(args: argparse.Namespace) -> int:
    """Plans and prints; a plan that does not fit is an answer, not a failure."""
    # a layout file is read by plan, which says at once what is wrong in it and what it cannot place
    layout = args.layout or "tp8" if args.tensor_parallel_size is None else chosen_layout(args)
    from kimi_jax.planning.plan import plan

    found = plan(
        shipped_config(args.config),
        layout,
        args.device,
        args.context,
        args.batch,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        index_dtype=args.index_dtype,
        experts=args.experts,
        fp8=args.fp8,
        vision=args.vision,
        draft=args.draft,
        draft_place=args.draft_place,
        acceptance=args.acceptance,
        prefill_chunk=args.prefill_chunk,
        memory_fraction=args.memory_fraction,
        goal=args.search,
    )
    if args.figure:
        print(f"wrote {found.figure(args.figure)}", file=sys.stderr)
    print(json.dumps(found.to_json(), allow_nan=False) if args.json else found)
    return 0
