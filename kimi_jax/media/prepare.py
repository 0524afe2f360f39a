"""A file's bytes to a picture made ready: the one way that every picture goes."""

from kimi_jax.media.decode import decode
from kimi_jax.media.errors import foreign_errors
from kimi_jax.media.limits import Deadline, Limits
from kimi_jax.media.picture import Picture
from kimi_jax.media.pixels import patches_of
from kimi_jax.media.settings import Settings
from kimi_jax.media.size_plan import plan_size


def prepare(
    data: bytes, settings: Settings, limits: Limits, deadline: Deadline | None = None, claimed: str | None = None
) -> Picture:
    """A file's bytes made ready.

    Args:
      data: PNG, JPEG, WebP or GIF.
      settings: how the model wants it.
      limits: what it may cost.
      deadline: from when its time runs; from now where omitted.
      claimed: media type that the sender gave.

    Raises:
      MediaError: see :func:`kimi_jax.media.decode.decode`.
    """
    deadline = deadline or limits.deadline()
    image = decode(data, limits, deadline, claimed)
    plan = plan_size(*image.size, settings)
    deadline.check("before resizing")
    with foreign_errors():
        picture = Picture(*image.size, plan.grid, patches_of(image, plan, settings))
    deadline.check("after resizing")
    return picture
