"""Which shard of the source held each tensor, in what order: kept by a converted checkpoint for the way back."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_jax.checkpoint.header import CheckpointError, read_header
from kimi_jax.checkpoint.index import is_shard_name
from kimi_jax.checkpoint.reader import CheckpointFolder
from kimi_jax.checkpoint.strict_json import parse_json, printable, shown

SHARDS_NAME = "shards.json"


@dataclass(frozen=True)
class Shard:
    """One file: its name, the free text of its header, its tensors in the order of their data."""

    file: str
    metadata: Mapping[str, str]
    tensors: tuple[str, ...]


def describe_shards(opened: CheckpointFolder) -> list[dict[str, Any]]:
    """The shards of an open checkpoint as JSON. Copies of a tensor that the index does not choose are left out."""
    described = []
    for file in sorted({opened.info(name).file for name in opened.names()}):
        header = read_header(opened.path / file)
        chosen = [info for name, info in header.tensors.items() if opened.info(name).file == file]
        order = [info.name for info in sorted(chosen, key=lambda info: info.offset)]
        described.append({"file": file, "metadata": dict(header.metadata), "tensors": order})
    return described


def read_shards(path: Path) -> tuple[Shard, ...]:
    """Reads what ``describe_shards`` gave.

    Raises:
      CheckpointError: the file cannot be read or says something else.
    """
    try:
        value, problems = parse_json(path.read_bytes())
    except OSError as error:
        value, problems = [], [f"cannot be read: {error.strerror}"]
    if not problems:
        problems = list(_problems(value))
    if problems:
        raise CheckpointError(f"{path} is not usable", problems)
    return tuple(Shard(entry["file"], entry["metadata"], tuple(entry["tensors"])) for entry in value)


def _problems(value: Any) -> Iterator[str]:
    if not isinstance(value, list) or not value:
        yield f"must be a list of shards, found {shown(value)}"
        return
    for entry in value:
        if not isinstance(entry, dict) or entry.keys() != {"file", "metadata", "tensors"}:
            yield f"a shard must have file, metadata and tensors, found {shown(entry)}"
        elif not isinstance(entry["file"], str) or not is_shard_name(entry["file"]):
            yield f"{shown(entry['file'])} is not a plain file name *.safetensors"
        elif not _texts(entry["tensors"], list) or not _texts(entry["metadata"], dict):
            yield f"{entry['file']}: tensors must be a list of names, metadata an object of strings"


def _texts(value: Any, kind: type) -> bool:
    if not isinstance(value, kind):
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(isinstance(item, str) and printable(item) for item in items)
