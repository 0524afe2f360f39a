"""Which optimiser changes which parameter: per-head Muon for matrices, AdamW for the rest (training notes, "Per-head Muon").

Muon is optax's. It sees q, k, v and the up projections of latent attention as one block per head, experts as one per expert, every
other matrix whole; updates are scaled by ``sqrt(max(1, out / in))`` of the block.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from kimi_jax.placement.axes import ArraySpec
from kimi_jax.train.schedule import Schedule
from kimi_jax.train.state import TrainingError

Kind = Literal["muon by head", "muon", "adamw"]

TABLE: tuple[tuple[str, Kind], ...] = (
    (r"self_attn\.([qkv]_proj|q_b_proj|kv_b_proj)\.weight", "muon by head"),
    (r"(embed_tokens|lm_head)\.weight", "adamw"),
    (r"\w*(norm|_res_proj|conv1d)\.(weight|bias)", "adamw"),
    (r"self_attn\.(A_log|dt_bias)", "adamw"),
    (r"block_sparse_moe\.gate\.weight", "adamw"),
    (r"experts\.w[123]\.weight", "muon"),
    (r"self_attn\.(q_a|kv_a|[gobf]|f_[ab]|o)_proj(_with_mqa)?\.weight", "muon"),
    (r"indexer\.(wq_b|wk|weights_proj)\.weight", "muon"),
    (r"(gate|up|down)_proj\.weight", "muon"),
    (r"routed_expert_(up|down)_proj\.weight", "muon"),
)
"""End of a parameter's name -> its optimiser; the first that fits."""

MATRIX = MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
"""Weights are ``[out, in]``; leading dimensions count blocks."""


@dataclass(frozen=True)
class Rates:
    """What the optimisers are told.

    Attributes:
      muon, adamw: learning rate by step.
      decay: weight decay of Muon's matrices, times the rate.
      clip: largest global norm of the gradients.
    """

    muon: Schedule
    adamw: Schedule
    decay: float = 0.01
    clip: float = 1.0


def kind_of(name: str) -> Kind:
    """The optimiser of a parameter.

    Raises:
      TrainingError: the table does not name it.
    """
    for pattern, kind in TABLE:
        if re.search(rf"(^|\.){pattern}$", name):
            return kind
    raise TrainingError("A parameter has no optimiser", [f"{name} is not in the table of train/optimiser.py"])


def optimiser(specs: Mapping[str, ArraySpec], rates: Rates) -> optax.GradientTransformation:
    """Clipping, then the optimiser of every parameter.

    Args:
      specs: the parameters that are trained; a head-major dimension says how many heads it has.
    """
    kinds = {name: kind_of(name).split()[0] for name in specs}
    heads = {name: spec.logical[0] for name, spec in specs.items() if kind_of(name) == "muon by head"}
    muon = optax.chain(
        _by_block(heads, scale_by_muon(weight_dimension_numbers=_matrices, eps=1e-7)),
        _by_block(heads, optax.stateless(lambda updates, _: jax.tree.map(_scaled, updates))),
        optax.add_decayed_weights(rates.decay),
        optax.scale_by_learning_rate(rates.muon),
    )
    adamw = optax.adamw(rates.adamw, b1=0.9, b2=0.95, weight_decay=0.0)
    return optax.chain(
        optax.clip_by_global_norm(rates.clip), optax.partition({"muon": muon, "adamw": adamw}, dict(kinds))
    )


def _matrices(tree: Any) -> Any:
    return jax.tree.map(lambda _: MATRIX, tree)


def _scaled(update: Float[Array, "*blocks out in"]) -> Float[Array, "*blocks out in"]:
    return update * max(1, update.shape[-2] / update.shape[-1]) ** 0.5


def _by_block(heads: Mapping[str, int], inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """``inner`` over matrices ``[heads * rows, in]`` as ``[heads, rows, in]``."""

    def blocks(tree: Any) -> Any:
        return _reshaped(tree, lambda name, x: x.reshape(heads[name], -1, x.shape[-1]) if name in heads else x)

    def rows(tree: Any) -> Any:
        return _reshaped(tree, lambda name, x: x.reshape(-1, x.shape[-1]) if name in heads else x)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(blocks(updates), state, None if params is None else blocks(params))
        return rows(updates), state

    return optax.GradientTransformation(lambda params: inner.init(blocks(params)), update)


def _reshaped(tree: Mapping[str, Any], change: Callable[[str, Array], Array]) -> dict[str, Any]:
    """Entries that another optimiser has are left as they are."""
    return {name: x if isinstance(x, optax.MaskedNode) else change(name, x) for name, x in tree.items()}
