"""One decoder layer: two sub-layers joined by Attention Residuals instead of a residual stream (text-model section 2.3)."""

from typing import NamedTuple

from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.cache import KdaCache, LayerCache, MlaCache
from kimi_jax.config import KimiConfig
from kimi_jax.layers.kda import Kda
from kimi_jax.layers.latent_moe import LatentMoe
from kimi_jax.layers.mla import Mla
from kimi_jax.layers.mlp import GatedMlp
from kimi_jax.layers.norm import RmsNorm
from kimi_jax.layers.param import param
from kimi_jax.ops.attn_res import api as attn_res
from kimi_jax.ops.implementation import Impl, Implementations
from kimi_jax.ops.kda.rollback import Pending
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import Precision


class Tokens(NamedTuple):
    """Where the tokens of one call stand.

    Attributes:
      positions: [rows, tokens] int32 position of each token, -1 for padding. Real ones come first.
      new: [rows] real tokens of each row in this call.
      total: [rows] tokens of each row once these are in.
      pages: [rows, table] where the latent rows of each row lie in a pool; None where the cache has a row for each.
      held: whether recurrent states stay as they are, with records of these tokens beside them (``ops/kda/rollback``).
      shares: [parts, rows] real tokens of each row in the share of every device, where the call is cut (``layers/share``);
        ``positions`` are then those of this device's share. None where every device has all tokens.
    """

    positions: Int[Array, "rows tokens"]
    new: Int[Array, " rows"]
    total: Int[Array, " rows"]
    pages: Int[Array, "rows table"] | None = None
    held: bool = False
    shares: Int[Array, "parts rows"] | None = None

    @property
    def real(self) -> Bool[Array, "rows tokens"]:
        return self.positions >= 0


class Residuals(NamedTuple):
    """Sources of the mixing.

    Attributes:
      blocks: finished block sums, oldest first.
      prefix: running sum of the current block.
      update: result of the last sub-layer, which the next site adds to the running sum; None where nothing waits.
    """

    blocks: tuple[Float[Array, "rows tokens embed"], ...]
    prefix: Float[Array, "rows tokens embed"]
    update: Float[Array, "rows tokens embed"] | None = None


class Row(nnx.Module):
    """A single projection row, stored ``[1, embed]``."""

    def __init__(self, width: int, precision: Precision) -> None:
        self.weight = param((1, width), precision.operand, (None, "embed"))


def enter(
    residuals: Residuals, mixing: RmsNorm, row: Row, norm: RmsNorm, impl: Impl
) -> tuple[Float[Array, "rows tokens embed"], Float[Array, "rows tokens embed"]]:
    """The normalised input of one site, and the running sum with what waited.

    Args:
      mixing: its weight and ``row`` act only as a product.
      norm: applied to the mix.
    """
    weight, row_weight = mixing.weight[...], row.weight[...].reshape(-1)
    return attn_res.mix_norm(*residuals, weight, row_weight, mixing.eps, norm.weight[...], norm.eps, impl)


class DecoderLayer(nnx.Module):
    """Attention and feed-forward of one layer, each reading a mix of the sources and adding to the running sum."""

    def __init__(
        self, index: int, config: KimiConfig, precision: Precision, parallel: Parallel, impls: Implementations
    ) -> None:
        hidden, eps = config.hidden, config.rms_eps
        self.input_layernorm = RmsNorm(hidden, eps, precision)
        self.post_attention_layernorm = RmsNorm(hidden, eps, precision)
        self.self_attention_res_norm = RmsNorm(hidden, eps, precision)
        self.self_attention_res_proj = Row(hidden, precision)
        self.mlp_res_norm = RmsNorm(hidden, eps, precision)
        self.mlp_res_proj = Row(hidden, precision)
        kind = Kda if config.attention[index] == "kda" else Mla
        self.self_attn = kind(config, precision, parallel, impls)
        if config.is_dense(index):
            self.mlp = GatedMlp(hidden, config.dense_width, config.situ_beta, config.situ_linear_beta, precision)
        else:
            self.block_sparse_moe = LatentMoe(config, precision, parallel, impls)
        self.starts_block = config.starts_block(index)
        self.parallel, self.impls = parallel, impls

    def __call__(
        self, residuals: Residuals, tokens: Tokens, cache: LayerCache
    ) -> tuple[Residuals, LayerCache | Pending]:
        blocks, prefix, _ = residuals
        impl = self.impls.attn_res
        if blocks:
            mixing, row = self.self_attention_res_norm, self.self_attention_res_proj
            x, prefix = enter(residuals, mixing, row, self.input_layernorm, impl)
        else:
            x = self.input_layernorm(prefix)
        y, after = self._attend(x, tokens, cache)
        # after the mix above: the finished block was still the running sum there
        residuals = Residuals((*blocks, prefix), y) if self.starts_block else Residuals(blocks, prefix, y)
        x, prefix = enter(residuals, self.mlp_res_norm, self.mlp_res_proj, self.post_attention_layernorm, impl)
        return Residuals(residuals.blocks, prefix, self._feed_forward(x, tokens)), after

    def _attend(
        self, x: Float[Array, "rows tokens embed"], tokens: Tokens, cache: LayerCache
    ) -> tuple[Float[Array, "rows tokens embed"], LayerCache | Pending]:
        if isinstance(self.self_attn, Kda):
            assert isinstance(cache, KdaCache)
            if tokens.shares is not None:
                return self.self_attn.share(x, tokens.shares, cache)
            return (self.self_attn.verify if tokens.held else self.self_attn)(x, tokens.new, cache)
        assert isinstance(cache, MlaCache)
        given = (tokens.positions, tokens.new, tokens.total, cache, tokens.pages)
        return self.self_attn(x, *given, cut=tokens.shares is not None)

    def _feed_forward(self, x: Float[Array, "rows tokens embed"], tokens: Tokens) -> Float[Array, "rows tokens embed"]:
        if hasattr(self, "mlp"):
            return self.parallel.psum(self.mlp(x, self.impls.linear), "ffn")
        return self.block_sparse_moe(x, tokens.real, cut=tokens.shares is not None)
