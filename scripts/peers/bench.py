"""Measures kimi_jax and the strongest other CPU programs that run this model, alternating, on this machine.

    scripts/bench_peers --model random-mid --rounds 3 --json docs/measured/peers-mid.json

Each round runs every program once, one after another and never two at a time: a shared machine changes from one half hour
to the next, so only figures of one run may be compared. The figures are medians over the rounds. A peer that cannot be
installed is named with the reason, and the others are measured without it.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_jax.testing.shipped import BENCH_MODELS, cache_folder, shipped_model
from peers import converter, environments
from peers.environments import PeerError

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Entry:
    """One line of the table: how a program is started on a checkpoint."""

    label: str
    script: str
    dtype: str
    prepare: Callable[[Path, Path], tuple[Path, Path]]

    def command(self, checkpoint: Path, cache: Path, args: argparse.Namespace) -> list[str]:
        """Raises: PeerError: it cannot be installed or read this checkpoint."""
        python, file = self.prepare(checkpoint, cache)
        options = ["--tests", args.tests, "--repeats", args.repeats, "--new", args.new, "--dtype", self.dtype]
        return [str(part) for part in (python, HERE / self.script, file, *options)]


def _ours(checkpoint: Path, cache: Path) -> tuple[Path, Path]:
    del cache
    return Path(sys.executable), checkpoint


def _llama(dtype: str) -> Callable[[Path, Path], tuple[Path, Path]]:
    def prepare(checkpoint: Path, cache: Path) -> tuple[Path, Path]:
        python = environments.LLAMA.prepare(cache)
        return python, converter.convert(environments.TORCH.prepare(cache), checkpoint, dtype, cache)

    return prepare


def _from_registry(environment: environments.Environment) -> Callable[[Path, Path], tuple[Path, Path]]:
    return lambda checkpoint, cache: (environment.prepare(cache), checkpoint)


ENTRIES = (
    Entry("kimi-bfloat16", "kimi.py", "bfloat16", _ours),
    Entry("kimi-float32", "kimi.py", "float32", _ours),
    Entry("llama-bfloat16", "llama.py", "bfloat16", _llama("bfloat16")),
    Entry("llama-float32", "llama.py", "float32", _llama("float32")),
    Entry("torch-float32", "torch_eager.py", "float32", _from_registry(environments.TORCH)),
    Entry("torch-bfloat16", "torch_eager.py", "bfloat16", _from_registry(environments.TORCH)),
    Entry("mlx-float32", "mlx_lm_peer.py", "float32", _from_registry(environments.MLX)),
)


def main() -> int:
    """Measures what the command line names; 1 if a program could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    labels = [entry.label for entry in ENTRIES]
    parser.add_argument("--model", default="random-mid", choices=sorted(BENCH_MODELS))
    parser.add_argument("--only", default=",".join(labels), help=f"comma-separated: {', '.join(labels)}")
    parser.add_argument("--tests", default="prefill512,decode1,decode8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="of each test within a round")
    parser.add_argument("--new", type=int, default=64, help="decode steps of one repeat")
    parser.add_argument("--cache", type=Path, default=cache_folder() / "peers", help="environments and converted files")
    parser.add_argument("--json", type=Path, help="also write the result here")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if unknown := sorted(set(chosen) - set(labels)):
        parser.error(f"no program is called {', '.join(unknown)}; there are {', '.join(labels)}")
    checkpoint = shipped_model(args.model)
    assert checkpoint is not None
    args.cache.mkdir(parents=True, exist_ok=True)
    commands, missing = {}, {}
    for entry in ENTRIES:
        if entry.label in chosen:
            try:
                commands[entry.label] = entry.command(checkpoint, args.cache, args)
            except PeerError as error:
                missing[entry.label] = str(error)
    lines = _measure(commands, args.rounds, missing)
    result = {"model": args.model, "machine": machine(), "missing": missing, "rows": summary(lines)}
    result["table"] = table(result)
    print(result["table"])
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if missing else 0


def _measure(commands: dict[str, list[str]], rounds: int, missing: dict[str, str]) -> list[dict[str, Any]]:
    """Every program once a round; one that fails is not started again."""
    lines: list[dict[str, Any]] = []
    for number in range(rounds):
        for label, command in commands.items():
            if label in missing:
                continue
            print(f"bench_peers: round {number + 1} of {rounds}, {label}", file=sys.stderr, flush=True)
            ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if ended.returncode:
                missing[label] = f"{' '.join(command)} ended with {ended.returncode}"
                continue
            found = [line for line in ended.stdout.splitlines() if line.startswith("{")]
            lines += [{**json.loads(line), "label": label} for line in found]
    return lines


def summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a program and test: the median over the rounds, and the lowest and highest of them."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["label"], line["test"]), []).append(line)
    rows = []
    for (label, test), group in groups.items():
        speeds = [line["tokens_per_s"] for line in group]
        rows.append(
            {
                "label": label,
                "peer": group[0]["peer"],
                "versions": group[0]["versions"],
                "test": test,
                "tokens_per_s": round(statistics.median(speeds), 2),
                "lowest": min(speeds),
                "highest": max(speeds),
                "cpu_ms_per_token": round(statistics.median(line["cpu_ms_per_token"] for line in group), 4),
                "machine_used_by_others": max(line["machine_used_by_others"] for line in group),
                "peak_rss_mb": max(line["peak_rss_mb"] for line in group),
            }
        )
    return rows


def table(result: dict[str, Any]) -> str:
    """Markdown: a line a program, a column a test, tokens a second over all sequences."""
    rows = result["rows"]
    tests = list(dict.fromkeys(row["test"] for row in rows))
    lines = [
        f"| {result['model']}, tokens/s | {' | '.join(tests)} | peak MB | versions |",
        "| --- |" + " --: |" * (len(tests) + 1) + " --- |",
    ]
    for label in dict.fromkeys(row["label"] for row in rows):
        mine = {row["test"]: row for row in rows if row["label"] == label}
        first = next(iter(mine.values()))
        speeds = [f"{mine[test]['tokens_per_s']:.1f}" if test in mine else "" for test in tests]
        memory = max(row["peak_rss_mb"] for row in mine.values())
        lines.append(f"| {first['peer']} | {' | '.join(speeds)} | {memory} | {first['versions']} |")
    lines += ["", result["machine"] + "."]
    others = max((row["machine_used_by_others"] for row in rows), default=0.0)
    lines += [f"Other processes took up to {others:.0%} of the machine meanwhile."] if others > 0.1 else []
    lines += [f"Not measured: {label}: {reason}." for label, reason in result["missing"].items()]
    return "\n".join(lines)


def machine() -> str:
    """This machine in words."""
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        described = ""
    names = [line.split(":", 1)[1].strip() for line in described.splitlines() if line.startswith("model name")]
    flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in described.split()]
    name = names[0] if names else platform.processor() or platform.machine()
    return (
        f"{name}, {os.cpu_count()} processors ({', '.join(flags) or 'no vector extensions known'}), {platform.system()}"
    )


if __name__ == "__main__":
    sys.exit(main())
