"""The whole small model through the command that a user types: its greedy ids through kernels and through their references."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from kimi_jax.ops.implementation import Impl

PROMPT = [(37 * place + 11) % 700 for place in range(70)]
"""More ids than any kernel of few rows takes, so that prefill and decoding meet all of them."""

DRAWN = 16

COMMAND = (sys.executable, "-m", "kimi_jax.cli.main")


def compare_model(impl: Impl, seconds: float, command: Sequence[str] = COMMAND) -> dict[str, Any]:
    """Whether both give the same ids in float32; ``error`` says why that is not known."""
    began = time.monotonic()
    try:
        ids = {which: _generate(which, impl == "interpret", seconds, command) for which in (impl, "reference")}
    except (subprocess.SubprocessError, OSError, ValueError, KeyError) as error:
        return {"passed": False, "error": _message(error), "seconds": time.monotonic() - began}
    found = {"ids": ids[impl], "reference_ids": ids["reference"], "seconds": time.monotonic() - began}
    return {"passed": ids[impl] == ids["reference"], "error": "", **found}


def _generate(impl: Impl, on_cpu: bool, seconds: float, command: Sequence[str]) -> list[int]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as prompt:
        json.dump(PROMPT, prompt)
        prompt.flush()
        options = {"--model": "random-tiny", "--dtype": "float32", "--impl": impl, "--ids": prompt.name}
        options |= {"--max-tokens": str(DRAWN), "--max-seq-len": "128"}
        flat = [word for option in options.items() for word in option]
        done = subprocess.run(
            [*command, "generate", *flat, "--ignore-eos", "--json"],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
            env={**os.environ, **({"JAX_PLATFORMS": "cpu"} if on_cpu else {})},
        )
    return json.loads(done.stdout)["token_ids"]


def _message(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {error.timeout:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        said = [line for line in error.stderr.splitlines() if line.strip()]
        return f"kimi-jax generate ended with status {error.returncode}{f': {said[-1][:500]}' if said else ''}"
    return f"{type(error).__name__}: {error}"
