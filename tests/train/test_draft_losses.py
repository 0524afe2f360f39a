"""The losses of draft training against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.train.draft_losses import LossWeights, Parts, binary_cross_entropy
from kimi_jax.train.draft_losses import parts as eager_parts
from kimi_jax.train.draft_losses import total as eager_total

parts, total = (
    jax.jit(eager_parts),
    jax.jit(eager_total, static_argnums=2),
)  # eagerly, every operation is compiled alone

P = jnp.array([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]])
Q = jnp.array([[[0.2, 0.3, 0.5], [0.25, 0.5, 0.25]]])
FOLLOWING = jnp.array([[2, 0]])


def test_each_position() -> None:
    # red when the target's and the draft's distributions change places, L1 is halved, or acceptance is not 1 - L1 / 2
    found = parts(jnp.log(Q) + 3, jnp.log(P) - 1, FOLLOWING, jnp.array([[0.0, np.log(3.0)]]))
    np.testing.assert_allclose(found.cross_entropy, [[-np.log(0.5), -np.log(0.25)]], atol=1e-6)
    np.testing.assert_allclose(found.distance, [[0.6, 1.1]], atol=1e-6)
    np.testing.assert_allclose(found.acceptance, [[0.7, 0.45]], atol=1e-6)
    # odds 0 and log 3 are 1/2 and 3/4
    wanted = [np.log(2), -(0.45 * np.log(0.75) + 0.55 * np.log(0.25))]
    np.testing.assert_allclose(found.confidence, [wanted], atol=1e-6)


def test_the_sum() -> None:
    # red when decay starts a position late, what does not count has weight, or a part has another's weight
    found = Parts(
        *(jnp.array([[1.0, 3.0], [100.0, 100.0]]) * scale for scale in (1, 2, 4)), jnp.array([[0.5, 0.4], [0.9, 0.9]])
    )
    real = jnp.array([[True, True], [False, False]])
    loss, watched = total(found, real, LossWeights(0.1, 0.9, 0.5, decay=2.0))
    late = np.exp(-0.5)
    mean = (1 + 3 * late) / (1 + late)
    np.testing.assert_allclose(loss, 0.1 * mean + 0.9 * 2 * mean + 0.5 * 4 * mean, rtol=1e-6)
    np.testing.assert_allclose(watched["length"], 1 + 0.5 + 0.5 * 0.4, rtol=1e-6)
    np.testing.assert_allclose(watched["accept"], 0.45, rtol=1e-6)
    short = jnp.array([[True, False], [True, True]])
    np.testing.assert_allclose(total(found, short, LossWeights())[1]["length"], 1 + (0.5 + 0.9 + 0.81) / 2, rtol=1e-6)


@pytest.mark.parametrize("odds", [-200.0, 200.0])
def test_confidence_far_off_still_learns(odds: float) -> None:
    # red when the loss is formed from a probability that has become 0 or 1
    slope = jax.grad(lambda x: binary_cross_entropy(x, jnp.float32(0.5)))(jnp.float32(odds))
    np.testing.assert_allclose(slope, np.sign(odds) * 0.5)


def test_where_gradients_go() -> None:
    # red when the label of the confidence or the target's scores get a gradient
    def only_confidence(draft: jax.Array, target: jax.Array, trust: jax.Array) -> jax.Array:
        return parts(draft, target, FOLLOWING, trust).confidence.sum()

    def everything(draft: jax.Array, target: jax.Array, trust: jax.Array) -> jax.Array:
        return total(parts(draft, target, FOLLOWING, trust), jnp.ones((1, 2), bool), LossWeights())[0]

    given = jnp.log(Q), jnp.log(P), jnp.zeros((1, 2))
    draft, target, trust = jax.grad(only_confidence, argnums=(0, 1, 2))(*given)
    assert not draft.any() and not target.any() and trust.any()
    draft, target, trust = jax.grad(everything, argnums=(0, 1, 2))(*given)
    assert draft.any() and not target.any() and trust.any()
