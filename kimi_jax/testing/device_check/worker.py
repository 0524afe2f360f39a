"""The process that touches the device: checks the cases it is given, one after another, and writes a line before and after each.

It ends after a case that raised: a device that has seen an illegal access fails everything that follows in the same process.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import jax

from kimi_jax.ops.implementation import Impl
from kimi_jax.testing.device_check import clock, device
from kimi_jax.testing.device_check.case import Case
from kimi_jax.testing.device_check.catalogue import catalogue
from kimi_jax.testing.device_check.compare import compare


@dataclass(frozen=True)
class Task:
    """What a worker does.

    Attributes:
      cases: names, in order; none only describes the device.
      impl: ``pallas``, or ``interpret`` on the CPU.
      size: of the cases.
      timed: whether they are timed.
      copy: whether the bandwidth of a copy is measured first.
    """

    cases: Sequence[str] = ()
    impl: Impl = "pallas"
    size: str = "k3-tp8"
    timed: bool = False
    copy: bool = False


def main(arguments: Sequence[str] | None = None) -> None:
    """``worker TASK FD``: the task as JSON; lines of JSON are written to the file descriptor."""
    task, descriptor = sys.argv[1:] if arguments is None else arguments
    asked = Task(**json.loads(task))
    if asked.impl == "interpret":
        jax.config.update("jax_platforms", "cpu")
    with open(int(descriptor), "w", encoding="utf-8", buffering=1) as lines:
        work(asked, lines)


def work(task: Task, lines: TextIO) -> None:
    """Describes the device, then checks every case until one raises."""
    for event in _events(task, catalogue(task.size)):
        lines.write(json.dumps(event) + "\n")
        if event.get("error"):
            return


def _events(task: Task, known: dict[str, Case]) -> Iterator[dict[str, Any]]:
    found = device.find()
    yield {"device": asdict(found)}
    if task.copy:
        yield {"copy_bandwidth": clock.copy_bandwidth()}
    for name in task.cases:
        yield {"started": name}
        yield {"finished": name, **_guarded(lambda name=name: check(known[name], task, found))}


def check(case: Case, task: Task, found: device.Found) -> dict[str, Any]:
    """Parity of one case and, where asked, its time."""
    differences = compare(case, task.impl)
    result: dict[str, Any] = {
        "passed": all(each.passed for each in differences),
        "arrays": [{**asdict(each), "passed": each.passed} for each in differences],
    }
    if task.timed:
        known = device.known_device(found.kind)
        last_cache = device.LAST_CACHE[known.name] if known else device.LARGEST_CACHE
        timing = clock.time_case(case, task.impl, found.platform, last_cache)
        result["timing"] = {**asdict(timing), "seconds": timing.seconds, "spread": timing.spread}
    return result


def _guarded(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a case found, or the message of what it raised: whatever that is, the check goes on."""
    try:
        return {"error": "", **run()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


if __name__ == "__main__":
    main()
