"""How large the checked cases are: K3.1 Pro on one of eight devices under ``tp8``, or small enough to be interpreted."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Sizes:
    """What one device holds of a layer, and what a call brings.

    Attributes:
      embed: width of a token.
      blocks: finished sources of the attention residuals.
      kda_heads, kda_dim, decay_rank, taps: of Kimi Delta Attention.
      heads, nope, rope, value, latent: of latent attention.
      experts, top_k, expert_latent, ffn: of the routed experts; all experts, a part of each one's width.
      vocab: of the slice that is drawn from.
      batch: sequences of the larger decode batch.
      draft: tokens of a sequence that a verification takes.
      chunk: tokens of a prefill call.
      index_heads, index_dim, index_top_k: of the sparse indexer of K3.1 Pro, whole on each device.
      short, long: cached rows of a sequence, the tokens of the call included.
      activations: dtype of rows and of most weights.
    """

    embed: int
    blocks: int
    kda_heads: int
    kda_dim: int
    decay_rank: int
    taps: int
    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    experts: int
    top_k: int
    expert_latent: int
    ffn: int
    vocab: int
    batch: int
    draft: int
    chunk: int
    short: int
    long: int
    index_heads: int
    index_dim: int
    index_top_k: int
    activations: str = "bfloat16"

    @property
    def dtype(self) -> np.dtype:
        """Of activations, as numpy knows it."""
        return np.dtype(ml_dtypes.bfloat16 if self.activations == "bfloat16" else np.float32)

    @property
    def kda_width(self) -> int:
        """Channels of all heads of Kimi Delta Attention."""
        return self.kda_heads * self.kda_dim

    @property
    def row(self) -> int:
        """Width of a cached row: the latent, and the key that all heads share."""
        return self.latent + self.rope


K3_TP8 = Sizes(
    embed=7168,
    blocks=8,
    kda_heads=12,
    kda_dim=128,
    decay_rank=128,
    taps=4,
    heads=12,
    nope=128,
    rope=64,
    value=128,
    latent=512,
    experts=896,
    top_k=16,
    expert_latent=3584,
    ffn=384,
    vocab=20480,
    batch=8,
    draft=2,
    chunk=2048,
    short=4096,
    long=131072,
    index_heads=32,
    index_dim=128,
    index_top_k=2048,
)
"""96 heads, the experts' width of 3,072 and 163,840 ids over eight devices; the rest is whole on each."""

TINY = Sizes(
    embed=160,
    blocks=2,
    kda_heads=2,
    kda_dim=16,
    decay_rank=16,
    taps=4,
    heads=3,
    nope=16,
    rope=8,
    value=16,
    latent=32,
    experts=10,
    top_k=3,
    expert_latent=96,
    ffn=64,
    vocab=520,
    batch=3,
    draft=2,
    chunk=66,
    short=100,
    long=300,
    index_heads=2,
    index_dim=32,
    index_top_k=20,
    activations="float32",
)
"""Sizes that fill no tile; the chunk is just long enough for the kernels of long inputs. A CPU does not multiply bfloat16."""

SIZES = {"k3-tp8": K3_TP8, "tiny": TINY}
