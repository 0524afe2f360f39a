"""What a training run carries from one step to the next, and what a run that cannot be made raises."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kimi_jax.problems import ProblemsError


class TrainingError(ProblemsError):
    """A training run that cannot be made, or cannot go on."""


class TrainState(NamedTuple):
    """The whole of a run at one step: from this and the data of later steps every later weight follows.

    Attributes:
      step: updates done, int32 scalar. It is the cursor of the data too: batch ``step`` comes next.
      params: what gradients change, float masters by dotted name.
      opt_state: of the optimiser.
      extra: arrays that change without gradients, such as router biases; a pytree, empty where there are none.
    """

    step: Int[Array, ""]
    params: dict[str, Array]
    opt_state: Any
    extra: Any = ()


def begin(params: dict[str, Array], opt_state: Any, extra: Any = ()) -> TrainState:
    """The state before the first update."""
    return TrainState(jnp.int32(0), params, opt_state, extra)


def named_leaves(state: TrainState) -> dict[str, Any]:
    """Every array of a state by its dotted path.

    Raises:
      ValueError: two paths look the same; only made-up names with dots can.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two arrays of the training state have the same dotted path")
    return named
