"""The model run op by op on one device, so that every intermediate value can be seen and any function replaced.

Only the heavy ops are compiled, each once for all layers; the rest runs eagerly. A forward of a short prompt takes a fraction of
a second, where compiling the step of thirteen layers takes many.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.api import read_parameters
from kimi_jax.cache import KdaCache, describe
from kimi_jax.config import KimiConfig, load_config
from kimi_jax.layers.decoder import DecoderLayer
from kimi_jax.loop import Steps
from kimi_jax.model import Params, abstract, bind
from kimi_jax.ops.attn_res import api as attn_res
from kimi_jax.ops.kda import api as kda_op
from kimi_jax.ops.mla import api as mla_op
from kimi_jax.ops.moe import api as moe_op
from kimi_jax.ops.situ import api as situ_op
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.layout import load_layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.precision import Precision, choose_precision
from tests.parity.models import TINY

FLOAT32 = choose_precision("float32", experts="packed")
"""Experts as stored, so that their bytes can be tampered with."""

HEAVY: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "kda": (kda_op, ("lower_bound",)),
    "short_conv": (kda_op, ()),
    "attend": (mla_op, ("nope_dim", "impl")),
    "experts": (moe_op, ("beta", "linear_beta", "first_expert", "dtype", "impl")),
    "route": (moe_op, ("top_k", "renormalize", "scale", "impl")),
    "situ": (situ_op, ("beta", "linear_beta")),
    "mix": (attn_res, ("eps",)),
}
"""Ops worth compiling: name -> module, static arguments."""

SHIPPED = {name: getattr(module, name) for name, (module, _) in HEAVY.items()}


@cache
def config() -> KimiConfig:
    return load_config(TINY)


@cache
def parameters() -> Params:
    """k3-tiny in float32 on one device."""
    layout = load_layout("single")
    steps = Steps(config(), layout, make_mesh(layout), FLOAT32, capacity=16)
    placed = read_parameters(TINY, config(), steps)
    return {name: jnp.asarray(np.asarray(array)) for name, array in placed.items()}


def compiled(name: str) -> Callable[..., Any]:
    """A heavy op as it is shipped, compiled once for all tests of this process."""
    return jax.jit(SHIPPED[name], static_argnames=HEAVY[name][1])


def compiled_anew(name: str) -> Callable[..., Any]:
    """The same op compiled with whatever is patched inside it now."""
    return jax.jit(lambda *args, **kwargs: SHIPPED[name](*args, **kwargs), static_argnames=HEAVY[name][1])


@contextmanager
def compiled_ops() -> Iterator[pytest.MonkeyPatch]:
    """Replaces the heavy ops by their compiled selves; gives the patch for more."""
    with pytest.MonkeyPatch.context() as patch:
        for name, (module, _) in HEAVY.items():
            patch.setattr(module, name, compiled(name))
        yield patch


def forward(
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    params: Params | None = None,
    sizes: KimiConfig | None = None,
    precision: Precision = FLOAT32,
) -> tuple[np.ndarray, np.ndarray, tuple[Any, ...]]:
    """Logits and final hidden vectors [T, ...] and the cache of one prompt, run in pieces that begin at 0 and at ``cuts``."""
    sizes = sizes or config()
    model = bind(abstract(sizes, precision, Parallel.single())[0], params or parameters())
    specs = describe(sizes, 1, len(ids), precision)
    held = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), specs, is_leaf=lambda s: isinstance(s, ArraySpec))
    hidden, logits = [], []
    for start, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        part = jnp.asarray(ids[start:end], jnp.int32)[None]
        piece, held = model(part, jnp.array([start], jnp.int32), jnp.array([end - start], jnp.int32), held)
        hidden.append(np.asarray(piece)[0])
        logits.append(np.asarray(model.logits(piece))[0])
    return np.concatenate(logits), np.concatenate(hidden), held


class Recorder:
    """Values of one forward of one row, under the names of the golden trace."""

    def __init__(self) -> None:
        self.values: dict[str, np.ndarray] = {}
        self._layer = -1
        self._site = ""

    def note(self, name: str, value: Any) -> None:
        self.values[f"trace/layer{self._layer}/{name}"] = np.asarray(value)

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Wraps the calls that produce the values; results pass through unchanged."""
        for name in ("mix", "route", "experts"):
            module, _ = HEAVY[name]
            patch.setattr(module, name, self._after(getattr(module, name), getattr(self, f"_{name}")))
        for name in ("_attend", "_feed_forward"):
            patch.setattr(DecoderLayer, name, self._after(getattr(DecoderLayer, name), getattr(self, f"_on{name}")))
        patch.setattr(DecoderLayer, "__call__", self._around_layer(DecoderLayer.__call__))

    @staticmethod
    def _after(call: Callable[..., Any], see: Callable[..., None]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            see(result, *args)
            return result

        return wrapped

    def _around_layer(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(layer: DecoderLayer, residuals: Any, tokens: Any, cache: Any) -> Any:
            self._layer += 1
            self._site = "attn" if residuals.blocks else "mlp"
            if not residuals.blocks:
                self.note("attn_in", residuals.prefix[0])
            residuals, cache = call(layer, residuals, tokens, cache)
            self.note("prefix", (residuals.prefix + residuals.update)[0])
            state = cache.state if isinstance(cache, KdaCache) else cache.latent
            self.note("state", state[0])
            self.values["trace/blocks"] = np.stack([np.asarray(block[0]) for block in residuals.blocks])
            self._site = "output"
            return residuals, cache

        return wrapped

    def _mix(self, mixed: Any, blocks: Any, prefix: Any, *_: Any) -> None:
        weights = solve_weights(np.stack([np.asarray(source[0]) for source in (*blocks, prefix)]), np.asarray(mixed[0]))
        if self._site == "output":
            self.values["trace/output_mix"], self.values["trace/output_in"] = weights, np.asarray(mixed[0])
            return
        self.note(f"{self._site}_mix", weights)
        self.note(f"{self._site}_in", mixed[0])

    def _route(self, choice: Any, *_: Any) -> None:
        self.note("topk_idx", choice[0])
        self.note("topk_w", choice[1])

    def _experts(self, total: Any, *_: Any) -> None:
        self.note("latent_sum", total)

    def _on_attend(self, result: Any, *_: Any) -> None:
        self.note("attn_out", result[0][0])
        self._site = "mlp"

    def _on_feed_forward(self, result: Any, *_: Any) -> None:
        self.note("mlp_out", result[0])


def solve_weights(sources: np.ndarray, mixed: np.ndarray) -> np.ndarray:
    """The weights [sources, T] that make each mixed vector out of its sources; they are independent vectors."""
    columns = [np.linalg.lstsq(sources[:, t].T.astype(float), mixed[t].astype(float))[0] for t in range(len(mixed))]
    return np.stack(columns, axis=1)
