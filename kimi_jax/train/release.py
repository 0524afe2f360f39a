"""A trained model as a checkpoint in the released layout: config.json, safetensors and the files beside them.

Routed experts are encoded as MXFP4, the rest is stored with the released dtypes. The forward pass of training ran on these values
(``train/qat``), so nothing changes.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array

from kimi_jax.checkpoint.names import Source, sources
from kimi_jax.checkpoint.whole import copy_side_files, whole_folder
from kimi_jax.checkpoint.writer import TensorSource, write_checkpoint
from kimi_jax.config import KimiConfig
from kimi_jax.model import abstract
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import BFLOAT16, Precision
from kimi_jax.quant import mxfp4
from kimi_jax.train.state import TrainState

VISION_KEY = "vision_config"


def release(
    destination: Path, state: TrainState, config: KimiConfig, values: Mapping[str, Any], beside: Path | None = None
) -> Path:
    """Writes a checkpoint that ``kimi_jax.load`` reads; it appears whole or not at all.

    A vision tower is not trained here, so the written configuration has none.

    Args:
      destination: must not exist.
      state: of the run.
      config: what ``values`` says.
      values: the config.json object.
      beside: a folder whose tokenizer and other side files are copied.

    Raises:
      CheckpointError: the destination exists or cannot be written.
    """
    stored = abstract(config, Precision(), Parallel.single())[1]
    masters = {**state.params, **state.extra}
    with whole_folder(destination) as new:
        write_checkpoint(new, _tensors(sources(stored), masters))
        if beside is not None:
            copy_side_files(beside, new)
        text = {key: value for key, value in values.items() if key != VISION_KEY}
        (new / "config.json").write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    return destination


def _tensors(wanted: Mapping[str, Source], masters: Mapping[str, Array]) -> Iterator[tuple[str, TensorSource]]:
    encoded = _Encoded(masters)
    for name, source in wanted.items():
        for row, tensor in enumerate(source.names):
            make = partial(encoded.part, name, row if source.stacked else None, source.dtype)
            yield tensor, TensorSource(source.dtype, source.shape, make)


class _Encoded:
    """Parameters as they are stored; the last encoded matrix of experts is kept, as its rows are asked for one by one."""

    def __init__(self, masters: Mapping[str, Array]) -> None:
        self._masters = masters
        self._last: tuple[str, tuple[np.ndarray, np.ndarray]] | None = None

    def part(self, name: str, row: int | None, dtype: str) -> np.ndarray:
        if row is None:
            whole = np.asarray(self._masters[name])
            return whole.astype(BFLOAT16 if dtype == "BF16" else np.float32)
        master, kind = name.rsplit("_", 1)
        if self._last is None or self._last[0] != master:
            packed, scale = mxfp4.encode(self._masters[master])
            self._last = master, (np.asarray(packed), np.asarray(scale))
        return self._last[1][kind == "scale"][row]
