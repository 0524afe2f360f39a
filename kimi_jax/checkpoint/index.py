"""``model.safetensors.index.json``: which shard each tensor of a checkpoint is read from."""

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_jax.checkpoint.strict_json import limited, parse_json, printable, shown

INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20  # Kimi-K3's 497,220 tensors take about 60 MB
_PLAIN_NAME = re.compile(r"[^/\\:]{1,200}\.safetensors")


@dataclass(frozen=True)
class Index:
    """What an index file says.

    Attributes:
      weight_map: tensor name -> file name of its shard, in the order of the file.
      total_bytes: its ``metadata.total_size``, None when it gives none.
      refused: tensors whose shard name is not acceptable; they are in no ``weight_map``.
    """

    weight_map: Mapping[str, str]
    total_bytes: float | None = None
    refused: frozenset[str] = frozenset()


def is_shard_name(name: str) -> bool:
    """Whether ``name`` is a plain file name inside the folder: no separator, no drive, nothing that a terminal acts on.

    The file itself may be a link to elsewhere, as in the cache of huggingface_hub.
    """
    return _PLAIN_NAME.fullmatch(name) is not None and name.isprintable()


def read_index(path: Path) -> tuple[Index, list[str]]:
    """Reads and checks the index at ``path``; returns what is usable of it and every problem, each naming the file."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            return Index({}), [f"{path.name}: is not a regular file"]
        if status.st_size > MAX_INDEX_BYTES:
            return Index({}), [f"{path.name}: has {status.st_size:,} bytes, the limit is {MAX_INDEX_BYTES:,}"]
        raw = path.read_bytes()
    except OSError as error:
        return Index({}), [f"{path.name}: cannot be read: {error.strerror}"]
    value, problems = parse_json(raw)
    index = Index({})
    if isinstance(value, dict):
        index, wrong = _check(value)
        problems += wrong
    elif not problems:
        problems = [f"must be an object with a weight_map, found {shown(value)}"]
    return index, [f"{path.name}: {problem}" for problem in limited(problems)]


def _check(value: dict[str, Any]) -> tuple[Index, list[str]]:
    placed = value.get("weight_map")
    if type(placed) is not dict:
        return Index({}), [f"weight_map must be an object of tensor name to shard name, found {shown(placed)}"]
    total_bytes, problems = _total(value.get("metadata", {}))
    if not placed:
        problems.append("weight_map names no tensor")
    problems += [f"tensor {shown(name)} holds half a surrogate pair" for name in placed if not printable(name)]

    acceptable: dict[Any, bool] = {}  # few distinct shards, many tensors
    weight_map: dict[str, str] = {}
    refused: list[str] = []
    for name, shard in placed.items():
        good = acceptable.get(shard) if type(shard) is str else False
        if good is None:
            good = acceptable[shard] = is_shard_name(shard)
        if good:
            weight_map[name] = shard
        else:
            refused.append(name)
    problems += [
        f"tensor {shown(name)} is placed in {shown(placed[name])}: a shard must be a plain file name *.safetensors "
        "inside the folder"
        for name in refused
    ]
    return Index(weight_map, total_bytes, frozenset(refused)), problems


def _total(metadata: Any) -> tuple[float | None, list[str]]:
    if type(metadata) is not dict:
        return None, [f"metadata must be an object, found {shown(metadata)}"]
    total = metadata.get("total_size")
    if total is None:
        return None, []
    # Some converters write it as a float; one that overflowed to infinity fails the comparison.
    if type(total) not in (int, float) or not 0 <= total < 2**63:
        return None, [f"metadata.total_size must be a number of bytes, found {shown(total)}"]
    return total, []
