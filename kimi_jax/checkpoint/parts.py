"""Arrays in and out of one orbax folder. The only module that imports orbax; imported on first use (0.5 s)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding

from kimi_jax.checkpoint.header import CheckpointError

CHUNK_BYTES = 64 << 20
"""Largest stored block. A device reads every block that its slice touches, so a block must be small beside a slice."""


class Target(NamedTuple):
    """How an array is to come back: whole on the host where ``sharding`` is None, and in which dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Sharding | None = None


def save(path: Path, arrays: Mapping[str, jax.Array | np.ndarray[Any, Any]]) -> None:
    """Writes ``arrays`` into the new folder ``path``, each shard from the first device that holds it.

    Not compressed: packed weights do not shrink and bfloat16 ones hardly.

    Raises:
      CheckpointError: orbax could not write.
    """
    options = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in arrays}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
            checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(dict(arrays), save_args=options))
    except Exception as error:  # tensorstore raises ValueError for a full disk, RuntimeError and others
        raise _error(f"{path} cannot be written", arrays, error) from error


def restore(path: Path, targets: Mapping[str, Target]) -> dict[str, Any]:
    """Reads some arrays of a folder, each straight into its shards, converted to the dtype asked for.

    Raises:
      CheckpointError: orbax could not read them.
    """
    wanted = {name: _restore_args(target) for name, target in targets.items()}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            args = ocp.args.PyTreeRestore(dict.fromkeys(wanted, 0), restore_args=wanted, partial_restore=True)
            arrays = checkpointer.restore(path.absolute(), args=args)
    except Exception as error:  # the kinds that orbax and tensorstore raise for a damaged folder are many
        raise _error(f"{path} cannot be read", targets, error) from error
    return {name: arrays[name] for name in targets}


def described(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and dtype of every array of a folder; reads no array.

    Raises:
      CheckpointError: orbax could not read the description.
    """
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(path.absolute()).item_metadata.tree
            return {name: (tuple(array.shape), np.dtype(array.dtype)) for name, array in tree.items()}
    except Exception as error:  # as above
        raise _error(f"{path} cannot be read", {"the description of its arrays": 0}, error) from error


def _restore_args(target: Target) -> ocp.RestoreArgs:
    if target.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=target.dtype)
    return ocp.ArrayRestoreArgs(sharding=target.sharding, global_shape=target.shape, dtype=target.dtype)


def _error(title: str, arrays: Mapping[str, Any], error: Exception) -> CheckpointError:
    names = list(arrays)
    listed = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    reason = " ".join(str(error).split())[:300]
    return CheckpointError(title, [f"{listed}: {type(error).__name__}: {reason}"])
