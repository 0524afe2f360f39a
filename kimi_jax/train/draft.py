"""Online distillation of a DSpark draft from a frozen target (DSpark notes, sections 8 and 12).

An update runs the target over some sequences, then the draft over a block behind many anchors of each. Embedding and head are the
target's and stay as they are; the draft's own parameters are float32 masters, cast for every pass to what inference holds.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from kimi_jax.draft.attend import BLOCK as MOST_TOKENS
from kimi_jax.draft.config_read import DraftSpec
from kimi_jax.draft.dspark import Dspark, draft_parameters
from kimi_jax.loop import Steps
from kimi_jax.model import Params, abstract, bind
from kimi_jax.placement.collectives import Parallel
from kimi_jax.train.checkpoint import Checkpoints
from kimi_jax.train.draft_blocks import packed_blocks, score_blocks
from kimi_jax.train.draft_data import DraftBatch, DraftBatches, Sample, digest
from kimi_jax.train.draft_losses import LossWeights, parts, total
from kimi_jax.train.draft_target import TargetSteps
from kimi_jax.train.loop import Update, Watch, run, unseen
from kimi_jax.train.metrics import Metrics
from kimi_jax.train.schedule import Schedule, warmup_cosine
from kimi_jax.train.state import TrainingError, TrainState, begin


@dataclass(frozen=True)
class DraftSettings:
    """How a draft is trained.

    Attributes:
      steps: updates.
      batch: sequences of an update.
      seq_len: tokens of a sequence.
      anchors: blocks of a sequence in an update.
      lr: highest learning rate, after the warm-up and before the cosine.
      warmup: share of the updates in which the rate rises.
      decay: of matrices, by AdamW.
      clip: largest norm of a gradient.
      seed: of the order of the data and of the anchors.
      weights: of the losses.
    """

    steps: int = 1000
    batch: int = 8
    seq_len: int = 256
    anchors: int = 32
    lr: float = 6e-4
    warmup: float = 0.04
    decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    weights: LossWeights = field(default_factory=LossWeights)

    def problems(self) -> list[str]:
        """Everything that is wrong with them."""
        low = {"steps": 1, "batch": 1, "seq_len": 3, "anchors": 1, "seed": 0}
        found = [
            f"{name} = {getattr(self, name)}; it must be {least} or more"
            for name, least in low.items()
            if getattr(self, name) < least
        ]
        if self.seq_len > MOST_TOKENS:
            found.append(f"seq_len = {self.seq_len:,}; a sequence of draft training holds up to {MOST_TOKENS:,} tokens")
        positive = {"lr": self.lr, "clip": self.clip, "weights.decay": self.weights.decay}
        found += [f"{name} = {value}; it must be positive" for name, value in positive.items() if not value > 0]
        if not 0 <= self.warmup <= 1:
            found.append(f"warmup = {self.warmup}; it is a share of the updates, from 0 to 1")
        if not self.decay >= 0:
            found.append(f"decay = {self.decay}; it must be 0 or more")
        return found

    @property
    def rate(self) -> Schedule:
        """Updates done -> the learning rate."""
        return warmup_cosine(self.lr, round(self.warmup * self.steps), self.steps)


def train_draft(
    steps: Steps,
    target: Params,
    spec: DraftSpec,
    masters: dict[str, Array],
    samples: Sequence[Sample],
    settings: DraftSettings,
    *,
    checkpoints: Checkpoints | None = None,
    metrics: Metrics | None = None,
    every: int = 10,
    watch: Watch = unseen,
) -> dict[str, Array]:
    """Trains a draft for a loaded target.

    Args:
      steps, target: programs and parameters of the target, as a runner holds them.
      spec: the draft.
      masters: its parameters to begin with, float32 by checkpoint name; they are used up.
      samples: the sequences.
      settings: how.
      checkpoints: where the run is saved; what it depends on is added to its ``run``.
      metrics, every, watch: as for ``loop.run``.

    Returns:
      The trained masters.

    Raises:
      TrainingError: everything that does not fit, at once; a loss that is no number; a resume that does not fit.
    """
    problems = [*settings.problems(), *target_problems(steps, spec)]
    if not samples:
        problems.append("there are no sequences")
    elif all(min(len(sample.ids), settings.seq_len) < max(sample.prompt, 1) + 2 for sample in samples):
        problems.append(f"no sequence has anything to draft within seq_len = {settings.seq_len}")
    rows = steps.layout.parts("batch")
    if settings.batch % rows:
        problems.append(f"batch = {settings.batch}; layout {steps.layout.name} cuts it into {rows} equal parts")
    if problems:
        raise TrainingError(f"No draft of {steps.config.name} can be trained", problems)
    optimizer = adamw(settings)
    sizes = (settings.batch, settings.seq_len, settings.anchors, spec.drafts, settings.seed)
    if checkpoints is not None:
        depends = {"settings": asdict(settings), "draft": asdict(spec), "data": digest(samples)}
        depends["target"] = [steps.config.name, zlib.crc32(np.asarray(target["model.norm.weight"]).tobytes())]
        checkpoints = Checkpoints(
            checkpoints.folder, checkpoints.keep, checkpoints.every, {**checkpoints.run, **depends}
        )
    update = make_update(steps, target, spec, optimizer, settings)
    # placed as an update leaves it: the second one must not be compiled anew
    assert isinstance(steps.mesh, Mesh)
    state = jax.device_put(begin(masters, optimizer.init(masters)), NamedSharding(steps.mesh, steps.spec()))
    batches = DraftBatches(samples, *sizes)
    kept = {"checkpoints": checkpoints, "metrics": metrics, "every": every, "watch": watch}
    return run(update, state, batches, steps=settings.steps, **kept).params


def target_problems(steps: Steps, spec: DraftSpec) -> list[str]:
    """Why this target cannot teach this draft."""
    found = []
    if steps.layout.parts("sequence") > 1:
        found.append(f"layout {steps.layout.name} cuts the sequence, which draft training does not follow; try tp8")
    if spec.taps[-1] >= steps.config.layers:
        found.append(f"taps layers {list(spec.taps)}; the target has layers 0 to {steps.config.layers - 1}")
    for name, mine, theirs in (
        ("hidden_size", spec.sizes.hidden, steps.config.hidden),
        ("vocab_size", spec.sizes.vocab, steps.config.vocab),
    ):
        if mine != theirs:
            found.append(f"{name} = {mine:,}, but the target has {theirs:,}")
    return found


def adamw(settings: DraftSettings) -> optax.GradientTransformation:
    """AdamW on clipped gradients; norms and biases do not decay."""

    def matrices(params: Mapping[str, Array]) -> dict[str, bool]:
        return {name: array.ndim > 1 for name, array in params.items()}

    adam = optax.adamw(settings.rate, b1=0.9, b2=0.95, weight_decay=settings.decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(settings.clip), adam)


def make_update(
    steps: Steps, target: Params, spec: DraftSpec, optimizer: optax.GradientTransformation, settings: DraftSettings
) -> Update:
    """One update: the target reads, the draft learns. Two programs; the second donates the state."""
    reader = TargetSteps.of(steps, spec, settings.seq_len)
    cache = reader.new_cache(settings.batch)
    # embedding and head alone are used of it: whole arrays, which XLA divides as they lie
    frozen, _ = abstract(steps.config, steps.precision, Parallel.single())
    objective = partial(draft_loss, frozen, steps, spec, settings.weights)

    def learn(state: TrainState, target: Params, taps: Array, scores: Array, batch: DraftBatch) -> Any:
        slope, watched = jax.grad(objective, has_aux=True)(state.params, target, taps, scores, batch)
        changes, opt_state = optimizer.update(slope, state.opt_state, state.params)
        params = optax.apply_updates(state.params, changes)
        size = jnp.sqrt(sum(jnp.sum(jnp.square(array)) for array in jax.tree.leaves(slope)))
        watched |= {"gradient": size, "rate": settings.rate(state.step)}
        return TrainState(state.step + 1, params, opt_state, state.extra), watched  # pyright: ignore[reportArgumentType]

    learned = jax.jit(learn, donate_argnums=0)

    def update(state: TrainState, batch: DraftBatch) -> tuple[TrainState, dict[str, Array]]:
        places = block_places(batch, spec.drafts).reshape(settings.batch, -1)
        taps, scores = reader.read(target, cache, batch.ids, batch.lengths, places)
        return learned(state, target, taps, scores, batch)

    return update


def draft_loss(
    frozen: nnx.GraphDef[Any],
    steps: Steps,
    spec: DraftSpec,
    weights: LossWeights,
    masters: Mapping[str, Array],
    target: Params,
    taps: Array,
    scores: Array,
    batch: DraftBatch,
) -> tuple[Array, dict[str, Array]]:
    """The loss of one batch and what is watched, of the draft's masters alone.

    Args:
      frozen: the target's graph over whole arrays.
      masters: float32.
      taps: [rows, tokens, taps, embed].
      scores: the target's at every drafted position, [rows, anchors * drafts, vocab].
    """
    draft, model = bind_draft(steps, spec, masters), bind(frozen, target)
    places = block_places(batch, spec.drafts)
    before = jnp.take_along_axis(batch.ids[:, None], places, axis=-1)
    following = jnp.take_along_axis(batch.ids[:, None], jnp.minimum(places + 1, batch.ids.shape[1] - 1), axis=-1)
    shown = jnp.where(jnp.arange(spec.drafts) == 0, before, spec.mask_id)
    embedded = jax.lax.stop_gradient(model.model.embed_tokens(shown.reshape(shown.shape[0], -1)))
    hidden = packed_blocks(draft, embedded.reshape(*shown.shape, -1), batch.anchors, draft.fuse(taps))
    blocks = score_blocks(draft, hidden, before, model.logits, spec.logit_scale)
    found = parts(blocks.scores, scores.reshape(blocks.scores.shape), following, blocks.trust)
    return total(found, batch.real, weights)


def block_places(batch: DraftBatch, drafts: int) -> Array:
    """Positions of the tokens before each drafted one, [rows, anchors, drafts]; those behind the end stand at the last."""
    return jnp.minimum(batch.anchors[..., None] + jnp.arange(drafts), batch.ids.shape[1] - 1)


def bind_draft(steps: Steps, spec: DraftSpec, masters: Mapping[str, Array]) -> Dspark:
    """The draft over its masters, each in the dtype that inference holds it in."""
    specs = draft_parameters(spec.sizes, steps.precision)
    graph, _ = nnx.split(Dspark(spec.sizes, steps.precision, spec.rope))
    flat = [
        (tuple(int(part) if part.isdigit() else part for part in name.split(".")), masters[name].astype(held.dtype))
        for name, held in specs.items()
    ]
    return nnx.merge(graph, nnx.from_flat_state([(path, nnx.Param(array)) for path, array in flat]))
