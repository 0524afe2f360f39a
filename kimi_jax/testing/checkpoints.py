"""Random checkpoints in the released layout: the same seed and sizes give the same bytes."""

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax.checkpoint.names import Source, sources
from kimi_jax.checkpoint.writer import TensorSource, write_checkpoint
from kimi_jax.config import parse
from kimi_jax.layers.vision import vision_parameters
from kimi_jax.model import abstract
from kimi_jax.placement.collectives import Parallel
from kimi_jax.precision import BFLOAT16, Precision
from kimi_jax.testing.configs import preprocessor_json
from kimi_jax.testing.tokenizer import write_tiny_tokenizer

CODE_RMS = 2.93
"""Root mean square of the sixteen E2M1 values, each equally likely."""


def write_random_checkpoint(
    folder: str | Path,
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    tokenizer: bool = True,
    max_shard_bytes: int = 1 << 30,
) -> Path:
    """Writes config.json, safetensors shards with their index, and a small matching tokenizer.

    A configuration with vision gets its tower and projector too, and the file that says how pictures are prepared.

    Args:
      folder: made where missing.
      config: a config.json object, such as ``testing.configs.config_json()``.
      seed: of every tensor, together with its name.
      tokenizer: whether to write tokenizer files; needs a vocabulary that is a multiple of 8 and at least 512.
      max_shard_bytes: payload of one shard.

    Returns:
      The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parsed = parse(config)
    stored = abstract(parsed, Precision(), Parallel.single())[1] | vision_parameters(parsed, Precision())
    if tokenizer:
        write_tiny_tokenizer(folder, size=parsed.vocab)
    write_checkpoint(folder, _tensors(sources(stored), seed), max_shard_bytes=max_shard_bytes)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if parsed.vision is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor_json(), indent=1))
    return folder


def _tensors(wanted: Mapping[str, Source], seed: int) -> Iterator[tuple[str, TensorSource]]:
    for source in wanted.values():
        shape = source.shape
        if source.padded:  # the release pads A_log; the padding must never be read
            shape = (shape[0] + 8,)
        for name in source.names:
            yield name, TensorSource(source.dtype, shape, partial(random_tensor, name, shape, source, seed))


def random_tensor(name: str, shape: tuple[int, ...], source: Source, seed: int) -> np.ndarray:
    """Values of one tensor, scaled so that activations keep their size through the layers."""
    random = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
    if name.endswith("weight_packed"):
        return random.integers(0, 256, shape, np.uint8)
    if name.endswith("weight_scale"):
        exponent = round(math.log2(1 / (CODE_RMS * math.sqrt(shape[-1] * 32))))
        return (127 + exponent + random.integers(-1, 2, shape)).astype(np.uint8)
    values = _values(name, shape, random)
    if source.padded:
        values[source.shape[0] :] = 50.0
    return values.astype(BFLOAT16 if source.dtype == "BF16" else np.float32)


def _values(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    noise = random.standard_normal(shape, np.float32)
    if name.endswith(("norm.weight", "layernorm.weight", "norm0.weight", "norm1.weight")):
        return 1 + 0.1 * noise
    if name.endswith("k_norm.bias"):
        return 0.1 * noise
    if name.endswith("A_log"):
        return 0.5 * noise
    if name.endswith("dt_bias"):
        return noise - 2
    if name.endswith("e_score_correction_bias"):
        return 0.02 * noise
    if name.endswith("embed_tokens.weight"):
        return noise
    if name.endswith("conv1d.weight"):
        return 0.5 * noise
    if name.endswith("pos_emb.weight"):
        return noise
    if name.endswith("patch_embed.proj.weight"):
        return noise / math.sqrt(math.prod(shape[1:]))
    return noise / math.sqrt(shape[-1])
