"""``scripts/device_check``: kernels against their references on the GPU at hand, and how fast they are; one JSON file.

Exit status: 0 everything is as the reference, 1 something is not or failed, 2 the request was wrong or there is no GPU.
"""

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from kimi_jax.testing.device_check import watch
from kimi_jax.testing.device_check.catalogue import MODEL, catalogue, names
from kimi_jax.testing.device_check.model import compare_model
from kimi_jax.testing.device_check.report import report, table
from kimi_jax.testing.device_check.worker import Task

GPUS = ("rocm", "cuda")


def main(arguments: Sequence[str] | None = None, worker: Sequence[str] = watch.WORKER) -> int:
    """Runs the check and returns its exit status; ``worker`` is the command that starts one."""
    began = time.monotonic()
    parser, args = _parse(arguments)
    chosen = _chosen(parser, args.only)
    impl, size = ("interpret", "tiny") if args.interpret else ("pallas", "k3-tp8")
    timed = not (args.quick or args.interpret)

    probe = watch.run(Task(impl=impl, copy=timed), args.limit, command=worker)
    if not args.interpret and (probe.problem or probe.device.get("platform") not in GPUS):
        return _refuse(probe)
    if probe.problem:
        print(f"device_check: JAX does not start: {probe.problem}", file=sys.stderr)
        return 1

    known = catalogue(size)
    results: dict[str, dict[str, Any]] = {}
    for _, group in groupby((name for name in known if name in chosen), lambda name: known[name].group):
        task = Task(tuple(group), impl, size, timed)
        results |= watch.run(task, args.limit, command=worker, tell=_tell).cases
    model = None
    if MODEL in chosen:
        model = compare_model(impl, 3 * args.limit)
        _tell(MODEL, model)
    taken = time.monotonic() - began
    told = report(impl, size, probe.device, probe.copy_bandwidth, results, known, model, taken)
    args.out.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(*table(told), f"written to {args.out}", sep="\n")
    return 0 if told["summary"]["passed"] else 1


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="scripts/device_check",
        description="Kernels against their references on the GPU at hand, and how fast they are; one JSON file.",
        epilog="--python PATH (or KIMI_PYTHON=PATH): run with this Python and the JAX that is installed for it.",
    )
    parser.add_argument(
        "--interpret", action="store_true", help="on the CPU, tiny sizes, kernels step by step, no times"
    )
    parser.add_argument("--quick", action="store_true", help="parity only, no times")
    parser.add_argument("--only", metavar="PATTERN", help="cases whose name matches, such as 'mla.*' or '*decode-1*'")
    parser.add_argument("--out", type=Path, default=Path("device-check.json"), help="(default: device-check.json)")
    parser.add_argument(
        "--limit",
        type=float,
        default=90,
        metavar="SECONDS",
        help="longest time of a case, compilation included (default: 90)",
    )
    args = parser.parse_args(arguments)
    if args.limit <= 0:
        parser.error(f"--limit {args.limit:g}: it must be above 0")
    if not args.out.absolute().parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {args.out.absolute().parent}")
    return parser, args


def _chosen(parser: argparse.ArgumentParser, pattern: str | None) -> list[str]:
    known = names()
    chosen = [name for name in known if pattern is None or fnmatch.fnmatchcase(name, pattern)]
    if not chosen:
        parser.error(f"--only {pattern}: no such case. Cases: {', '.join(known)}")
    return chosen


def _refuse(probe: watch.Report) -> int:
    if probe.problem:
        found = f"JAX does not start: {probe.problem}"
    else:
        found = (
            f"JAX {probe.device['versions'].get('jax')} sees {probe.device['kind']} ({probe.device['platform']}) only"
        )
    print(
        f"device_check: no GPU that kernels run on. {found}\n"
        f"  Python: {sys.executable}\n"
        "  With an AMD GPU: kimi-jax doctor says what is missing (docs/rocm.md). Another Python: --python PATH, or KIMI_PYTHON.\n"
        "  On a CPU the same kernels run step by step, at tiny sizes: --interpret",
        file=sys.stderr,
    )
    return 2


def _tell(name: str, result: Mapping[str, Any]) -> None:
    """One line as a result comes, where somebody waits."""
    if sys.stderr.isatty():
        how = result["error"].splitlines()[0][:120] if result["error"] else "ok" if result["passed"] else "WRONG"
        print(f"{name}: {how}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
