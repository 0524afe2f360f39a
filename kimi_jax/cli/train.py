"""``kimi-jax train``: ``train draft`` (`train_draft`) teaches a DSpark draft its target's answers."""

import argparse
from typing import Any

from kimi_jax.cli import train_draft
from kimi_jax.cli.model_args import ArgumentError


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("train", help="train a draft model")
    trained = parser.add_subparsers(dest="trained", metavar="draft", title="what is trained")
    train_draft.add_parser(trained)


def run(args: argparse.Namespace) -> int:
    """Trains."""
    if args.trained == "draft":
        return train_draft.run(args)
    raise ArgumentError("Nothing is named that could be trained", ["what works: draft"], "kimi-jax train draft --help")
