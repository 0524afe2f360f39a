"""``kimi-jax train lm``: a language model from nothing, in the released layout.

The folder ``--out`` becomes a model that every command takes. The run is kept in its sibling ``OUT.run``: checkpoints, from which
``--resume`` goes on to the same weights, ``metrics.jsonl``, and ``loss.png`` where matplotlib is installed.

Keys of ``--json``: ``config``, ``out``, ``steps``, ``parameters``, ``resumed_at`` (null for a new run), ``seconds`` (of this call's
training), and of the last update ``loss``, ``index_loss``, ``right`` (share of the learnt ids that were the likeliest).
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_jax.cli.model_args import ArgumentError, chosen_layout, prepare_devices

if TYPE_CHECKING:
    from kimi_jax.config import KimiConfig
    from kimi_jax.placement.layout import Layout
    from kimi_jax.train.lm import Trainer
    from kimi_jax.train.packing import Packed

NANO = "nano"
_TOLD = ("loss", "index_loss", "right")


def add_parser(subparsers: Any) -> None:
    """Adds the verb below ``train``."""
    parser = subparsers.add_parser("lm", help="train a language model from nothing")
    parser.add_argument("--config", required=True, metavar="FOLDER", help="config.json and tokenizer files")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the model is written")
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", default=NANO, metavar="FILE", help="JSON lines with ids and mask (which of them are learnt), or nano"
    )
    data.add_argument(
        "--seq-lens", default="64,128,256,512", metavar="N,N", help="row lengths (default: 64,128,256,512)"
    )
    data.add_argument("--batch-tokens", type=int, default=4096, metavar="N", help="of an update (default: 4096)")
    how = parser.add_argument_group("training")
    how.add_argument("--steps", type=int, default=1000)
    how.add_argument("--lr", type=float, default=0.02, help="of Muon (default: 0.02)")
    how.add_argument("--adam-lr", type=float, default=3e-3, help="of AdamW (default: 0.003)")
    how.add_argument("--warmup", type=float, default=0.02, help="share of the updates (default: 0.02)")
    how.add_argument("--decay", type=float, default=0.2, help="share of the updates at the end (default: 0.2)")
    how.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients (default: 1)")
    how.add_argument(
        "--stage", choices=("dense", "sparse"), default="sparse", help="what attention reads (default: sparse)"
    )
    how.add_argument("--compute", choices=("float32", "bfloat16"), default="float32")
    how.add_argument("--remat", action="store_true", help="compute layers again instead of keeping their activations")
    how.add_argument("--no-qat", action="store_true", help="do not project experts onto MXFP4 while training")
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--checkpoint-every", type=int, default=200, help="updates between two checkpoints (default: 200)")
    how.add_argument("--log-every", type=int, default=10, help="updates between two measurements (default: 10)")
    how.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--layout", default=None, metavar="NAME|FILE", help="placement (default: single)")
    parser.add_argument("--tensor-parallel-size", type=int, default=None, metavar="N", help="shortcut for a layout")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def run(args: argparse.Namespace) -> int:
    """Trains, and writes the model."""
    out, kept = Path(args.out), Path(args.out + ".run")
    _check(args, out, kept)
    layout = chosen_layout(args)
    prepare_devices(layout)
    from kimi_jax.cli.progress import TrainProgress
    from kimi_jax.config import load_config
    from kimi_jax.train import loop
    from kimi_jax.train.checkpoint import Checkpoints
    from kimi_jax.train.metrics import Metrics
    from kimi_jax.train.release import release

    folder = Path(args.config)
    config = load_config(folder)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    trainer = _trainer(args, config, layout)
    batches = _batches(args, folder, config, layout)
    state = trainer.begin(args.seed)
    size = sum(array.size for array in state.params.values())
    checkpoints = Checkpoints(kept / "checkpoints", every=args.checkpoint_every, run=_asked(args, values))
    resumed = (checkpoints.steps() or [None])[-1]
    metrics = Metrics(kept / "metrics.jsonl")
    begun = time.monotonic()
    with TrainProgress() as progress:
        done = {"checkpoints": checkpoints, "metrics": metrics, "every": args.log_every, "watch": progress}
        state = loop.run(trainer.update_of(state), state, batches, steps=args.steps, **done)
    seconds = time.monotonic() - begun
    release(out, state, config, values, folder)
    _draw(metrics, kept)
    last = {key: round(value, 5) for key, value in metrics.read()[-1].items() if key in _TOLD}
    found = {"config": args.config, "out": str(out), "steps": args.steps, "parameters": size, "resumed_at": resumed}
    if args.json:
        print(json.dumps({**found, "seconds": round(seconds, 2), **last}))
    else:
        print(f"{out}: {size:,} parameters, {args.steps} updates, loss {last['loss']:.3f}, {last['right']:.1%} right")
    return 0


def _check(args: argparse.Namespace, out: Path, kept: Path) -> None:
    """Everything that is wrong before a model is made."""
    problems = []
    for name in ("steps", "batch_tokens", "checkpoint_every", "log_every"):
        if getattr(args, name) < 1:
            problems.append(f"--{name.replace('_', '-')} {getattr(args, name)}; it must be 1 or more")
    if args.warmup < 0 or args.decay < 0 or args.warmup + args.decay > 1:
        problems.append(f"--warmup {args.warmup} and --decay {args.decay}; they are shares of the run")
    if not all(part.strip().isdigit() for part in args.seq_lens.split(",")):
        problems.append(f"--seq-lens {args.seq_lens}; expected numbers with commas between them")
    if not (Path(args.config) / "config.json").is_file():
        problems.append(f"--config {args.config} is no folder with a config.json")
    if out.exists():
        problems.append(f"--out {out} exists")
    elif (kept / "checkpoints").exists() and not args.resume:
        problems.append(f"{kept} holds a run; add --resume to go on with it, or choose another folder")
    if problems:
        raise ArgumentError("This model cannot be trained", problems)


def _asked(args: argparse.Namespace, values: dict[str, Any]) -> dict[str, Any]:
    """What the weights depend on."""
    free = ("out", "resume", "json", "debug", "checkpoint_every", "log_every", "config", "verb", "trained")
    return {"config": values, **{key: value for key, value in sorted(vars(args).items()) if key not in free}}


def _trainer(args: argparse.Namespace, config: "KimiConfig", layout: "Layout") -> "Trainer":
    try:
        from kimi_jax.train.lm import Options, Trainer
        from kimi_jax.train.optimiser import Rates
    except ImportError as error:
        raise ArgumentError(
            "Nothing can be trained", [f"{error.name} is not installed"], 'pip install "kimi-jax[train]"'
        ) from None
    from kimi_jax.placement.mesh import make_mesh
    from kimi_jax.train.schedule import warmup_stable_decay

    warmup, decay = round(args.warmup * args.steps), round(args.decay * args.steps)
    spans = warmup, args.steps - warmup - decay, decay
    rates = Rates(warmup_stable_decay(args.lr, *spans), warmup_stable_decay(args.adam_lr, *spans), clip=args.clip)
    options = Options(args.stage, compute=args.compute, remat=args.remat, quantise=not args.no_qat)
    return Trainer(config, layout, make_mesh(layout), rates, options)


def _batches(args: argparse.Namespace, folder: Path, config: "KimiConfig", layout: "Layout") -> "Packed":
    from kimi_jax.train.lm_data import nano, read
    from kimi_jax.train.packing import Buckets, Packed, from_list

    lengths = tuple(sorted({int(part) for part in args.seq_lens.split(",")}))
    buckets = Buckets(lengths, args.batch_tokens, layout.parts("batch"))
    if args.data == NANO:
        return Packed(nano(folder, config.vocab, args.seed), buckets, args.seed)
    return Packed(from_list(read(Path(args.data), config.vocab), args.seed), buckets, args.seed)


def _draw(metrics: Any, kept: Path) -> None:
    from kimi_jax.problems import ProblemsError
    from kimi_jax.train.metrics import plot

    try:
        plot(metrics, kept / "loss.png", ("loss", "index_loss"))
    except ProblemsError as error:
        print(f"no loss.png: {error}", file=sys.stderr)
