"""Shapes and dtypes of the KDA ops' arguments, checked while tracing; every problem at once."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from kimi_jax.ops.kda.inputs import Projected, Weights
from kimi_jax.ops.linear.weights import Matrix
from kimi_jax.problems import ProblemsError

Axes = tuple[int | str, ...]


def check_conv(x: jax.Array, window: jax.Array, weight: jax.Array, lengths: jax.Array) -> None:
    """Refuses arguments of ``short_conv`` that do not belong together."""
    if x.ndim != 3 or weight.ndim != 3:
        raise ProblemsError("kda.short_conv", [f"x {x.shape} and weight {weight.shape} need 3 axes each"])
    rows, _, channels = x.shape
    taps = weight.shape[-1]
    expected: dict[str, tuple[jax.Array, Axes]] = {
        "window": (window, (rows, taps - 1, channels)),
        "weight": (weight, (channels, 1, taps)),
        "lengths": (lengths, (rows,)),
    }
    _raise("kda.short_conv", [*_shapes(expected), *_float32({"weight": weight}), *_whole(lengths)])


def check_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    f: jax.Array,
    b: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    state: jax.Array,
    lengths: jax.Array,
    problems: Sequence[str],
) -> None:
    """Refuses arguments of ``kda`` that do not belong together, adding to ``problems`` found before."""
    if q.ndim != 4 or v.ndim != 4:
        raise ProblemsError("kda.kda", [*problems, f"q {q.shape} and v {v.shape} need 4 axes each"])
    rows, tokens, heads, key = q.shape
    value = v.shape[-1]
    expected: dict[str, tuple[jax.Array, Axes]] = {
        "k": (k, (rows, tokens, heads, key)),
        "v": (v, (rows, tokens, heads, value)),
        "f": (f, (rows, tokens, heads, key)),
        "b": (b, (rows, tokens, heads)),
        "A_log": (A_log, (heads,)),
        "dt_bias": (dt_bias, (heads, key)),
        "state": (state, (rows, heads, key, value)),
        "lengths": (lengths, (rows,)),
    }
    wide = _float32({"A_log": A_log, "dt_bias": dt_bias, "state": state})
    _raise("kda.kda", [*problems, *_shapes(expected), *wide, *_whole(lengths)])


def check_attend(
    projected: Projected,
    weights: Weights,
    windows: jax.Array,
    state: jax.Array,
    lengths: jax.Array,
    problems: Sequence[str],
) -> None:
    """Refuses arguments of ``attend`` that do not belong together, adding to ``problems`` found before."""
    if projected.v.ndim != 3 or state.ndim != 4 or windows.ndim != 4 or weights.decay.ndim != 2:
        shapes = f"v {projected.v.shape}, state {state.shape}, windows {windows.shape}, decay {weights.decay.shape}"
        raise ProblemsError("kda.attend", [*problems, f"{shapes} need 3, 4, 4 and 2 axes"])
    rows, tokens, channels = projected.v.shape
    heads, dim = state.shape[1:3]
    rank, taps = weights.decay.shape[1], windows.shape[2] + 1
    every, filters = (rows, tokens, channels), (channels, 1, taps)
    expected: dict[str, tuple[jax.Array | Matrix, Axes]] = {
        "v": (projected.v, (rows, tokens, heads * dim)),
        "q": (projected.q, every),
        "k": (projected.k, every),
        "gate": (projected.gate, every),
        "latent": (projected.latent, (rows, tokens, rank)),
        "b": (projected.b, (rows, tokens, heads)),
        "q_conv": (weights.q_conv, filters),
        "k_conv": (weights.k_conv, filters),
        "v_conv": (weights.v_conv, filters),
        "decay": (weights.decay, (channels, rank)),
        "A_log": (weights.A_log, (heads,)),
        "dt_bias": (weights.dt_bias, (heads, dim)),
        "norm": (weights.norm, (dim,)),
        "windows": (windows, (rows, 3, taps - 1, channels)),
        "state": (state, (rows, heads, dim, dim)),
        "lengths": (lengths, (rows,)),
    }
    names = ("q_conv", "k_conv", "v_conv", "A_log", "dt_bias", "norm")
    wide = _float32({**{name: getattr(weights, name) for name in names}, "state": state})
    mixed = {str(x.dtype) for x in projected} - {str(projected.v.dtype)}
    uneven = [f"projections are {', '.join(sorted(mixed))} beside {projected.v.dtype}: one dtype"] if mixed else []
    _raise("kda.attend", [*problems, *_shapes(expected), *wide, *uneven, *_whole(lengths)])


def _shapes(expected: Mapping[str, tuple[jax.Array | Matrix, Axes]]) -> list[str]:
    return [
        f"{name} has shape {list(array.shape)}, not {list(shape)}"
        for name, (array, shape) in expected.items()
        if array.shape != shape
    ]


def _float32(arrays: Mapping[str, jax.Array]) -> list[str]:
    return [
        f"{name} is {array.dtype}, not float32: it is never rounded to less"
        for name, array in arrays.items()
        if array.dtype != jnp.float32
    ]


def _whole(lengths: jax.Array) -> list[str]:
    whole = jnp.issubdtype(lengths.dtype, jnp.integer)
    return [] if whole else [f"lengths is {lengths.dtype}, not an integer type"]


def _raise(op: str, problems: Sequence[str]) -> None:
    if problems:
        raise ProblemsError(f"{op}: these arguments do not belong together", problems)
