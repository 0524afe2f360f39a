"""``kimi-jax serve``: the OpenAI-compatible HTTP server. Flags are spelled as vLLM and ATOM spell them."""

import argparse
import dataclasses
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kimi_jax.cli.model_args import ArgumentError, add_model_arguments, load_model

if TYPE_CHECKING:
    from kimi_jax.api import Kimi
    from kimi_jax.serve.images import Images
    from kimi_jax.serve.limits import ImageLimits, Limits

D = TypeVar("D", bound=Any)

MOST_SLOTS = 4096
LONGEST_KEY_FILE = 1 << 20


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("serve", help="OpenAI-compatible HTTP server")
    parser.add_argument("folder", nargs="?", default=None, metavar="MODEL", help="the same as --model")
    add_model_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    _flag(parser, "--served-model-name", nargs="+", metavar="NAME", help="names that clients may use (default: MODEL)")
    _flag(parser, "--api-key", action="append", default=[], metavar="KEY", help="ask for this key; may be repeated")
    _flag(parser, "--api-key-file", metavar="FILE", help="the same from a file, one key a line: others cannot see it")
    _flag(parser, "--max-num-seqs", type=int, default=8, metavar="N", help="sequences decoded together (default: 8)")
    _flag(
        parser,
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="most prompt tokens of one turn (default: --prefill-chunk)",
    )
    _flag(parser, "--max-queue", type=int, default=256, metavar="N", help="requests that may wait (default: 256)")
    _flag(
        parser,
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of each device's memory, for weights and caches (default: 0.9)",
    )
    _flag(parser, "--block-size", type=int, metavar="N", help="tokens of a cache page (default: up to 64)")
    _flag(
        parser,
        "--num-gpu-blocks-override",
        type=int,
        metavar="N",
        help="pages in all (default: what memory holds; on a CPU twice what all sequences fill)",
    )
    # both words on one side or the other: --enable_prefix_caching, --no-enable-prefix-caching
    parser.add_argument(
        *("--enable-prefix-caching", "--enable_prefix_caching"),
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep what prompts have in common (default: yes)",
    )
    _flag(
        parser,
        "--enable-prompt-logprobs",
        action="store_true",
        help="score prompt tokens (echo with logprobs, for evaluations); takes the cache of one more sequence",
    )
    _flag(parser, "--max-images", type=int, metavar="N", help="of one request (default: 32)")
    _flag(parser, "--max-image-bytes", type=int, metavar="N", help="largest image file (default: 20 MiB)")
    _flag(parser, "--max-image-pixels", type=int, metavar="N", help="of the largest image (default: 67,108,864)")
    _flag(parser, "--image-timeout", type=float, metavar="S", help="until one is fetched and decoded (default: 20)")
    _flag(parser, "--image-threads", type=int, metavar="N", help="decoded at a time (default: 2)")
    _flag(
        parser,
        "--image-memory",
        type=int,
        metavar="BYTES",
        help="of the host for images, in use or kept for later (default: 4 GiB)",
    )
    _flag(parser, "--max-body-bytes", type=int, default=None, metavar="N", help="largest request (default: 16 MiB)")
    _flag(parser, "--request-timeout", type=float, default=None, metavar="S", help="for one answer (default: 3600)")
    _flag(
        parser,
        "--drain-timeout",
        type=float,
        default=None,
        metavar="S",
        help="for answers under way after SIGTERM (default: 120)",
    )
    _flag(
        parser,
        "--log-level",
        default="info",
        choices=("critical", "error", "warning", "info", "debug"),
        help="of the server's log on stderr",
    )


def _flag(parser: argparse.ArgumentParser, name: str, **options: Any) -> None:
    """A flag that may be written with hyphens or underscores."""
    parser.add_argument(name, "--" + name[2:].replace("-", "_"), **options)


def run(args: argparse.Namespace) -> int:
    """Loads, compiles, serves until it is told to stop."""
    try:
        from kimi_jax.serve.run import bind
    except ImportError as error:
        raise ArgumentError(
            "The server cannot start", [f"{error.name} is not installed"], "pip install 'kimi-jax[serve]'"
        ) from None
    limits, keys = (_limits(args), _image_limits(args)), _keys(args)
    if args.folder is not None:
        args.model = args.folder
    if args.kv_dtype == "auto":
        args.kv_dtype = None
    with bind(args.host, args.port) as listener:
        return _serve(args, *limits, keys, listener)


