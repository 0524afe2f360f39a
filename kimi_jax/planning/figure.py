"""What fills one device, as stacked bars: one bar per layout, with the memory of the device as a line."""

from collections.abc import Sequence
from pathlib import Path

from kimi_jax.placement.view import FigureError, new_figure
from kimi_jax.planning.ask import Ask
from kimi_jax.planning.parts import LABELS
from kimi_jax.planning.sizes import Sizes

GIB = 2**30
COLOURS = (
    *("#4e79a7", "#a0cbe8", "#f28e2b", "#ffbe7d", "#59a14f", "#8cd17d", "#b6992d", "#f1ce63"),
    *("#499894", "#86bcb6", "#e15759", "#ff9d9a", "#79706e", "#bab0ac", "#d37295", "#b07aa1"),
)
"""One per row of the tables, in their order, so that a row keeps its colour from figure to figure."""


def draw(bars: Sequence[tuple[Ask, Sizes]], path: Path) -> Path:
    """Writes the figure; the format follows the name's ending.

    Args:
      bars: (what was planned, its sizes), one bar each.
      path: file to write.

    Raises:
      FigureError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(4.5 + 1.1 * len(bars), 5.5)
    axes = figure.subplots()
    rows = [row for row in LABELS if any(row in {**size.weights, **size.state} for _, size in bars)]
    positions, below = list(range(len(bars))), [0.0] * len(bars)
    for row in rows:
        heights = [_bytes(size, row) / GIB for _, size in bars]
        axes.bar(positions, heights, 0.6, below, color=COLOURS[list(LABELS).index(row)], label=LABELS[row])
        below = [start + height for start, height in zip(below, heights, strict=True)]
    ask = bars[0][0]
    if ask.device.hbm_bytes is not None:
        capacity = ask.device.hbm_bytes / GIB
        axes.axhline(capacity, color="black", linewidth=1, label=f"memory of {ask.device.name}")
        share = f"{ask.memory_fraction:g} of it"
        axes.axhline(capacity * ask.memory_fraction, color="black", linewidth=1, linestyle="--", label=share)
    for position, top in zip(positions, below, strict=True):
        axes.annotate(f"{top:.1f}", (position, top), ha="center", va="bottom")
    axes.set_xticks(positions, [planned.layout.name for planned, _ in bars])
    axes.set_ylabel("GiB on each device")
    axes.set_title(f"{ask.config.name}, {ask.rows} x {ask.length:,} tokens on {ask.device.name}")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False
    )
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise FigureError(f"{path} cannot be written", [str(error)]) from None
    return path


def _bytes(size: Sizes, row: str) -> int:
    found = size.weights.get(row) or size.state.get(row)
    return found.per_device if found else 0
