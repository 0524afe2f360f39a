"""What every runner does alike: load a checkpoint, time some tests, print one JSON line each.

A peer has ``name``, ``versions`` and

    load(checkpoint, threads)   reads it; sets ``vocab``
    prefill(ids)                ids from an empty state; returns the likeliest next id
    start(prompts)              opens one sequence a prompt, all of one length
    step(tokens)                one id for each open sequence; returns the likeliest next id of each

Decoding is fed one fixed random stream: a random model repeats itself, which would read the same experts again and again.
Every step's choice reaches Python before the next one starts. The first run of a test (compilation, page faults) is not
in its figures. Needs numpy only, since every peer has an environment of its own.
"""

import argparse
import json
import os
import re
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

TEST = re.compile(r"(?P<kind>prefill|decode)(?P<size>\d+)(?:@(?P<context>\d+))?")
CONTEXT = 32
"""Tokens of a decoding sequence's prompt unless the test says otherwise."""


class Peer(Protocol):
    """One program that runs the model."""

    name: str
    versions: str
    vocab: int

    def load(self, checkpoint: str, threads: int) -> None: ...
    def prefill(self, ids: list[int]) -> int: ...
    def start(self, prompts: list[list[int]]) -> Any: ...
    def step(self, tokens: list[int]) -> list[int]: ...


def parser() -> argparse.ArgumentParser:
    """The options of every runner; a runner may add its own."""
    options = argparse.ArgumentParser()
    options.add_argument("checkpoint")
    options.add_argument("--tests", default="prefill512,decode1,decode8")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--new", type=int, default=64, help="decode steps of one repeat")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    return options


def run(peer: Peer, args: argparse.Namespace) -> None:
    """Loads and measures, one line a test."""
    peer.load(args.checkpoint, args.threads)
    random = np.random.default_rng(5)
    for test in args.tests.split(","):
        found = TEST.fullmatch(test)
        if not found:
            raise SystemExit(f"no such test: {test!r}; expected prefillN, decodeB or decodeB@CONTEXT")
        size = int(found["size"])
        if found["kind"] == "prefill":
            ids = random.integers(4, peer.vocab, size).tolist()
            tokens, runs = size, [_timed(lambda ids=ids: peer.prefill(ids)) for _ in range(args.repeats + 1)]
        else:
            prompts = random.integers(4, peer.vocab, (size, int(found["context"] or CONTEXT))).tolist()
            stream = random.integers(4, peer.vocab, (args.new, size)).tolist()
            tokens, runs = args.new * size, [_decode(peer, prompts, stream) for _ in range(args.repeats + 1)]
        print(json.dumps(_line(peer, test, tokens, runs[1:])), flush=True)


def _decode(peer: Peer, prompts: list[list[int]], stream: list[list[int]]) -> tuple[float, float, float]:
    peer.start(prompts)

    def steps() -> None:
        for tokens in stream:
            peer.step(tokens)

    return _timed(steps)


def _timed(call: Callable[[], Any]) -> tuple[float, float, float]:
    """Seconds, processor seconds of this process, and those of everything else."""
    own, all_, began = _own(), _machine(), time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    own = _own() - own
    return seconds, own, max(0.0, _machine() - all_ - own)


def _line(peer: Peer, test: str, tokens: int, runs: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    seconds = statistics.median(run[0] for run in runs)
    others = statistics.median(run[2] / run[0] for run in runs) / (os.cpu_count() or 1)
    return {
        "peer": peer.name,
        "versions": peer.versions,
        "test": test,
        "tokens_per_s": round(tokens / seconds, 2),
        "best_tokens_per_s": round(tokens / min(run[0] for run in runs), 2),
        "cpu_ms_per_token": round(statistics.median(run[1] for run in runs) / tokens * 1e3, 4),
        "machine_used_by_others": round(others, 3),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def _own() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _machine() -> float:
    """Busy seconds of all processors, those taken by a host included; 0 where the system does not say."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(field) for field in file.readline().split()[1:9]]
    except OSError:
        return 0.0
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
