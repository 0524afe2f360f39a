"""Progress of long work on a terminal, on stderr: bytes or updates, rate and remaining time."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class LoadProgress:
    """A bar that is called with ``(name, bytes done, bytes in all)``; silent where stderr is no terminal."""

    def __init__(self, label: str = "loading") -> None:
        columns = (
            TextColumn(label),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[item]}"),
        )
        self._progress = Progress(
            *columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()
        )
        self._task = self._progress.add_task(label, total=None, item="")

    def __call__(self, name: str, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total, item=name[-40:])

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class TrainProgress:
    """A bar that is called with ``(updates done, updates in all, measurements)``; silent where stderr is no terminal."""

    def __init__(self) -> None:
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[told]}"),
        )
        console = Console(file=sys.stderr)
        self._progress = Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())
        self._task = self._progress.add_task("training", total=None, rate="", told="")
        self._last: tuple[int, float] | None = None

    def __call__(self, done: int, total: int, measured: dict[str, float]) -> None:
        now = time.monotonic()
        rate = ""
        if self._last is not None and done > self._last[0]:  # the first call has compiling in it
            rate = f"{(done - self._last[0]) / (now - self._last[1]):.2f}/s"
        self._last = done, now
        told = " ".join(f"{name} {measured[name]:.3f}" for name in ("loss", "accept", "length") if name in measured)
        self._progress.update(self._task, completed=done, total=total, rate=rate, told=told)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