def _serve(
    args: argparse.Namespace,
    limits: "Limits",
    image_limits: "ImageLimits",
    keys: tuple[str, ...],
    listener: socket.socket,
) -> int:
    model = load_model(args)

    from kimi_jax.engine.budget import engine_limits
    from kimi_jax.engine.drafted import DraftedRunner
    from kimi_jax.engine.engine import Engine
    from kimi_jax.serve.model import served
    from kimi_jax.serve.run import Server, serve
    from kimi_jax.serve.scoring import Scorer

    runner, images = model.runner, _images(model, image_limits)
    sizes = engine_limits(
        runner.steps,
        slots=args.max_num_seqs,
        page=args.block_size,
        chunk=args.max_num_batched_tokens or args.prefill_chunk,
        queue=args.max_queue,
        prefix=args.enable_prefix_caching,
        share=args.gpu_memory_utilization,
        pages=args.num_gpu_blocks_override,
        tower=model.vision.steps if images and model.vision else None,
    )
    engine = Engine.build(runner.steps, runner.params, runner.allowed, sizes, images=images is not None)
    names = args.served_model_name or [str(args.model)]
    what = served(model, engine, names, scores_prompts=args.enable_prompt_logprobs, images=images is not None)
    speculating = f", {engine.drafts} drafts a step" if engine.drafts else ""
    print(
        f"{names[0]}: {sizes.slots} sequences of up to {engine.capacity:,} tokens, {sizes.pages:,} pages of {sizes.page}, "
        f"{sizes.checkpoints} checkpoints, {'text and images' if images else 'text only'}{speculating}; compiling at http://{args.host}:{listener.getsockname()[1]}",
        file=sys.stderr,
    )
    alone = runner.without_draft() if isinstance(runner, DraftedRunner) else runner
    scorer = Scorer(alone) if args.enable_prompt_logprobs else None
    return 0 if serve(Server(what, engine, limits, keys, args.log_level, scorer, images), listener) else 1


def _images(model: "Kimi", limits: "ImageLimits") -> "Images | None":
    """The eyes of the server, where the model has any."""
    from kimi_jax.serve.images import make_images

    if model.vision is None:
        return None
    try:
        return make_images(model.vision, limits)
    except ImportError as error:
        raise ArgumentError(
            "The server cannot read images",
            [f"{error.name} is not installed"],
            "pip install 'kimi-jax[vision]', or --no-vision for text only.",
        ) from None


def _image_limits(args: argparse.Namespace) -> "ImageLimits":
    """Bounds of images, which :func:`_limits` has checked."""
    from kimi_jax.serve.limits import ImageLimits

    of_one = {"bytes": args.max_image_bytes, "pixels": args.max_image_pixels, "seconds": args.image_timeout}
    chosen = {"images": args.max_images, "threads": args.image_threads, "memory_bytes": args.image_memory}
    limits = ImageLimits()
    return _replaced(limits, **chosen, picture=_replaced(limits.picture, **of_one))


def _limits(args: argparse.Namespace) -> "Limits":
    """Bounds of requests; refuses, before a model is loaded, what no server could do."""
    from kimi_jax.media.limits import PILLOW_PIXELS
    from kimi_jax.serve.limits import Limits

    more = []
    if args.folder is not None and args.model not in ("random-tiny", args.folder):
        more.append(f"MODEL is {args.folder} and --model is {args.model}; give one")
    _check_bounds(
        ("--port", args.port, 0, 65535),
        ("--max-num-seqs", args.max_num_seqs, 1, MOST_SLOTS),
        ("--max-num-batched-tokens", args.max_num_batched_tokens, 1, 1 << 20),
        ("--max-queue", args.max_queue, 1, 1 << 20),
        ("--gpu-memory-utilization", args.gpu_memory_utilization, 0.01, 1.0),
        ("--block-size", args.block_size, 1, 1 << 16),
        ("--num-gpu-blocks-override", args.num_gpu_blocks_override, 1, 1 << 30),
        ("--max-body-bytes", args.max_body_bytes, 1024, 1 << 32),
        ("--request-timeout", args.request_timeout, 1, 1e6),
        ("--drain-timeout", args.drain_timeout, 0, 1e6),
        ("--max-images", args.max_images, 1, 1024),
        ("--max-image-bytes", args.max_image_bytes, 1024, 1 << 32),
        ("--max-image-pixels", args.max_image_pixels, 1, PILLOW_PIXELS),
        ("--image-timeout", args.image_timeout, 0.1, 1e4),
        ("--image-threads", args.image_threads, 1, 64),
        ("--image-memory", args.image_memory, 1 << 20, 1 << 42),
        more=more,
    )
    return _replaced(
        Limits(),
        body_bytes=args.max_body_bytes,
        request_seconds=args.request_timeout,
        drain_seconds=args.drain_timeout,
    )


def _check_bounds(*bounds: tuple[str, float | None, float, float], more: Sequence[str] = ()) -> None:
    """Raises ArgumentError for every flag that lies outside its bounds, and for whatever else is wrong."""
    problems = [
        f"{flag} {value}; it must be from {low:,} to {high:,}"
        for flag, value, low, high in bounds
        if value is not None and not low <= value <= high
    ]
    if problems or more:
        raise ArgumentError("This server cannot be started", [*problems, *more])


def _replaced(record: D, **values: Any) -> D:
    """A record with those values that are given."""
    return dataclasses.replace(record, **{name: value for name, value in values.items() if value is not None})


def _keys(args: argparse.Namespace) -> tuple[str, ...]:
    keys = list(args.api_key)
    if args.api_key_file is not None:
        file = Path(args.api_key_file)
        try:
            if file.stat().st_size > LONGEST_KEY_FILE:
                raise OSError("it is too large for a list of keys")
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError("The keys cannot be read", [f"{file}: {error}"]) from None
        keys += [line.strip() for line in lines if line.strip()]
        if not keys:
            raise ArgumentError("The keys cannot be read", [f"{file} has no key in it"], "One key a line works.")
    if not all(keys):
        raise ArgumentError("This server cannot be started", ["--api-key is empty: everybody would have it"])
    return tuple(keys)
