"""``kimi-jax train draft``: a DSpark draft for a model, from sequences of a file or from what the model itself says.

The folder ``--out`` becomes a draft that ``--draft`` takes. The run is kept in its folder ``training``: checkpoints, from which
``--resume`` goes on to the same weights, ``data.jsonl`` where the model was sampled, ``metrics.jsonl``, and ``loss.png`` where
matplotlib is installed.

Keys of ``--json``: ``model``, ``out``, ``steps``, ``sequences``, ``tokens`` (in them), ``data`` (their digest), ``parameters``
(of the draft), ``resumed_at`` (null for a new run), ``seconds`` (of this call's training), and of the last update ``loss``,
``cross_entropy``, ``distance``, ``confidence``, ``accept`` and ``length`` (tokens per step that the acceptances promise).
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_jax.cli.model_args import ArgumentError, add_model_arguments, load_model

if TYPE_CHECKING:
    from kimi_jax.api import Kimi
    from kimi_jax.draft.config_read import DraftSpec
    from kimi_jax.train.draft import DraftSettings
    from kimi_jax.train.draft_data import Sample

ATTENTION = ("heads", "kv_heads", "head_dim", "q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")
SHAPE = ("layers", "block", "ffn", "markov_rank", "mask_id")
RUN = "training"


def add_parser(subparsers: Any) -> None:
    """Adds the verb below ``train``."""
    parser = subparsers.add_parser("draft", help="teach a DSpark draft what its target says")
    add_model_arguments(parser)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the draft is written")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--init", metavar="DRAFT", help="folder of a draft to go on from")
    start.add_argument("--backbone", choices=("gqa", "mla"), default=None, help="of a new draft (default: gqa)")
    shape = parser.add_argument_group("a new draft (default: sizes that follow from the target)")
    for name in (*SHAPE, *ATTENTION):
        shape.add_argument(f"--{name.replace('_', '-')}", type=int, default=None, metavar="N")
    shape.add_argument("--taps", default=None, metavar="L,L", help="tapped layers of the target, from 0")
    shape.add_argument("--stream", choices=("attn_res", "prefix"), default=None, help="default: attn_res")
    shape.add_argument("--causal", action="store_true", help="a drafted position sees the block up to itself only")
    shape.add_argument("--rope-theta", type=float, default=None, metavar="X", help="default: 50000")
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", metavar="FILE", help="JSON or JSON lines: lists of ids, texts, or objects with ids or text"
    )
    data.add_argument(
        "--sample", type=int, default=512, metavar="N", help="without --data: answers to sample (default: 512)"
    )
    data.add_argument("--prompts", metavar="FILE", help="as --data, answered in turn (default: single random ids)")
    data.add_argument("--answer-len", type=int, default=None, help="most ids of an answer (default: fills --seq-len)")
    data.add_argument("--temperature", type=float, default=1.0, help="of sampled answers (default: 1)")
    how = parser.add_argument_group("training")
    how.add_argument("--steps", type=int, default=1000)
    how.add_argument("--batch", type=int, default=8, help="sequences of an update (default: 8)")
    how.add_argument("--seq-len", type=int, default=256, help="tokens of a sequence (default: 256)")
    how.add_argument("--anchors", type=int, default=32, help="blocks of a sequence in an update (default: 32)")
    how.add_argument("--lr", type=float, default=6e-4)
    how.add_argument("--warmup", type=float, default=0.04, help="share of the updates (default: 0.04)")
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--checkpoint-every", type=int, default=200, help="updates between two checkpoints (default: 200)")
    how.add_argument("--log-every", type=int, default=10, help="updates between two measurements (default: 10)")
    how.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    how.add_argument("--export-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def run(args: argparse.Namespace) -> int:
    """Samples where no data is given, trains, and writes the draft."""
    out = Path(args.out)
    _check(args, out)
    from kimi_jax.cli.progress import TrainProgress
    from kimi_jax.train.checkpoint import Checkpoints
    from kimi_jax.train.draft import train_draft
    from kimi_jax.train.draft_data import digest
    from kimi_jax.train.draft_export import export_draft
    from kimi_jax.train.metrics import Metrics

    settings = _settings(args)
    model = load_model(args)
    steps, params = model.runner.steps, model.runner.params
    spec, masters = _begin(args, model)
    samples = _samples(args, model, out, settings)
    checkpoints = Checkpoints(out / RUN / "checkpoints", every=args.checkpoint_every)
    resumed = (checkpoints.steps() or [None])[-1]
    metrics = Metrics(out / RUN / "metrics.jsonl")
    size = sum(array.size for array in masters.values())
    begun = time.monotonic()
    with TrainProgress() as progress:
        kept: dict[str, Any] = {"checkpoints": checkpoints, "metrics": metrics, "every": args.log_every}
        trained = train_draft(steps, params, spec, masters, samples, settings, **kept, watch=progress)
    seconds = time.monotonic() - begun
    _remove_partial(out)
    export_draft(out, spec, trained, args.export_dtype)
    _draw(metrics, out)
    last = {key: value for key, value in metrics.read()[-1].items() if key in _WATCHED}
    found = {
        "model": args.model,
        "out": str(out),
        "steps": args.steps,
        "sequences": len(samples),
        "tokens": sum(len(sample.ids) for sample in samples),
        "data": digest(samples),
        "parameters": size,
        "resumed_at": resumed,
        "seconds": round(seconds, 2),
        **{key: round(value, 5) for key, value in last.items()},
    }
    if args.json:
        print(json.dumps(found))
    else:
        print(
            f"{out}: {size:,} parameters, {args.steps} updates, loss {found['loss']:.3f}, length {found['length']:.2f}"
        )
        print(f"kimi-jax generate --model {args.model} --draft {out} --prompt TEXT")
    return 0


_WATCHED = ("loss", "cross_entropy", "distance", "confidence", "accept", "length")


def _check(args: argparse.Namespace, out: Path) -> None:
    """Everything that is wrong before a model is loaded."""
    problems = list(_settings(args).problems())
    if args.draft is not None:
        problems.append(f"--draft {args.draft} drafts; the draft to go on from is --init")
    if args.fp8 != "none":
        problems.append(f"--fp8 {args.fp8}; the head that a draft learns behind must not be re-quantised")
    low = {"checkpoint_every": 1, "log_every": 1, "sample": 1}
    for name, least in low.items():
        if getattr(args, name) < least:
            problems.append(f"--{name.replace('_', '-')} {getattr(args, name)}; it must be {least} or more")
    given = [name for name in (*SHAPE, *ATTENTION, "taps", "stream", "rope_theta") if getattr(args, name) is not None]
    if args.init and (given or args.causal):
        named = ", ".join(f"--{name.replace('_', '-')}" for name in [*given, *(["causal"] if args.causal else [])])
        problems.append(f"{named}: the draft of --init has these already")
    if args.data and args.prompts:
        problems.append("--data and --prompts; sequences of a file are not answered")
    if not args.temperature >= 0:
        problems.append(f"--temperature {args.temperature}; it must be 0 or more")
    if args.answer_len is not None and args.answer_len < 2:
        problems.append(f"--answer-len {args.answer_len}; an answer to learn from has 2 ids or more")
    if args.taps is not None and not all(part.strip().isdigit() for part in args.taps.split(",")):
        problems.append(f"--taps {args.taps}; expected layers with commas between them")
    if (out / "config.json").exists():
        problems.append(f"--out {out} holds a finished draft already")
    elif (out / RUN).exists() and not args.resume:
        problems.append(f"--out {out} holds a run; add --resume to go on with it, or choose another folder")
    elif not (out / RUN).exists() and list(out.glob("*.safetensors")):
        problems.append(f"--out {out} holds a checkpoint; choose another folder")
    if problems:
        raise ArgumentError("This draft cannot be trained", problems)


def _settings(args: argparse.Namespace) -> "DraftSettings":
    try:
        from kimi_jax.train.draft import DraftSettings
    except ImportError as error:
        raise ArgumentError(
            "Nothing can be trained", [f"{error.name} is not installed"], 'pip install "kimi-jax[train]"'
        ) from None
    sizes = {name: getattr(args, name) for name in ("steps", "batch", "seq_len", "anchors", "lr", "warmup", "seed")}
    return DraftSettings(**sizes)


def _begin(args: argparse.Namespace, model: "Kimi") -> tuple["DraftSpec", dict[str, Any]]:
    """The draft and its first weights: those of a folder, or new ones."""
    from kimi_jax.train.draft_begin import first_weights, new_draft

    steps = model.runner.steps
    if args.init:
        return _load(args, steps)
    shape = {name: value for name in SHAPE if (value := getattr(args, name)) is not None}
    shape |= {name: value for name in ATTENTION if (value := getattr(args, name)) is not None}
    taps = None if args.taps is None else tuple(int(part) for part in args.taps.split(","))
    theta = {} if args.rope_theta is None else {"theta": args.rope_theta}
    given = {"taps": taps, "stream": args.stream or "attn_res", "causal": args.causal}
    spec = new_draft(model.config, args.backbone or "gqa", **given, **theta, **shape)
    return spec, first_weights(spec, model.runner.params, steps.precision, args.seed)


def _load(args: argparse.Namespace, steps: Any) -> tuple["DraftSpec", dict[str, Any]]:
    import jax.numpy as jnp

    from kimi_jax.draft.attach import DraftOptions, read_draft
    from kimi_jax.draft.load import load_draft
    from kimi_jax.draft.steps import with_draft_axes
    from kimi_jax.precision import choose_precision

    spec = read_draft(steps, DraftOptions(args.init))
    loaded = load_draft(args.init, spec, with_draft_axes(steps.layout, spec), steps.mesh, choose_precision("float32"))
    return loaded.spec, {name: jnp.asarray(array, jnp.float32) for name, array in loaded.params.items()}


def _samples(args: argparse.Namespace, model: "Kimi", out: Path, settings: "DraftSettings") -> list["Sample"]:
    """The data of ``--data``, that of an earlier call into the same folder, or new answers of the model."""
    from kimi_jax.train.draft_data import read_samples, write_samples

    encode = model.tokenizer.encode if model.tokenizer else None
    if args.data:
        return read_samples(Path(args.data), model.config.vocab, encode)
    kept = out / RUN / "data.jsonl"
    if not kept.exists():
        prompts = read_prompts(model, Path(args.prompts)) if args.prompts else None
        write_samples(kept, sample_answers(model, args, prompts, settings.seq_len))
    return read_samples(kept, model.config.vocab, None)


def read_prompts(model: "Kimi", file: Path) -> list["Sample"]:
    """What the model is asked, each of one id or more."""
    from kimi_jax.train.draft_data import read_samples

    return read_samples(file, model.config.vocab, model.tokenizer.encode if model.tokenizer else None, least=1)


def sample_answers(
    model: "Kimi", args: argparse.Namespace, prompts: "list[Sample] | None", seq_len: int, rows: int = 16
) -> list["Sample"]:
    """What the model says to ``args.sample`` prompts; every answer has a seed of its own."""
    import numpy as np

    from kimi_jax.engine.request import Request
    from kimi_jax.train.draft_data import Sample
    from kimi_jax.train.state import TrainingError

    runner = model.runner
    room = min(seq_len, runner.capacity)
    if prompts is None:
        allowed = np.flatnonzero(runner.allowed)
        stops = set(model.stop_ids)
        firsts = np.random.default_rng([args.seed, 3]).choice(allowed[[i not in stops for i in allowed]], args.sample)
        asked = [(int(first),) for first in firsts]
    else:
        asked = [prompts[number % len(prompts)].ids for number in range(args.sample)]
    long = max(map(len, asked))
    if long + 2 > room:
        raise TrainingError(
            "The model cannot be sampled",
            [f"a prompt has {long} ids; with --seq-len {room} there is room for {room - 2}"],
        )
    samples = []
    for start in range(0, len(asked), rows):
        some = asked[start : start + rows]
        drawn: list[list[int]] = [[] for _ in some]
        requests = [
            Request(
                ids,
                min(args.answer_len or room, room - len(ids)),
                args.temperature,
                seed=(args.seed * 1_000_003 + number) % 2**32,
                stops=model.stop_ids,
            )
            for number, ids in enumerate(some, start)
        ]
        for event in runner.run(requests):
            if event.token is not None:
                drawn[event.request].append(event.token)
        samples += [Sample((*ids, *answer), len(ids)) for ids, answer in zip(some, drawn, strict=True)]
    # an answer of one id has nothing to draft behind it
    return [sample for sample in samples if len(sample.ids) >= max(sample.prompt, 1) + 2]


def _remove_partial(out: Path) -> None:
    """Clears the way for an export after one that was killed: config.json, which comes last, is not there."""
    for left in (*out.glob("model*.safetensors"), *out.glob("model*.safetensors.index.json")):
        left.unlink()


def _draw(metrics: Any, out: Path) -> None:
    from kimi_jax.problems import ProblemsError
    from kimi_jax.train.metrics import plot

    try:
        plot(metrics, out / RUN / "loss.png", ("loss", "cross_entropy", "distance", "confidence"))
    except ProblemsError as error:
        print(f"no loss.png: {error}", file=sys.stderr)
