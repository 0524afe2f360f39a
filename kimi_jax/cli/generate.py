"""``kimi-jax generate``: continue one prompt, streaming on a terminal, or one JSON object."""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kimi_jax.cli.images import add_image_argument, image_problems
from kimi_jax.cli.model_args import ArgumentError, add_model_arguments, load_model
from kimi_jax.text.tokenizer import EncodeError

LONGEST_FILE = 64 << 20
"""Bytes of a prompt file; more is a mistake."""

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("generate", help="continue one prompt, or answer one conversation")
    add_model_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text; one user message unless --raw")
    prompt.add_argument(
        "--messages", metavar="FILE", help="JSON list of chat messages, or an object with messages and tools"
    )
    prompt.add_argument("--ids", metavar="FILE", help="JSON list of token ids, used as they are")
    add_image_argument(
        parser, "before --prompt, for an image part without a URL of --messages, or for placeholders of --ids"
    )
    parser.add_argument("--raw", action="store_true", help="no chat template: the prompt's text is continued")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", "--temp", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--stop", action="append", default=[], help="string that ends the answer; may be repeated")
    parser.add_argument(
        "--no-thinking", dest="thinking", action="store_false", help="ask for an answer without thoughts"
    )
    parser.add_argument("--effort", default=None, help="how much to think: low, high or max (default: max)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end of the message")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Loads, generates, prints."""
    _check_options(args)
    source, tools = _read_prompt(args)
    model = load_model(args)
    prompt = source
    if args.raw:
        if model.tokenizer is None:
            raise ArgumentError("This model cannot read text", ["it has no tokenizer files"], "Give --ids FILE.")
        try:
            prompt = model.tokenizer.encode(source)
        except EncodeError as error:
            raise ArgumentError("The prompt cannot be encoded", [str(error)]) from None
    options: dict[str, Any] = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "seed": args.seed,
        "stop": args.stop,
        "images": args.image,
        "tools": tools,
        "thinking": args.thinking,
        "effort": args.effort or "max",
        "ignore_eos": args.ignore_eos,
    }
    began = time.perf_counter()
    if args.json:
        done = model.generate(prompt, args.max_tokens, logprobs=True, **options)
        print(
            json.dumps(
                {**asdict(done), "seconds": round(time.perf_counter() - began, 3)}, ensure_ascii=False, allow_nan=False
            )
        )
        return 1 if done.finish_reason == "error" else 0
    count, finish = 0, None
    for piece in model.stream(prompt, args.max_tokens, **options):
        count += len(piece.token_ids)
        finish = piece.finish_reason
        _show(piece, ids_only=model.tokenizer is None)
    print(flush=True)
    seconds = time.perf_counter() - began
    print(f"[{finish}: {count} tokens in {seconds:.1f} s, compilation included]", file=sys.stderr)
    return 1 if finish == "error" else 0


def _show(piece: Any, *, ids_only: bool) -> None:
    if ids_only:
        print(*piece.token_ids, end=" ", flush=True)
        return
    dim, plain = (DIM, PLAIN) if sys.stdout.isatty() else ("", "")
    if piece.reasoning:
        print(f"{dim}{piece.reasoning}{plain}", end="", flush=True)
    print(piece.text, end="", flush=True)
    for call in piece.tool_calls:
        if call.name:
            print(f"\n[calls {call.name}] ", end="")
        print(call.arguments, end="", flush=True)


def _check_options(args: argparse.Namespace) -> None:
    """Refuses, before a model is loaded, what no model could do."""
    from kimi_jax.engine.request import number_problems
    from kimi_jax.text.effort import REQUESTED

    names = ("max_tokens", "temperature", "top_p", "top_k", *(["seed"] if args.seed is not None else []))
    problems = number_problems(**{name: getattr(args, name) for name in names})
    if not all(args.stop):
        problems.append("--stop: a stop string has at least one character")
    if args.effort not in (None, *REQUESTED):
        problems.append(f"--effort {args.effort}; choose {', '.join(REQUESTED)}")
    problems += image_problems(args)
    if args.raw and args.image:
        problems.append("--image has no place in --raw text; leave out --raw")
    if args.raw or args.ids is not None:
        flags = {"--effort": args.effort is not None, "--no-thinking": not args.thinking}
        how = "--raw continues --prompt as it is" if args.raw else "--ids are used as they are"
        problems += [f"{flag} is for conversations; {how}" for flag, given in flags.items() if given]
    if problems:
        raise ArgumentError("This cannot be generated", problems)


def _read_prompt(args: argparse.Namespace) -> tuple[Any, Any]:
    """The prompt and the tools that come with it."""
    if args.raw and args.prompt is None:
        raise ArgumentError(
            "These arguments contradict one another", ["--raw continues --prompt"], "Give --prompt TEXT."
        )
    if args.prompt is not None:
        if not args.prompt:
            raise ArgumentError("The prompt is empty", ["--prompt needs at least one character"])
        return args.prompt, None
    ids_only = args.ids is not None
    file = Path(args.ids if ids_only else args.messages)
    value = read_json(file)
    if ids_only:
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise ArgumentError(f"{file} is no list of token ids", ["expected a JSON list of integers"])
        return value, None
    conversation = value if isinstance(value, dict) else {"messages": value}
    messages, unknown = conversation.get("messages"), sorted(conversation.keys() - {"messages", "tools"})
    problems = [f"{key} is not known; options are given on the command line" for key in unknown]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        problems.append('expected a JSON list of messages, or {"messages": [...], "tools": [...]}')
    if problems:
        raise ArgumentError(f"{file} is no conversation", problems)
    return messages, conversation.get("tools")


def read_json(file: Path) -> Any:
    """The JSON value in a file. Raises ArgumentError."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        with file.open("rb") as opened:
            content = opened.read(LONGEST_FILE + 1)
        if len(content) > LONGEST_FILE:
            raise ValueError(f"it is larger than {LONGEST_FILE >> 20} MB")
        return json.loads(content.decode("utf-8"), parse_constant=refuse)
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{file} cannot be read", [str(error)], "It must hold JSON.") from None
