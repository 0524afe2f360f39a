"""Kimi Delta Attention (KDA): what its two ops compute, their shapes, and the choice of form and implementation.

Per head, in float32, with the state S as [key, value] in prefill, decode and cache alike (text-model section 3.1):

    g    = lower_bound * sigmoid(exp(A_log) * (f + dt_bias))          log decay, one per key channel
    beta = sigmoid(b);   q, k scaled to unit length, q by key ** -0.5 more
    S    = diag(exp(g)) S
    S    = S + beta * k (v - S^T k)^T
    o    = S^T q                                                      read after the update
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.implementation import choose
from kimi_jax.ops.kda import conv, output, pallas_chunk, pallas_step, reference
from kimi_jax.ops.kda.check import check_attend, check_conv, check_kda
from kimi_jax.ops.kda.inputs import Projected, Weights
from kimi_jax.ops.linear import api as linear

Form = Literal["auto", "recurrent", "chunked"]

CHUNKED_FROM = 2
"""Tokens per row from which the chunked form is faster; measured on CPU with 8 heads of 128 x 128, 1 and 8 rows."""

SMALLEST_BOUND = -5.5
"""Lowest gate bound of the chunked form: a chunk of 16 tokens at it spans exp(88), just inside float32."""

KERNELS = ("pallas", "interpret")
"""Implementations that run kernels: on a GPU, and the same ones anywhere."""

KERNEL_DIMS = (16, 32, 64, 128)
"""Channels of a head that the kernels take: what a matrix instruction multiplies, and registers hold."""

KERNEL_VALUES = (*KERNEL_DIMS, 256)
"""Value channels likewise; twice a head's where an identity stands beside its values (``fragments``)."""


def short_conv(
    x: Float[Array, "rows tokens channels"],
    window: Float[Array, "rows taps_less_one channels"],
    weight: Float[Array, "channels one taps"],
    lengths: Int[Array, " rows"],
    *,
    impl: str = "reference",
) -> tuple[Float[Array, "rows tokens channels"], Float[Array, "rows taps_less_one channels"]]:
    """Depthwise causal convolution without bias, then SiLU; the last tap multiplies the current token.

    Args:
      x: projections before the convolution; positions at ``lengths`` and beyond may hold anything, also NaN.
      window: the last ``taps - 1`` inputs of what each row saw before, oldest first; zeros for a new sequence.
      weight: float32, as stored in the checkpoint.
      lengths: real tokens of each row in this call, 0 for an idle row.
      impl: which implementation runs.

    Returns:
      The result in ``x.dtype`` (sums and SiLU in float32), zeros at padded positions; and the window after the real
      tokens in ``window.dtype``, bitwise the old one for an idle row.

    Raises:
      ProblemsError: shapes or dtypes do not belong together; names all of them.
      ValueError: ``impl`` is not built.
    """
    check_conv(x, window, weight, lengths)
    run = choose("kda.short_conv", impl, {"reference": conv.short_conv})
    with jax.named_scope("kda_conv"):
        return run(x, window, weight, lengths)


def kda(
    q: Float[Array, "rows tokens heads key"],
    k: Float[Array, "rows tokens heads key"],
    v: Float[Array, "rows tokens heads value"],
    f: Float[Array, "rows tokens heads key"],
    b: Float[Array, "rows tokens heads"],
    A_log: Float[Array, " heads"],
    dt_bias: Float[Array, "heads key"],
    state: Float[Array, "rows heads key value"],
    lengths: Int[Array, " rows"],
    *,
    lower_bound: float | None,
    form: Form = "auto",
    impl: str = "reference",
) -> tuple[Float[Array, "rows tokens heads value"], Float[Array, "rows heads key value"]]:
    """The gated delta rule over the tokens of each row, after what its state has seen.

    Args:
      q: queries after convolution and SiLU, before their scaling to unit length.
      k: keys, likewise.
      v: values after convolution and SiLU.
      f: gate logits. These five may hold anything at ``lengths`` and beyond, also NaN.
      b: logits of beta.
      A_log: float32, one entry per head (the checkpoint's longer one narrowed to its first entries).
      dt_bias: float32.
      state: float32; zeros for a new sequence.
      lengths: real tokens of each row in this call, 0 for an idle row.
      lower_bound: the gate's bound, below 0; None is the gate ``-exp(A_log) * softplus(f + dt_bias)``, which has none.
      form: ``recurrent`` goes token by token. ``chunked`` takes up to 16 tokens at a time and needs a lower bound of at
        least -5.5. ``auto`` is recurrent for one token or where chunked cannot be used. Equal up to rounding.
      impl: which implementation runs; kernels are built for the chunked form (``attend`` has one for steps).

    Returns:
      The output, float32, zeros at padded positions; and the state after the real tokens, bitwise the old one for an
      idle row.

    Raises:
      ProblemsError: shapes or dtypes do not belong together, a bound that is not below 0, a form that is not built or
        cannot be used with this bound; names all of them.
      ValueError: ``impl`` is not built.
    """
    bounded = lower_bound is not None and lower_bound >= SMALLEST_BOUND
    problems = []
    if lower_bound is not None and not lower_bound < 0:
        problems.append(f"lower_bound = {lower_bound} is not below 0: the state would grow without limit")
    if form not in ("auto", "recurrent", "chunked"):
        problems.append(f"form {form!r} is not built; choose auto, recurrent or chunked")
    if form == "chunked" and not bounded:
        problems.append(
            f"form 'chunked' needs lower_bound >= {SMALLEST_BOUND}, not {lower_bound}; 'recurrent' and 'auto' work"
        )
    if impl in KERNELS:
        problems += kernel_problems(lower_bound, q.shape[-1])
        if v.shape[-1] not in KERNEL_VALUES:
            built_for = ", ".join(map(str, KERNEL_VALUES))
            problems.append(f"heads of {v.shape[-1]} value channels: kernels are built for {built_for}")
    check_kda(q, k, v, f, b, A_log, dt_bias, state, lengths, problems)
    if form == "auto":
        many = q.shape[1] >= CHUNKED_FROM or impl in KERNELS
        form = "chunked" if bounded and many else "recurrent"
    chunked = form == "chunked"
    kernels = {name: partial(pallas_chunk.chunked, interpret=name == "interpret") for name in KERNELS}
    built = {"reference": partial(reference.kda, chunked=chunked), **(kernels if chunked else {})}
    run = choose(f"kda.kda ({form})", impl, built)
    with jax.named_scope(f"kda_{form}"):
        return run(q, k, v, f, b, A_log, dt_bias, state, lengths, lower_bound=lower_bound)


