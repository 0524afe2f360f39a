"""``kimi-jax train``: ``draft`` (`train_draft`) teaches a DSpark draft its target's answers, ``lm`` (`train_lm`) makes a model."""

import argparse
from typing import Any

from kimi_jax.cli import train_draft, train_lm
from kimi_jax.cli.model_args import ArgumentError


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("train", help="train a draft or a language model")
    trained = parser.add_subparsers(dest="trained", metavar="draft|lm", title="what is trained")
    train_draft.add_parser(trained)
    train_lm.add_parser(trained)


def run(args: argparse.Namespace) -> int:
    """Trains."""
    if args.trained == "draft":
        return train_draft.run(args)
    if args.trained == "lm":
        return train_lm.run(args)
    raise ArgumentError(
        "Nothing is named that could be trained", ["what works: draft, lm"], "kimi-jax train draft --help"
    )
