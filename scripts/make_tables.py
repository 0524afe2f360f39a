"""Writes the README's tables from what the tool itself says.

    python scripts/make_tables.py                   the cheap ones: plan, layouts, compile and modelled (from
                                                    docs/compiled/*.json), peers (from docs/measured/*.json, which
                                                    scripts/bench_peers writes)
    python scripts/make_tables.py bench             measures this machine again
    python scripts/make_tables.py compile --run     compiles the full-size steps again (minutes each), then writes them

Each table lies between ``<!-- NAME -->`` and ``<!-- /NAME -->``; what stood there before is replaced. A test holds the
README against the cheap ones.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
REPORTS = ROOT / "docs" / "compiled"
MEASURED = ROOT / "docs" / "measured"

PLAN = "plan k3 --layout tp8 --device mi355x --context 1048576"
LAYOUTS = ("tp8", "tp8-lean", "ep8", "tp4-ep2", "tp8-dcp8", "dp2-tp4")
BENCH = (
    "bench --model random-mid --tests prefill512,decode1,decode8,decode1@2048 --repeats 3",
    "bench --model random-big --tests prefill512,decode1,decode8 --repeats 3",
)
COMPILED = {
    budget: f"compile {model} --layout {layout} --target mi355x --phase {phase} --context 1048576 --batch 1 --budget {budget}"
    for budget, model, layout, phase in (
        ("k3-tp8-decode-1", "k3", "tp8", "decode"),
        ("k3-tp8-prefill-2048", "k3", "tp8", "prefill"),
        ("k3-tp8-lean-decode-1", "k3", "tp8-lean", "decode"),
        ("k3-ep8-decode-1", "k3", "ep8", "decode"),
        ("k31-tp8-decode-1", "k3.1-pro", "tp8", "decode"),
    )
}
"""File in docs/compiled -> the command whose --json it keeps."""

STEPS = {
    "k3-tp8-decode-1-xla": "tp8, XLA operations alone",
    "k3-tp8-decode-1": "tp8",
    "k3-tp8-lean-decode-1": "tp8-lean",
    "k3-ep8-decode-1": "ep8",
    "k31-tp8-decode-1": "K3.1 Pro, tp8",
}
"""File in docs/compiled -> the step whose time is modelled."""

KEPT = {
    **COMPILED,
    "k31-tp8-dcp8-decode-1": (
        "compile k3.1-pro --layout tp8-dcp8 --target mi355x --phase decode --context 1048576 --batch 1 "
        "--budget k31-tp8-dcp8-decode-1"
    ),
    "k3-tp8-verify-8": (
        "compile k3 --layout tp8 --target mi355x --phase verify --draft k3-mla --context 1048576 --batch 1 --budget k3-tp8-verify-8"
    ),
    "k31-tp8-verify-8": (
        "compile k3.1-pro --layout tp8 --target mi355x --phase verify --draft k3.1-mla --context 1048576 --batch 1 "
        "--budget k31-tp8-verify-8"
    ),
    "k3-tp8-decode-1-xla": "compile k3 --layout tp8 --target mi355x --phase decode --context 1048576 --batch 1 --impl reference",
}
"""Every file in docs/compiled; the last takes five minutes or more."""

LAUNCH_MICROSECONDS = (1.0, 2.0, 3.9)
"""What a launch may cost; the last is the figure that sharding/devices/mi355x.toml cites, of another chip."""


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the tables named on the command line; the cheap ones where none is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BLOCKS)} (default: {', '.join(CHEAP)})")
    parser.add_argument("--run", action="store_true", help="compile again before the compile table is written")
    args = parser.parse_args(argv)
    names = args.names or list(CHEAP)
    if unknown := sorted(set(names) - set(BLOCKS)):
        parser.error(f"no table is called {', '.join(unknown)}; there are {', '.join(BLOCKS)}")
    if args.run:
        compile_again()
    for name in names:
        README.write_text(with_block(README.read_text(), name, BLOCKS[name]()))


def with_block(text: str, name: str, block: str) -> str:
    """The README with one table replaced."""
    start, end = f"<!-- {name.upper()} -->", f"<!-- /{name.upper()} -->"
    pattern = re.compile(f"{start}.*?{end}", re.DOTALL)
    if not pattern.search(text):
        sys.exit(f"README.md has no place marked {name.upper()}")
    return pattern.sub(lambda _: f"{start}\n\n{block}\n\n{end}", text)


def plan_block() -> str:
    """Bytes, bounds and collectives of the published placement, as the command prints them."""
    return _console((PLAN,))


def bench_block() -> str:
    """Speeds of this machine."""
    return _console(BENCH)


def peers_block() -> str:
    """Speeds beside those of other programs, as scripts/bench_peers printed them."""
    files = sorted(MEASURED.glob("peers-*.json"))
    if not files:
        return "Not measured yet: `scripts/bench_peers --json docs/measured/peers-mid.json`."
    return "\n\n".join(json.loads(file.read_text())["table"] for file in files)


def layouts_block() -> str:
    """The shipped layouts side by side: bytes, fit and bounds."""
    import kimi_jax

    head = (
        "| layout | GB weights | GB a sequence | sequences that fit | decode, lower bound ms | modelled ms "
        "| collectives | prefill chunk, modelled ms |"
    )
    lines = [head, "| --- |" + " --: |" * (head.count("|") - 2)]
    for name in LAYOUTS:
        plan = kimi_jax.plan("k3", name, "mi355x", 1 << 20, batch=1)
        calls = {(call.kind, call.context > 0): call.bound for call in plan.calls}
        decode, prefill = calls["decode", True], calls["prefill", False]
        cells = [
            f"`{name}`",
            f"{plan.weight_bytes / 1e9:.1f}",
            f"{plan.cache_bytes / 1e9:.2f}",
            str(plan.fit.sequences),
            f"{1e3 * (decode.lower or 0):.2f}",
            f"{1e3 * (decode.modelled or 0):.2f}",
            str(decode.collectives),
            f"{1e3 * (prefill.modelled or 0):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def compile_block() -> str:
    """What the real compiler made of the full-size steps, from the reports that are kept."""
    kept = {name: json.loads((REPORTS / f"{name}.json").read_text()) for name in COMPILED}
    columns = {name: _facts(file["report"]) for name, file in kept.items()}
    labels = list(next(iter(columns.values())))
    lines = [f"| | {' | '.join(f'`{name}`' for name in columns)} |", "| --- |" + " --: |" * len(columns)]
    lines += [f"| {label} | {' | '.join(facts[label] for facts in columns.values())} |" for label in labels]
    commands = [f"$ {file['command']}" for file in kept.values()]
    return "\n".join(["```", *commands, "```", "", *lines])


def modelled_block() -> str:
    """The time of a decode step by its launches, bytes and collectives, before and after the kernels."""
    from kimi_jax.placement.device import load_device
    from kimi_jax.placement.roofline import Collective, Work, bound

    device = load_device("mi355x")
    costs = [f"modelled ms at {cost:g} us a launch" for cost in LAUNCH_MICROSECONDS]
    head = ["step", "launches", "collectives", "GB moved", "of the least", "ms moving", "ms exchanging", *costs]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --: |" * (len(head) - 1)]
    for name, label in STEPS.items():
        report = json.loads((REPORTS / f"{name}.json").read_text())["report"]
        moved, launches = report["moved"], report["launches"]
        # the bodies of loops count once: of their bytes only the least is known
        loops = moved["loops"] > 0
        size = moved["roofline"] if loops else moved["bytes"]
        exchanged = [
            Collective(each["part"], each["kind"], each["count"], each["bytes"], each["participants"])
            for each in report["collectives"]
        ]
        collectives = sum(each.count for each in exchanged)
        # the latency of a collective is that of its own kernel
        work = Work("step", size, launches=launches["step"] + launches["inner"] - collectives)
        bounds = [bound([work], exchanged, replace(device, launch_latency=cost * 1e-6)) for cost in LAUNCH_MICROSECONDS]
        times = [bounds[0].part_seconds, bounds[0].exchange_seconds, *(each.modelled for each in bounds)]
        moving = [f"{size / 1e9:.2f}", "unknown" if loops else f"{moved['ratio']:.3f}"]
        cells = [
            label,
            f"{work.launches:,}{' or more' if loops else ''}",
            str(collectives),
            *moving,
            *(f"{1e3 * (time or 0):.2f}" for time in times),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _facts(report: dict[str, Any]) -> dict[str, str]:
    """A column of the compile table: label -> what the report says."""
    memory, plan, kernels, launches = (report[key] for key in ("memory", "plan", "kernels", "launches"))
    kinds: dict[str, int] = {}
    for each in report["collectives"]:
        kinds[each["kind"]] = kinds.get(each["kind"], 0) + each["count"]
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    over, moved = report["budget"], report["moved"]
    return {
        "compiled for": f"{report['devices']} x {report['target']}, JAX {report['jax']}",
        "call": f"{report['phase']} of {report['batch']} x {report['tokens']:,}, {report['context']:,} tokens held",
        "bytes passed to a device": f"{memory['arguments']:,}",
        "of which parameters and caches": f"{plan['weights']:,} + {plan['cache']:,}",
        "equal to the plan": "yes" if plan["agrees"] else "; ".join(plan["problems"]),
        "updated in place": f"{memory['aliased']:,}",
        "temporary bytes": f"{memory['temp']:,}",
        "collectives in a step": counted,
        "launches in a step": "unknown" if launches is None else f"{launches['step']:,}",
        "bytes read and written in a step; over the roofline's": "not counted"
        if moved is None
        else f"{moved['bytes']:,}; {moved['ratio']:.3f}",
        "copies above 1 MiB": str(len(report["copies"])),
        "weights above 1 MB read by anything but products and kernels": str(
            sum(each["count"] for each in report["weight_readers"])
        ),
        "kernels; that spill registers": f"{kernels['count']}; {len(kernels['spilling'])}",
        "most VGPRs, most LDS of a kernel": f"{kernels['vgprs']}, {kernels['shared']:,} B",
        "within its budget": "not asked" if over is None else "yes" if not over else "; ".join(over),
        "to compile, on two cores": f"{sum(report['seconds'].values()):.0f} s, {report['peak_bytes'] / 2**30:.1f} GiB",
    }


def compile_again() -> None:
    """Runs the commands of the compile and modelled tables and keeps what they say."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    for name, command in KEPT.items():
        said = _run(f"{command} --json")
        kept = {"command": f"kimi-jax {command} --json", "report": json.loads(said.splitlines()[-1])}
        (REPORTS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def _console(commands: Sequence[str]) -> str:
    said = [f"$ kimi-jax {command}\n{_run(command)}" for command in commands]
    return "```\n" + "\n\n".join(said) + "\n```"


def _run(command: str) -> str:
    """What the command prints, stderr's notes first."""
    done = subprocess.run(
        [sys.executable, "-m", "kimi_jax.cli.main", *command.split()], capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        sys.exit(f"kimi-jax {command} failed:\n{done.stderr}")
    return (done.stderr + done.stdout).strip()


BLOCKS: dict[str, Callable[[], str]] = {
    "plan": plan_block,
    "layouts": layouts_block,
    "compile": compile_block,
    "modelled": modelled_block,
    "bench": bench_block,
    "peers": peers_block,
}
CHEAP = ("plan", "layouts", "compile", "modelled", "peers")

if __name__ == "__main__":
    main()
