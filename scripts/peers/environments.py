"""An environment for each peer, made once in the user's cache folder from the package registry.

Every peer has one of its own: their requirements disagree with each other's and with ours.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


class PeerError(Exception):
    """A peer that cannot be installed here; the message says what was tried and how it ended."""


@dataclass(frozen=True)
class Environment:
    """What a peer needs.

    Attributes:
      packages: requirements, pinned: the table names them.
      built: a package of these that is compiled for this processor, which takes minutes.
    """

    name: str
    packages: tuple[str, ...]
    built: str | None = None

    def prepare(self, cache: Path) -> Path:
        """The interpreter of this environment, made if it is not there.

        Raises:
          PeerError: the installation failed; an unfinished folder is taken up again the next time.
        """
        folder = cache / self.name
        python, done = folder / "bin" / "python", folder / "installed"
        wanted = "\n".join(self.packages)
        if done.is_file() and done.read_text() == wanted:
            return python
        note = f", compiling {self.built}: about ten minutes" if self.built else ""
        print(f"bench_peers: making {folder}{note}", file=sys.stderr, flush=True)
        _call([sys.executable, "-m", "venv", str(folder)], cache, self.name)
        command = [str(python), "-m", "pip", "install", "--quiet", *self.packages]
        if self.built:
            command += ["--no-binary", self.built]
        _call(command, cache, self.name)
        done.write_text(wanted)
        return python


def _call(command: list[str], cache: Path, name: str) -> None:
    log = cache / f"{name}.log"
    settings = {
        "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
    }
    with log.open("a") as file:
        ended = subprocess.run(command, env=os.environ | settings, stdout=file, stderr=file, check=False)
    if ended.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise PeerError(f"{' '.join(command)} ended with {ended.returncode}: {''.join(last)} (all of it: {log})")


LLAMA_CPP = "llama-cpp-python==0.3.36"
LLAMA = Environment("llama", (LLAMA_CPP, "numpy"), built="llama-cpp-python")
TORCH = Environment(
    "torch", ("torch==2.13.0", "transformers", "safetensors", "numpy", "pyyaml", "sentencepiece", "einops")
)
MLX = Environment("mlx", ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2"))
