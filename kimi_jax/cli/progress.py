"""Progress of long work on a terminal: bytes, rate and remaining time, on stderr."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


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
