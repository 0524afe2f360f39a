"""Whether splitting latent projections, router and query latent pays: bytes saved against collectives added."""

from dataclasses import dataclass, replace

from kimi_jax.planning.ask import Ask, changed
from kimi_jax.planning.bounds import decode
from kimi_jax.planning.fit import LEAN_AXES, fits_arrays, split_over_heads


@dataclass(frozen=True)
class Trade:
    """A decode step with these parts split, beside the same step with them whole. Times in seconds, None when unknown.

    Attributes:
      bytes_saved: read less on one device.
      read_saved: time of the parts.
      collectives_added: more of them.
      exchange_added: their time.
    """

    bytes_saved: float
    read_saved: float | None
    collectives_added: int
    exchange_added: float | None

    @property
    def worth(self) -> bool | None:
        """Whether the step gets faster; None when a time is unknown."""
        if self.read_saved is None or self.exchange_added is None:
            return None
        return self.read_saved > self.exchange_added

    def __str__(self) -> str:
        verdict = {None: "unknown whether that pays", True: "worth it", False: "not worth it"}[self.worth]
        saved, added = _milliseconds(self.read_saved), _milliseconds(self.exchange_added)
        return (
            f"splitting latent projections, router and query latent reads {self.bytes_saved / 1e9:.3f} GB less "
            f"a decode step ({saved}) and adds {self.collectives_added} collectives ({added}): {verdict} in time"
        )


def latent_trade(ask: Ask) -> Trade | None:
    """The trade for an ask's layout and batch; None where heads are whole or the arrays cannot be split so."""
    layout = ask.layout
    axes = {axis: mesh_axes for axis, mesh_axes in layout.axes.items() if axis not in LEAN_AXES}
    whole = changed(ask, layout=replace(layout, description="", axes=axes))
    if layout.parts("heads") == 1:
        return None
    split = changed(ask, layout=split_over_heads(whole.layout, LEAN_AXES))
    if not fits_arrays(split):
        return None
    before, after = decode(whole, 0).bound, decode(split, 0).bound
    return Trade(
        before.bytes - after.bytes,
        _less(before.part_seconds, after.part_seconds),
        after.collectives - before.collectives,
        _less(after.exchange_seconds, before.exchange_seconds),
    )


def _less(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second


def _milliseconds(seconds: float | None) -> str:
    return "time unknown" if seconds is None else f"{seconds * 1e3:.3f} ms"
