"""Arguments that every verb shares when it loads a model, and the load itself with its progress on stderr."""

import argparse
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kimi_jax.problems import ProblemsError

if TYPE_CHECKING:
    from kimi_jax.api import Kimi
    from kimi_jax.placement.layout import Layout


IMPLS = ("reference", "pallas", "interpret")

MOST_DEVICES = 512
"""Fake devices that one process is asked to make at most."""


class ArgumentError(ProblemsError):
    """Command-line arguments that contradict one another."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model, its placement and its dtypes. Spellings follow mlx-lm and vLLM where both would accept a habit."""
    parser.add_argument(
        "--model", default="random-tiny", help="checkpoint folder or shipped name (default: random-tiny)"
    )
    parser.add_argument("--layout", default=None, help="shipped layout name or layout file (default: single)")
    parser.add_argument(
        "-tp",
        "--tensor-parallel-size",
        type=int,
        default=None,
        metavar="N",
        help="shortcut for the tp8 layout over N devices",
    )
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, or float32 for the exact mode")
    parser.add_argument(
        "--kv-dtype", "--kv-cache-dtype", "--kv_cache_dtype", dest="kv_dtype", help="bfloat16, float32 or fp8"
    )
    parser.add_argument(
        "--index-dtype",
        default=None,
        help="index keys of K3.1 Pro: bfloat16, float32, fp8 or mxfp4 (default: as --dtype)",
    )
    parser.add_argument(
        "--max-seq-len",
        "--max-model-len",
        dest="max_seq_len",
        type=int,
        help="tokens a sequence can hold (default: up to 8192)",
    )
    parser.add_argument(
        "--experts",
        default=None,
        help="packed (checkpoint bytes) or codes (twice the memory, faster on CPU; the default there)",
    )
    parser.add_argument(
        "--fp8",
        nargs="?",
        const="ptpc",
        default="none",
        metavar="GROUPS",
        help="projections in FP8: none (default), ptpc (also without a value), or groups such as ptpc+latent+router+head",
    )
    parser.add_argument(
        "--impl", choices=IMPLS, default=None, help="what every op runs (default: kernels on a GPU, XLA elsewhere)"
    )
    parser.add_argument("--prefill-chunk", type=int, default=512, help="most prompt tokens in one call")
    parser.add_argument(
        "--no-vision", dest="vision", action="store_false", help="leave the vision tower in its file; text only"
    )
    parser.add_argument(
        "--fetch-images", action="store_true", help="ask other machines for pictures that are http(s) URLs"
    )
    parser.add_argument("--draft", default=None, help="folder of a DSpark draft of this model")


def chosen_layout(args: argparse.Namespace) -> "Layout":
    """The layout that ``--layout`` or ``--tensor-parallel-size`` asks for."""
    from kimi_jax.placement.layout import load_layout

    size = args.tensor_parallel_size
    if size is None:
        return load_layout(args.layout or "single")
    if args.layout is not None:
        raise ArgumentError(
            "Two placements are given", [f"--layout {args.layout} and --tensor-parallel-size {size}"], "Give one."
        )
    if not 1 <= size <= MOST_DEVICES:
        problems = [f"--tensor-parallel-size {size}; it must be an integer from 1 to {MOST_DEVICES}"]
        raise ArgumentError("This placement cannot be made", problems)
    whole = load_layout("tp8")
    mesh = {**whole.mesh, "tensor": size}
    return replace(whole, name=f"tp{size}", description=f"tp8 over {size} devices", mesh=mesh)


def prepare_devices(layout: "Layout") -> None:
    """Makes enough fake CPU devices for a layout; does nothing where JAX has started or has accelerators."""
    import jax

    enough = max(layout.devices, jax.config.jax_num_cpu_devices)  # pyright: ignore[reportAttributeAccessIssue]
    with suppress(
        RuntimeError
    ):  # JAX has started: its devices stay as they are, and make_mesh says if they are too few
        jax.config.update("jax_num_cpu_devices", enough)


def refuse_draft(args: argparse.Namespace, verb: str) -> None:
    """Refuses a draft where a verb measures the target alone, before anything is loaded."""
    if args.draft is not None:
        raise ArgumentError(
            f"{verb} cannot use a draft",
            [f"--draft {args.draft}; what it measures is a step of the target alone"],
            "kimi-jax bench spec compares answers with and without a draft; generate, chat and serve speculate.",
        )


def load_model(args: argparse.Namespace) -> "Kimi":
    """The model that the arguments ask for; shows bytes, rate and remaining time on a terminal."""
    layout = chosen_layout(args)
    prepare_devices(layout)
    from kimi_jax.api import load
    from kimi_jax.cli.progress import LoadProgress
    from kimi_jax.testing.shipped import NOTES

    if args.model in NOTES:
        print(NOTES[args.model], file=sys.stderr)
    options: dict[str, Any] = {
        "layout": layout,
        "dtype": args.dtype,
        "kv_dtype": args.kv_dtype,
        "index_dtype": args.index_dtype,
        "draft": args.draft,
        "max_seq_len": args.max_seq_len,
        "experts": args.experts,
        "fp8": args.fp8,
        "impl": args.impl,
        "vision": None if args.vision else False,
        "fetch_images": args.fetch_images,
        "prefill_chunk": args.prefill_chunk,
    }
    with LoadProgress() as progress:
        return load(args.model, progress=progress, **options)
