"""Image rows in the place of the text embedding's, at the placeholders of a call. Source: vision notes, section 9."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class ImageRows(NamedTuple):
    """Rows of a call's images: ``rows`` at their places, anything elsewhere; ``here`` where they are."""

    rows: Float[Array, "rows tokens embed"]
    here: Bool[Array, "rows tokens"]


def merge(
    text: Float[Array, "rows tokens embed"],
    images: Float[Array, "rows tokens embed"],
    here: Bool[Array, "rows tokens"],
) -> Float[Array, "rows tokens embed"]:
    """The image row where there is one, not scaled; else the text row. In the dtype of ``text``.

    Args:
      text: embeddings of all ids, those of placeholders included.
      images: the projector's rows at their places; anything, NaN too, elsewhere.
      here: which positions they are for.
    """
    return jnp.where(here[..., None], images.astype(text.dtype), text)
