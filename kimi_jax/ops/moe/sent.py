"""What a token asks of the experts: its logits and its latent, whole arrays or as one exchange between devices brought them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt


class Asked(NamedTuple):
    """Logits over all experts, float32 [tokens, experts] where anything routes, and the rows that the experts read."""

    logits: Any
    latent: Any

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, experts, width of a latent."""
        return *self.logits.shape, self.latent.shape[1]

    @property
    def dtype(self) -> Any:
        """Of the latents."""
        return self.latent.dtype

    def whole(self) -> "Asked":
        """Both arrays."""
        return self

    def load_logits(self, token: Any, expert: Any, mask: Any) -> Any:
        """In a kernel: logits at broadcast indices, 0 where masked."""
        return plt.load(self.logits.at[token, expert], mask=mask, other=0)

    def load_latent(self, token: Any, inner: Any, mask: Any) -> Any:
        """In a kernel: entries of latents at broadcast indices, 0 where masked."""
        return plt.load(self.latent.at[token, inner], mask=mask, other=0)


@dataclass(frozen=True)
class Sent:
    """The same of bfloat16 latents as every device sent its part: of a token the logits, low half first, then the latent.

    Attributes:
      words: uint16 [parts, tokens, width], halves of float32 numbers and whole bfloat16 numbers by their bits; in a kernel a
        reference.
      experts: logits in a part.
      latent: entries of a latent in a part.
    """

    words: Any
    experts: int
    latent: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, experts, width of a latent."""
        parts, tokens, _ = self.words.shape
        return tokens, parts * self.experts, parts * self.latent

    @property
    def dtype(self) -> Any:
        """Of the latents."""
        return jnp.bfloat16

    def whole(self) -> Asked:
        """Both arrays, taken apart by XLA."""
        tokens, experts, latent = self.sizes
        words = jnp.swapaxes(self.words, 0, 1)
        halves = words[..., : 2 * self.experts].reshape(tokens, experts, 2)
        rows = words[..., 2 * self.experts :].reshape(tokens, latent)
        return Asked(
            lax.bitcast_convert_type(halves, jnp.float32),
            lax.bitcast_convert_type(rows, jnp.bfloat16),
        )

    def load_logits(self, token: Any, expert: Any, mask: Any) -> Any:
        """See ``Asked``."""
        part, column = expert // self.experts, 2 * (expert % self.experts)
        low, high = (plt.load(self.words.at[part, token, column + half], mask=mask, other=0) for half in (0, 1))
        return lax.bitcast_convert_type(high.astype(jnp.uint32) << 16 | low.astype(jnp.uint32), jnp.float32)

    def load_latent(self, token: Any, inner: Any, mask: Any) -> Any:
        """See ``Asked``."""
        at = inner // self.latent, token, 2 * self.experts + inner % self.latent
        return lax.bitcast_convert_type(plt.load(self.words.at[at], mask=mask, other=0), jnp.bfloat16)


jax.tree_util.register_dataclass(Sent, data_fields=("words",), meta_fields=("experts", "latent"))
