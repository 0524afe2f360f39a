"""llama.cpp's own converter, taken from the source of its package, run on our checkpoints."""

import subprocess
import sys
import tarfile
from pathlib import Path

from peers.environments import LLAMA_CPP, PeerError

HERE = Path(__file__).parent
FORMS = {"bfloat16": "bf16", "float32": "f32"}


def convert(converter: Path, checkpoint: Path, dtype: str, cache: Path) -> Path:
    """The GGUF file of a checkpoint, made if it is not there.

    Args:
      converter: an interpreter with torch, transformers and safetensors.

    Raises:
      PeerError: the source cannot be had, or the converter failed.
    """
    out = cache / f"{checkpoint.name}-{FORMS[dtype]}.gguf"
    if out.is_file():
        return out
    unfinished = out.with_suffix(".part")
    command = [converter, HERE / "to_gguf.py", _source(converter, cache), checkpoint, unfinished, FORMS[dtype]]
    _run([str(part) for part in command])
    unfinished.rename(out)
    return out


def _source(python: Path, cache: Path) -> Path:
    """llama.cpp's tree, as the package carries it."""
    name = LLAMA_CPP.replace("-", "_").replace("==", "-")
    tree = cache / name / "vendor" / "llama.cpp"
    if not tree.is_dir():
        _run([str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary",
              "llama-cpp-python", "--dest", str(cache), LLAMA_CPP])  # fmt: skip
        with tarfile.open(cache / f"{name}.tar.gz") as archive:
            archive.extractall(cache, filter="data")
    return tree


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, stdout=sys.stderr, check=False)
    if ended.returncode:
        raise PeerError(f"{' '.join(command)} ended with {ended.returncode}")
