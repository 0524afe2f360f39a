"""Entry point of `kimi-jax`: picks the verb, imports it alone, and turns errors into exit statuses.

A verb is a module `kimi_jax.cli.<verb>` with two functions. `add_parser(subparsers)` adds a sub-parser named after
the verb; `run(args)` does the work and returns the exit status: 0 done, 1 the work failed, 2 the request was wrong. A
verb refuses a request by raising `ProblemsError`. Messages go to stderr: stdout belongs to the verb.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

from kimi_jax import __version__
from kimi_jax.problems import ProblemsError

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130

VERBS = {
    "generate": "continue one prompt, or answer one conversation",
    "chat": "talk to the model in the terminal",
    "convert": "released checkpoint to an orbax folder that opens on any mesh, and back",
    "bench": "measure prefill and decode",
    "plan": "bytes, bounds and fit of a model under a layout, without weights or devices",
    "compile": "compile the full-size steps for a target, without devices",
    "serve": "OpenAI-compatible HTTP server",
    "eval": "run public evaluations of a served model, and kimi-nano's own",
    "train": "train a language model or a draft",
    "doctor": "is this machine ready, what is missing, what works here",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb = next((word for word in words if not word.startswith("-")), None)
    # The verb's import can fail or be interrupted too, so no argument is parsed outside the guard.
    debug = "--debug" in words
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not have every character that a model writes
    try:
        return _run(words, verb)
    except ProblemsError as error:
        return _report(f"kimi-jax {verb}: {error}", REFUSED, debug)
    except KeyboardInterrupt:
        return _report(f"kimi-jax {verb}: interrupted", INTERRUPTED, debug)
    except BrokenPipeError:
        # The reader of stdout went away (`| head`): nothing more to say, also not when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        hint = "" if debug else " (--debug shows where)"
        return _report(f"kimi-jax {verb} failed: {type(error).__name__}: {error}{hint}", FAILED, debug)


def _run(words: Sequence[str], verb: str | None) -> int:
    parser = _parser(verb)
    try:
        args = parser.parse_args(words)
        if args.verb is None:
            parser.error(f"say what to do: {', '.join(VERBS)}")
    except SystemExit as stop:  # argparse leaves this way after --help, --version and errors
        return stop.code if isinstance(stop.code, int) else DONE
    return import_module(f"kimi_jax.cli.{args.verb}").run(args)


def _parser(verb: str | None) -> argparse.ArgumentParser:
    """The command's parser; only `verb` has its own arguments, the others are there for the overview."""
    parser = argparse.ArgumentParser(prog="kimi-jax", description="Kimi-K3 in JAX.")
    parser.add_argument("--version", action="version", version=f"kimi-jax {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for name, line in VERBS.items():
        if name != verb:
            subparsers.add_parser(name, help=line)
            continue
        import_module(f"kimi_jax.cli.{name}").add_parser(subparsers)
        # SUPPRESS: without the flag after the verb, one before it must stay set.
        help_line = "show the traceback of an error"
        subparsers.choices[name].add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=help_line)
    return parser


def _report(message: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(message, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
