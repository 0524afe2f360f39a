"""What a run measured, one JSON object a line, and the curve of its loss.

A run that is killed and resumed leaves the lines of one that was not: what was logged after the checkpoint is measured again.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_jax.train.state import TrainingError


@dataclass(frozen=True)
class Metrics:
    """A file of measurements; every line has ``step``, the updates done when it was written."""

    file: Path

    def resume(self, step: int) -> None:
        """Drops lines after ``step`` and a torn last one; 0 starts the file anew. Whole or not at all.

        Raises:
          TrainingError: the file cannot be written.
        """
        partial = self.file.with_name(f".{self.file.name}.partial")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            kept = [line for line in self.read() if line["step"] <= step] if step else []
            with partial.open("w", encoding="utf-8") as out:
                out.writelines(json.dumps(line) + "\n" for line in kept)
                out.flush()
                os.fsync(out.fileno())
            os.replace(partial, self.file)
        except OSError as error:
            raise TrainingError("Measurements cannot be kept", [f"{self.file}: {error.strerror or error}"]) from None

    def add(self, step: int, values: Mapping[str, float | int]) -> None:
        """Appends a line in one write."""
        line = json.dumps({"step": step, **values}) + "\n"
        handle = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    def read(self) -> list[dict[str, Any]]:
        """Every whole line, in order; a torn one is left out."""
        try:
            text = self.file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        found = []
        for line in text.split("\n"):
            try:
                values = json.loads(line)
            except ValueError:
                continue
            if isinstance(values, dict) and type(values.get("step")) is int:
                found.append(values)
        return found


def plot(metrics: Metrics, image: Path, keys: Sequence[str] = ("loss",)) -> None:
    """Draws curves over the updates into an image file: each value pale, its running mean bold.

    Raises:
      FigureError: matplotlib is not installed.
      TrainingError: nothing was measured under these keys, or the image cannot be written.
    """
    from kimi_jax.placement.view import new_figure

    lines = metrics.read()
    curves = {key: [(line["step"], line[key]) for line in lines if key in line] for key in keys}
    problems = [f"{metrics.file} has no {key}" for key, points in curves.items() if not points]
    if problems:
        raise TrainingError("No curve can be drawn", problems)
    figure = new_figure(7.0, 4.0)
    axes = figure.add_subplot()
    for key, points in curves.items():
        steps, values = zip(*points, strict=True)
        (drawn,) = axes.plot(steps, values, alpha=0.3, linewidth=1)
        axes.plot(steps, _smooth(values), color=drawn.get_color(), label=key)
    axes.set_xlabel("updates")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    try:
        figure.savefig(image, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise TrainingError("No curve can be drawn", [f"{image}: {error}"]) from None


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential running mean over about a fiftieth of the run, without the bias of its start."""
    share = 1 / max(len(values) / 50, 1)
    mean, weight, smooth = 0.0, 0.0, []
    for value in values:
        mean, weight = mean + share * (value - mean), weight + share * (1 - weight)
        smooth.append(mean / weight)
    return smooth