def kernel_problems(lower_bound: float | None, *dims: int) -> list[str]:
    """Why the kernels cannot run a layer; empty where they can. The one rule, known before anything is traced.

    A layer asks once, when it is built, and runs ``reference`` where there is a reason; ``attend`` itself refuses.

    Args:
      lower_bound: of the gate; None where it has none.
      dims: channels of a head.
    """
    problems = []
    for dim in dims:
        if dim not in KERNEL_DIMS:
            problems.append(f"heads of {dim} channels: kernels are built for {', '.join(map(str, KERNEL_DIMS))}")
    if lower_bound is None or not SMALLEST_BOUND <= lower_bound < 0:
        problems.append(f"lower_bound = {lower_bound}: kernels need one from {SMALLEST_BOUND} up and below 0")
    return problems


def attend(
    projected: Projected,
    weights: Weights,
    windows: Float[Array, "rows streams taps_less_one channels"],
    state: Float[Array, "rows heads dim dim"],
    lengths: Int[Array, " rows"],
    *,
    lower_bound: float | None,
    eps: float,
    impl: str = "reference",
) -> tuple[
    Float[Array, "rows tokens channels"],
    Float[Array, "rows streams taps_less_one channels"],
    Float[Array, "rows heads dim dim"],
]:
    """Everything of a KDA sub-layer between its projections and its output projection.

    That is ``short_conv`` of q, k and v, the gate logits out of the decay's latent, ``kda``, and the gated norm of every
    head's output; each result is rounded to the activation dtype as those ops round it.

    Args:
      projected: of the new tokens.
      weights: of the heads at hand.
      windows: of q, k and v in this order, as ``short_conv`` takes them.
      state: as ``kda`` takes it, key before value.
      lengths: real tokens of each row in this call, 0 for an idle row.
      lower_bound: as ``kda`` takes it.
      eps: of the output norm.
      impl: ``reference`` composes the ops above. ``pallas`` is one launch for up to 8 tokens and, beyond, the chunks of all
        rows side by side before a second launch that carries the state over them; with bfloat16 activations the products of
        a chunk multiply bfloat16 operands, sums and state stay float32. ``interpret`` runs the same kernels anywhere.

    Returns:
      The output in the activation dtype, zeros at padded positions; windows and state after the real tokens, bitwise the
      old ones for an idle row.

    Raises:
      ProblemsError: shapes or dtypes do not belong together, or ``kernel_problems``; names all of them.
      ValueError: ``impl`` is not built.
    """
    problems = kernel_problems(lower_bound, state.shape[-1]) if impl in KERNELS else []
    check_attend(projected, weights, windows, state, lengths, problems)
    kernels = {name: partial(pallas_step.step, interpret=name == "interpret") for name in KERNELS}
    if projected.v.shape[1] > pallas_step.MOST_TOKENS:
        kernels = {name: partial(_composed, impl=name) for name in KERNELS}
    run = choose("kda.attend", impl, {"reference": partial(_composed, impl="reference"), **kernels})
    with jax.named_scope("kda_attend"):
        return run(projected, weights, windows, state, lengths, lower_bound=lower_bound, eps=eps)


def _composed(
    projected: Projected,
    weights: Weights,
    windows: Float[Array, "rows streams taps_less_one channels"],
    state: Float[Array, "rows heads dim dim"],
    lengths: Int[Array, " rows"],
    *,
    lower_bound: float | None,
    eps: float,
    impl: str,
) -> tuple[Array, Array, Array]:
    x, dim = projected, state.shape[-1]
    by_head = (*x.v.shape[:2], -1, dim)
    streams = zip((x.q, x.k, x.v), (weights.q_conv, weights.k_conv, weights.v_conv), strict=True)
    mixed = [short_conv(y, windows[:, index], taps, lengths) for index, (y, taps) in enumerate(streams)]
    q, k, v = (out.reshape(by_head) for out, _ in mixed)
    (f,) = linear.project_many(x.latent, [weights.decay], [x.latent.dtype])
    A_log, dt_bias = weights.A_log, weights.dt_bias
    options: dict[str, Any] = {} if impl == "reference" else {"impl": impl}
    out, state = kda(
        q, k, v, f.reshape(by_head), x.b, A_log, dt_bias, state, lengths, lower_bound=lower_bound, **options
    )
    out = output.gated_norm(out.astype(x.v.dtype), x.gate.reshape(by_head), weights.norm, eps).reshape(x.v.shape)
    real = jnp.arange(out.shape[1]) < lengths[:, None]
    return jnp.where(real[..., None], out, 0), jnp.stack([window for _, window in mixed], axis=1), state
