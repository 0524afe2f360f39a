"""One update of a language model: loss, gradients, router biases and optimiser, over any layout that the served model has.

The loss runs in one ``jax.shard_map`` like the served steps, rows cut over ``batch`` and parameters as the layout declares. Its
transpose sums a gradient over exactly those mesh axes that do not cut the parameter; nothing else is said about gradients. The
optimiser is partitioned automatically.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from kimi_jax.config import KimiConfig
from kimi_jax.model import KimiModel, abstract, bind
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.layout import Layout
from kimi_jax.precision import ACTIVATIONS, FLOAT32, Precision
from kimi_jax.train.attention import Stage
from kimi_jax.train.balance import next_bias
from kimi_jax.train.begin import initial
from kimi_jax.train.forward import forward
from kimi_jax.train.optimiser import Rates, optimiser
from kimi_jax.train.packing import Batch
from kimi_jax.train.qat import as_stored
from kimi_jax.train.state import TrainingError, TrainState, begin

BIAS = ".e_score_correction_bias"
"""End of the names of what balancing changes, without a gradient."""


@dataclass(frozen=True)
class Options:
    """How an update is computed.

    Attributes:
      stage: what attention with an indexer reads (``train/attention``).
      index_weight: of the indexer's loss beside that of the next id.
      compute: dtype of activations and of matrices in products; masters, sums and the optimiser are float32.
      remat: whether the backward pass computes every layer again instead of keeping it.
      quantise: whether routed experts are projected onto MXFP4.
    """

    stage: Stage = "sparse"
    index_weight: float = 0.1
    compute: str = "float32"
    remat: bool = False
    quantise: bool = True


class Measured(NamedTuple):
    """What a forward pass tells besides the objective: mean losses, tokens that were learnt and share of them that were right."""

    loss: Float[Array, ""]
    index_loss: Float[Array, ""]
    learnt: Float[Array, ""]
    right: Float[Array, ""]
    needs: dict[str, Int[Array, "experts bins"]]


@dataclass(frozen=True)
class Trainer:
    """The programs that train one model on one mesh.

    Attributes:
      config: the text model; a vision tower is not trained.
      rates: of the optimisers.
    """

    config: KimiConfig
    layout: Layout
    mesh: Mesh
    rates: Rates
    options: Options = Options()

    def __post_init__(self) -> None:
        problems = [
            f"{name}: {self.layout.name} pads it to whole groups of 32, which masters do not have"
            for name, spec in self.specs.items()
            if self.layout.placed_shape(spec) != spec.shape
        ]
        problems += [
            f"{axis} is cut: its shares are joined as bytes, which have no gradient"
            for axis in ("router_expert", "latent")
            if self.parallel.size(axis) > 1
        ]
        if problems:
            raise TrainingError(
                f"{self.layout.name} cannot train this model",
                problems[:3],
                "tp8 and ep8 cut neither; for padding, cut experts over fewer.",
            )

    @cached_property
    def parallel(self) -> Parallel:
        return Parallel.of(self.layout)

    @cached_property
    def _abstract(self) -> tuple[Any, dict[str, ArraySpec]]:
        activation = ACTIVATIONS[self.options.compute]
        held = Precision(activation, FLOAT32, FLOAT32, FLOAT32, "masters", "float32")
        return abstract(self.config, held, self.parallel)

    @property
    def specs(self) -> dict[str, ArraySpec]:
        """Every parameter, as a float32 master."""
        return self._abstract[1]

    @cached_property
    def stored(self) -> dict[str, ArraySpec]:
        """The same names, where the checkpoint has them, with its dtypes."""
        return abstract(self.config, Precision(), Parallel.single())[1]

    @cached_property
    def trained(self) -> dict[str, ArraySpec]:
        """Those that gradients change."""
        return {name: spec for name, spec in self.specs.items() if not name.endswith(BIAS)}

    @cached_property
    def optimiser(self) -> optax.GradientTransformation:
        return optimiser(self.trained, self.rates)

    def begin(self, seed: int) -> TrainState:
        """A new run's state, placed."""
        return self.state_of(initial(self.specs, self.config.kda.gate_lower_bound, seed))

    def state_of(self, values: Mapping[str, np.ndarray | Array]) -> TrainState:
        """The state before the first update, from given masters."""
        placed = {name: jax.device_put(values[name], self._sharding(spec)) for name, spec in self.specs.items()}
        params = {name: placed[name] for name in self.trained}
        return begin(params, self._new_optimiser(params), {n: x for n, x in placed.items() if n not in params})

    def _sharding(self, spec: ArraySpec) -> NamedSharding:
        return NamedSharding(self.mesh, self.layout.spec(spec))

    def _new_optimiser(self, params: dict[str, Array]) -> Any:
        """Moments lie as their parameters do, counts everywhere."""
        whole = NamedSharding(self.mesh, self.layout.spec(ArraySpec((), FLOAT32, ())))
        shapes = jax.eval_shape(self.optimiser.init, params)
        by_name = {name: array.sharding for name, array in params.items()}

        def sharding(path: Any, leaf: Any) -> Any:
            names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in by_name]
            return by_name[names[-1]] if names and leaf.shape == params[names[-1]].shape else whole

        shardings = jax.tree_util.tree_map_with_path(sharding, shapes)
        return jax.jit(self.optimiser.init, out_shardings=shardings)(params)

    @cached_property
    def evaluate(self) -> Callable[[dict[str, Array], dict[str, Array], Batch], tuple[Array, Measured]]:
        """``(params, biases, batch)`` -> objective and measurements; differentiable in ``params``."""
        graph, options, parallel, config = self._abstract[0], self.options, self.parallel, self.config
        compute, stored = ACTIVATIONS[options.compute], self.stored

        def body(params: dict[str, Array], biases: dict[str, Array], batch: Any) -> tuple[Array, Measured]:
            values = as_stored(params, stored, compute, experts=options.quantise)
            model = bind(graph, {**values, **biases})
            passed = forward(model, batch.ids, batch.lengths, stage=options.stage, remat=options.remat)
            nll, right = _next_id(model, passed.hidden, batch.targets, parallel)
            sums = jnp.sum(batch.weights), jnp.sum(nll * batch.weights), jnp.sum(right * batch.weights)
            tokens = jnp.sum(batch.lengths).astype(jnp.float32)
            learnt, nll, right, tokens, index = parallel.psum((*sums, tokens, passed.index_loss), "batch")
            loss = nll / jnp.maximum(learnt, 1)
            index_loss = index / jnp.maximum(tokens, 1) / max(config.attention.count("mla"), 1)
            needs = parallel.psum(passed.needs, "batch")
            measured = Measured(loss, index_loss, learnt, right / jnp.maximum(learnt, 1), needs)
            return loss + options.index_weight * index_loss, measured

        whole = self.layout.spec(ArraySpec((), FLOAT32, ()))
        grid = self.layout.spec(ArraySpec((1, 1), FLOAT32, ("batch", None)))
        row = self.layout.spec(ArraySpec((1,), FLOAT32, ("batch",)))
        params = {name: self.layout.spec(spec) for name, spec in self.trained.items()}
        biases = {name: self.layout.spec(spec) for name, spec in self.specs.items() if name not in params}
        inputs = (params, biases, Batch(*cast(Any, (grid, grid, grid, row))))
        outputs = (whole, Measured(*cast(Any, (whole, whole, whole, whole, dict.fromkeys(biases, whole)))))
        return jax.shard_map(body, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)

    def update_of(self, state: TrainState) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
        """One jitted update that donates its state; every array stays where ``state`` has it."""
        gradient = jax.value_and_grad(self.evaluate, has_aux=True)
        top_k = self.config.moe.top_k

        def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
            (_, measured), gradients = gradient(state.params, state.extra, batch)
            biases = {name: next_bias(measured.needs[name], bias, top_k) for name, bias in state.extra.items()}
            changes, opt_state = self.optimiser.update(gradients, state.opt_state, state.params)
            params = cast(dict[str, Array], optax.apply_updates(state.params, changes))
            told = {
                "loss": measured.loss,
                "index_loss": measured.index_loss,
                "right": measured.right,
                "learnt": measured.learnt,
                "gradient": optax.global_norm(gradients),
                "rate": jnp.asarray(self.rates.muon(state.step), jnp.float32),
            }
            return TrainState(state.step + 1, params, opt_state, biases), told

        kept = jax.tree.map(lambda leaf: leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None, state)
        return jax.jit(update, donate_argnums=0, out_shardings=(kept, None))


def _next_id(
    model: KimiModel, hidden: Float[Array, "rows tokens embed"], targets: Int[Array, "rows tokens"], parallel: Parallel
) -> tuple[Float[Array, "rows tokens"], Float[Array, "rows tokens"]]:
    """Negative log-probability of each target, and 1 where it is the likeliest id; over a vocabulary that may be cut."""
    logits = model.logits(hidden)
    vocab = parallel.mesh_axes("vocab")
    top = lax.stop_gradient(jnp.max(logits, axis=-1))
    top = lax.pmax(top, vocab) if vocab else top
    total = parallel.psum(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1), "vocab")
    place = targets - parallel.index("vocab") * logits.shape[-1]
    here = place[..., None] == jnp.arange(logits.shape[-1])  # not a gather: its gradient would be a scatter
    wanted = parallel.psum(jnp.sum(jnp.where(here, logits, 0), axis=-1), "vocab")
    return jnp.log(total) + top - wanted, lax.stop_gradient(wanted >= top).astype(jnp.float32)
