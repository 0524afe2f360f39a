"""KDA over tokens that are dealt to devices in shares (named axis ``tokens``): each share's effect on the state, composed.

Over any run of tokens the delta rule is affine in the state, ``S -> A S + B`` with ``A`` [key, key] and ``B`` [key, value], and
its outputs are ``o + R S``. The rule acts on every value channel alike, so one pass over values beside zeros, from the state
``[0 | I]``, gives ``[B | A]`` and ``[o | R]``. Devices exchange only ``A`` and ``B``, whose size does not depend on how many tokens
a share has; a share without tokens is the identity, bit for bit. Source: training notes, "KDA over sequence shards".
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.kda import output, reference
from kimi_jax.ops.kda.api import kda, short_conv
from kimi_jax.ops.kda.check import check_attend
from kimi_jax.ops.kda.inputs import Projected, Weights
from kimi_jax.ops.kda.rollback import window_after
from kimi_jax.ops.linear import api as linear
from kimi_jax.placement.collectives import Parallel

AXIS = "tokens"


class Fragment(NamedTuple):
    """What a run of tokens does to a state: ``transition @ state + end``, per row and head, float32."""

    transition: Float[Array, "rows heads key key"]
    end: Float[Array, "rows heads key value"]

    def __call__(self, state: reference.State) -> reference.State:
        return _product(self.transition, state) + self.end


def _product(a: Array, b: Array) -> Array:
    return jnp.einsum("...ij,...jk->...ik", a, b, precision=jax.lax.Precision.HIGHEST)


def identity(state: reference.State) -> Fragment:
    """The fragment of no tokens, for states like this one."""
    eye = jnp.eye(state.shape[-2], dtype=jnp.float32)
    return Fragment(jnp.broadcast_to(eye, (*state.shape[:-1], state.shape[-2])), jnp.zeros_like(state))


def then(first: Fragment, second: Fragment) -> Fragment:
    """What ``first`` and, after it, ``second`` do together."""
    return Fragment(_product(second.transition, first.transition), second(first.end))


def read(
    q: Float[Array, "rows tokens heads key"],
    k: Float[Array, "rows tokens heads key"],
    v: Float[Array, "rows tokens heads value"],
    f: Float[Array, "rows tokens heads key"],
    b: Float[Array, "rows tokens heads"],
    A_log: Float[Array, " heads"],
    dt_bias: Float[Array, "heads key"],
    lengths: Int[Array, " rows"],
    **options: Any,
) -> tuple[Float[Array, "rows tokens heads value"], Float[Array, "rows tokens heads key"], Fragment]:
    """One pass over the tokens of each row, for a state that is not known yet; arguments as for ``api.kda``.

    Returns:
      The output from a state of zeros; what the output adds of the state, ``reader @ state``; and the fragment.
    """
    rows, _, heads, key = k.shape
    values = v.shape[-1]
    nothing = identity(jnp.zeros((rows, heads, key, values), jnp.float32))
    beside = jnp.concatenate([v, jnp.zeros(k.shape, v.dtype)], axis=-1)
    state = jnp.concatenate([nothing.end, nothing.transition], axis=-1)
    out, state = kda(q, k, beside, f, b, A_log, dt_bias, state, lengths, **options)
    return out[..., :values], out[..., values:], Fragment(state[..., values:], state[..., :values])


def compose(own: Fragment, state: reference.State, parallel: Parallel) -> tuple[reference.State, reference.State]:
    """The state before this device's share and the one after all shares, from every device's fragment.

    Args:
      own: of this device's share.
      state: before the first share, the same on every device.

    Returns:
      Both; the second is bitwise the same on every device.
    """
    parts = parallel.size(AXIS)
    with jax.named_scope("kda_compose"):
        return (_gathered if gathers(parts) else _scanned)(own, state, parallel)


def gathers(parts: int) -> bool:
    """Whether bringing all fragments to all devices moves no more bytes than a prefix scan does.

    In units of one state that a device receives: two of every other device, or two a round of the scan, one that is passed on and
    about two for the sum that tells all devices the last state.
    """
    return 2 * (parts - 1) <= 2 * (parts - 1).bit_length() + 3


def _gathered(own: Fragment, state: reference.State, parallel: Parallel) -> tuple[reference.State, reference.State]:
    key = own.transition.shape[-1]
    sent = parallel.stacked(jnp.concatenate(own, axis=-1), AXIS)
    states = [state]
    for part in sent:
        states.append(Fragment(part[..., :key], part[..., key:])(states[-1]))
    return jnp.stack(states)[parallel.index(AXIS)], states[-1]


def _scanned(own: Fragment, state: reference.State, parallel: Parallel) -> tuple[reference.State, reference.State]:
    parts, index, key = parallel.size(AXIS), parallel.index(AXIS), own.transition.shape[-1]
    whole, reach = own, 1
    while reach < parts:  # afterwards it spans twice as many shares, up to this one
        came = parallel.shifted(jnp.concatenate(whole, axis=-1), AXIS, reach)
        joined = then(Fragment(came[..., :key], came[..., key:]), whole)
        whole = jax.tree.map(lambda new, old, by=reach: jnp.where(index >= by, new, old), joined, whole)
        reach *= 2
    after = whole(state)
    before = jnp.where(index == 0, state, parallel.shifted(after, AXIS, 1))
    return before, parallel.psum(jnp.where(index == parts - 1, after, 0), AXIS)


def windows_around(
    inputs: Float[Array, "rows streams tokens channels"],
    windows: Float[Array, "rows streams taps_less_one channels"],
    shares: Int[Array, "parts rows"],
    parallel: Parallel,
) -> tuple[Float[Array, "rows streams taps_less_one channels"], Float[Array, "rows streams taps_less_one channels"]]:
    """The inputs that a convolution needs from before this device's share, and those that are left after all shares.

    Shares may be shorter than the window, which then reaches over several of them.

    Args:
      inputs: of this share; past its real tokens they may be anything.
      windows: before the first share, oldest first, the same on every device.
      shares: real tokens of every share.
    """
    size = windows.shape[2]
    own = window_after(windows, inputs, shares[parallel.index(AXIS)])  # of a shorter share only the end counts
    found = [windows]
    with jax.named_scope("kda_windows"):
        for part, count in zip(parallel.stacked(own, AXIS), jnp.minimum(shares, size), strict=True):
            place = jnp.arange(size) + count[:, None]  # among the older inputs; behind them, those of this share
            older = jnp.take_along_axis(found[-1], jnp.minimum(place, size - 1)[:, None, :, None], axis=2)
            found.append(jnp.where((place >= size)[:, None, :, None], part, older))
    return jnp.stack(found)[parallel.index(AXIS)], found[-1]


def attend(
    projected: Projected,
    weights: Weights,
    windows: Float[Array, "rows streams taps_less_one channels"],
    state: Float[Array, "rows heads dim dim"],
    shares: Int[Array, "parts rows"],
    parallel: Parallel,
    *,
    lower_bound: float | None,
    eps: float,
    impl: str = "reference",
) -> tuple[
    Float[Array, "rows tokens channels"],
    Float[Array, "rows streams taps_less_one channels"],
    Float[Array, "rows heads dim dim"],
]:
    """``api.attend`` over a share of each row's tokens: outputs of this share, windows and state after all of them.

    Two collectives whose size does not depend on the number of tokens: the last inputs of every share, and the fragments.

    Args:
      projected: of the tokens of this device's share.
      weights: of the heads at hand.
      windows, state: before the call, the same on every device of the axis.
      shares: real tokens of each row in every share; all shares before a row's last are full, and those behind it empty.
      parallel: its axis ``tokens`` holds the shares in order.
      lower_bound, eps: as for ``api.attend``.
      impl: what runs the pass over the tokens, as for ``api.kda``.
    """
    x, dim, lengths = projected, state.shape[-1], shares[parallel.index(AXIS)]
    check_attend(projected, weights, windows, state, lengths, [])
    by_head = (*x.v.shape[:2], -1, dim)
    streams = (x.q, x.k, x.v)
    before, windows = windows_around(jnp.stack(streams, axis=1), windows, shares, parallel)
    filters = (weights.q_conv, weights.k_conv, weights.v_conv)
    q, k, v = (
        short_conv(y, before[:, index], taps, lengths)[0].reshape(by_head)
        for index, (y, taps) in enumerate(zip(streams, filters, strict=True))
    )
    (f,) = linear.project_many(x.latent, [weights.decay], [x.latent.dtype])
    A_log, dt_bias = weights.A_log, weights.dt_bias
    out, reader, own = read(
        q, k, v, f.reshape(by_head), x.b, A_log, dt_bias, lengths, lower_bound=lower_bound, impl=impl
    )
    entering, leaving = compose(own, state, parallel)
    out = out + jnp.einsum("btnk,bnkv->btnv", reader, entering, precision=jax.lax.Precision.HIGHEST)
    out = output.gated_norm(out.astype(x.v.dtype), x.gate.reshape(by_head), weights.norm, eps).reshape(x.v.shape)
    real = jnp.arange(out.shape[1]) < lengths[:, None]
    some = jnp.any(shares > 0, axis=0)[:, None, None, None]
    return jnp.where(real[..., None], out, 0), windows, jnp.where(some, leaving, state)
