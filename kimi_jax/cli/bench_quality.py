"""``kimi-jax bench quality``: what FP8 weights, a narrow cache or another dtype cost, against the same model without them.

One run loads the model once for each form, one after another, and gives all of them the same prompts.

Keys of ``--json``: ``model``, ``layout``, ``tested`` (``dtype``, ``kv_dtype``, ``fp8``, ``experts``), ``prompts`` (how many),
``seed`` (null with ``--ids``), and ``rows``: ``form`` (``tested``, or ``bfloat16`` as a yardstick), ``against`` (``bfloat16`` or
``float32``), ``tokens``, ``kl_mean``, ``kl_p99``, ``kl_max`` (nats), ``top1_agreement`` (0 to 1), ``logit_error`` and
``layer_errors`` (relative; a list, one for each layer). They are described in ``evals/quality.py``.
"""

import argparse
import gc
import json
import sys
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kimi_jax.cli.model_args import ArgumentError, add_model_arguments, load_model, refuse_draft

if TYPE_CHECKING:
    from kimi_jax.evals.quality import Distance, Seen

REFERENCES = ("bfloat16", "float32")


def add_parser(subparsers: Any) -> None:
    """Adds the verb below ``bench``."""
    parser = subparsers.add_parser("quality", help="distance of a narrower form from bfloat16 and float32")
    add_model_arguments(parser)
    parser.add_argument("--ids", metavar="FILE", help="a JSON list of prompts, each a list of token ids")
    parser.add_argument("--prompts", type=int, default=4, help="random prompts where --ids is not given (default: 4)")
    parser.add_argument("--length", type=int, default=64, help="tokens of each of them (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts")
    parser.add_argument(
        "--against", default=",".join(REFERENCES), help=f"forms to compare with (default: {','.join(REFERENCES)})"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Measures and prints one row for each reference."""
    against = _references(args.against)
    refuse_draft(args, "bench quality")
    prompts = _read(Path(args.ids)) if args.ids else None
    if prompts is None and not (1 <= args.prompts <= 1024 and 2 <= args.length <= 1 << 20):
        raise ArgumentError(
            "These prompts cannot be made", ["--prompts is from 1 to 1024, --length from 2 to 1,048,576"]
        )
    forms = {"tested": args, **{name: _plain(args, name) for name in against}}
    if _form(args) in [_form(forms[name]) for name in against]:
        raise ArgumentError(
            "Nothing is tested",
            [f"the model as asked is the form that it is compared with: {', '.join(against)}"],
            "Give --fp8, --kv-dtype fp8 or another --dtype, or leave that form out of --against.",
        )
    seen: dict[str, Seen] = {}
    for name, form in forms.items():
        seen[name], prompts = _see(form, prompts)
    pairs = [("tested", name) for name in against]
    if set(REFERENCES) <= set(against):
        pairs.append(REFERENCES)
    from kimi_jax.evals.quality import distance

    rows = [(form, reference, distance(seen[form], seen[reference])) for form, reference in pairs]
    _show(args, len(prompts or ()), rows)
    return 0


def _references(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    unknown = [f"{name!r} is no form to compare with" for name in names if name not in REFERENCES]
    if unknown:
        raise ArgumentError("This comparison cannot be made", unknown, f"Known: {', '.join(REFERENCES)}.")
    return names


def _plain(args: argparse.Namespace, dtype: str) -> argparse.Namespace:
    """The same model held as the checkpoint holds it, with caches in its dtype."""
    plain = copy(args)
    plain.dtype, plain.kv_dtype, plain.fp8 = dtype, None, "none"
    return plain


def _form(args: argparse.Namespace) -> tuple[str, str, str]:
    return args.dtype, args.kv_dtype or args.dtype, args.fp8


def _see(args: argparse.Namespace, prompts: list[list[int]] | None) -> "tuple[Seen, list[list[int]]]":
    """Loads one form, runs the prompts, and lets go of it before the next is loaded."""
    model = load_model(args)
    from kimi_jax.checkpoint.load import free
    from kimi_jax.engine.request import check_ids
    from kimi_jax.evals.quality import see

    if prompts is None:
        rng = np.random.default_rng(args.seed)
        prompts = rng.integers(0, model.config.vocab, (args.prompts, args.length)).tolist()
        assert prompts is not None
    for prompt in prompts:
        check_ids(prompt, model.config.vocab, model.runner.capacity)
    try:
        return see(model, prompts), prompts
    finally:
        free(model.runner.params)
        del model
        gc.collect()


def _read(file: Path) -> list[list[int]]:
    from kimi_jax.cli.generate import read_json

    value = read_json(file)
    good = isinstance(value, list) and value and all(isinstance(prompt, list) and len(prompt) > 1 for prompt in value)
    if not good or any(type(number) is not int for prompt in value for number in prompt):
        raise ArgumentError(
            f"{file} holds no prompts", ["expected a JSON list of lists of at least two integer token ids"]
        )
    return value


def _show(args: argparse.Namespace, prompts: int, rows: "list[tuple[str, str, Distance]]") -> None:
    if args.json:
        tested = {name: getattr(args, name) for name in ("dtype", "kv_dtype", "fp8", "experts")}
        found = [{"form": form, "against": reference, **asdict(row)} for form, reference, row in rows]
        head = {"model": args.model, "layout": args.layout or "single", "tested": tested, "prompts": prompts}
        seed = None if args.ids else args.seed
        print(json.dumps({**head, "seed": seed, "rows": found}, allow_nan=False))
        return
    print(f"{prompts} prompts, {rows[0][2].tokens} tokens", file=sys.stderr)
    heads = f"{'KL mean':>10} {'KL p99':>10} {'KL max':>10} {'top-1':>7} {'logits':>8}"
    print(f"{'form':10} {'against':10} {heads}  layers, first to last")
    for form, reference, row in rows:
        layers = " ".join(f"{error:.4f}" for error in row.layer_errors)
        print(
            f"{form:10} {reference:10} {row.kl_mean:10.6f} {row.kl_p99:10.6f} {row.kl_max:10.6f} {row.top1_agreement:7.2%} "
            f"{row.logit_error:8.4f}  {layers}"
        )
