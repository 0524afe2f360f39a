"""Runs workers and outlives them: a worker that crashes or hangs costs the case it was at, never the check."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kimi_jax.testing.device_check.worker import Task

WORKER = (sys.executable, "-m", "kimi_jax.testing.device_check.worker")

STOPPING = 10
"""Seconds that a killed process gets to end; one that waits for its device may never."""


@dataclass
class Report:
    """What the workers of one task said.

    Attributes:
      device: as the worker found it; empty where none started.
      copy_bandwidth: bytes a second, where it was asked for.
      cases: result of each, by name; ``error`` says why there is no other.
      problem: why a worker without cases ended early.
    """

    device: dict[str, Any] = field(default_factory=dict)
    copy_bandwidth: float | None = None
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    problem: str = ""


def run(
    task: Task,
    seconds: float,
    *,
    command: Sequence[str] = WORKER,
    environment: Mapping[str, str] | None = None,
    tell: Callable[[str, Mapping[str, Any]], None] = lambda name, result: None,
) -> Report:
    """All cases of a task; what is left after a worker's end goes to another one.

    Args:
      task: what to do.
      seconds: longest silence of a worker: the time limit of its start, and of each case.
      command: starts a worker.
      environment: variables beside those of this process.
      tell: called with each result as it comes.
    """
    report = Report()

    def add(name: str, result: dict[str, Any]) -> None:
        report.cases[name] = result
        tell(name, result)

    while True:
        left = [name for name in task.cases if name not in report.cases]
        at, ending = None, ""
        for event in _worker(replace(task, cases=left), seconds, command, environment or {}):
            report.device = event.get("device", report.device)
            report.copy_bandwidth = event.get("copy_bandwidth", report.copy_bandwidth)
            ending = event.get("ended", ending)
            at = event.get("started", at)
            if "finished" in event:
                at = add(event["finished"], event)
        if at is None and not any(name in report.cases for name in left):
            lost = left  # another worker would come as far
        else:
            lost = [at] if at else []
        for name in lost:
            add(name, {"finished": name, "error": ending or "the process ended without a word"})
        if not task.cases:
            report.problem = ending
        if all(name in report.cases for name in task.cases):
            return report


def _worker(
    task: Task, seconds: float, command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """What one worker writes, then ``ended`` with the reason if it did not end well."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as said, open(reading, "rb", buffering=0) as lines:
        process = subprocess.Popen(
            [*command, json.dumps(asdict(task)), str(writing)],
            pass_fds=[writing],
            stdout=said,
            stderr=said,
            env={**os.environ, **environment},
            start_new_session=True,  # killed with whatever it started
        )
        os.close(writing)
        try:
            late = yield from _lines(lines, seconds)
            if late:
                yield {"ended": f"no word within {seconds:g} s: stopped"}
            elif status := _status(process):
                yield {"ended": f"the process {_how(status)}{_last_line(said)}"}
        finally:
            _stop(process)


def _lines(lines: Any, seconds: float) -> Iterator[dict[str, Any]]:
    """Every line as it comes; returns whether the writer was silent for too long."""
    held = b""
    until = time.monotonic() + seconds
    while True:
        ready, _, _ = select.select([lines], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return True
        part = lines.read(65536)
        if not part:
            return False
        *complete, held = (held + part).split(b"\n")
        for line in complete:
            until = time.monotonic() + seconds
            yield json.loads(line)


def _stop(process: subprocess.Popen[Any]) -> None:
    """Ends a process that still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOPPING)


def _status(process: subprocess.Popen[Any]) -> int:
    """Of a process that has said all; 0 where it does not end by itself, which nobody needs."""
    try:
        return process.wait(STOPPING)
    except subprocess.TimeoutExpired:
        return 0


def _how(status: int) -> str:
    return f"ended with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"


def _last_line(said: Any) -> str:
    """The last thing a process said, for a message."""
    said.seek(0)
    spoken = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    return f": {spoken[-1][:500]}" if spoken else ""
