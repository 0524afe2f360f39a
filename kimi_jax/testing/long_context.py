"""Decoding of a small K3.1 Pro model far into a context, beside a short one: what grows with it, compiled and timed.

``python -m kimi_jax.testing.long_context`` fills caches of 8,192 and of 131,072 tokens with random states, without a prefill, and
decodes at their ends. Bytes are those that the instructions of the compiled program read and write, where a loop counts once:
what grows is what exists for every position at once. The scan of the keys, a loop that ends at the position, is beside it.
"""

import argparse
import json
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.cache import Cache, MlaCache
from kimi_jax.config import KimiConfig, parse
from kimi_jax.loop import RUNNING, Limits, Rows, Steps
from kimi_jax.ops.sample.api import Sampling
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.hlo import parse as read_program
from kimi_jax.placement.layout import load_layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.placement.moved import Expected, Touch, moved
from kimi_jax.precision import choose_precision
from kimi_jax.testing.configs import config_json, with_indexer

SHORT, LONG = 8_192, 131_072
"""Tokens of the two contexts."""


class Report(NamedTuple):
    """One context.

    Attributes:
      context: tokens in the cache.
      program_bytes: read and written by one compiled step, every loop inside once.
      scan_bytes: index keys read for a token.
      seconds: per token, None where nothing ran.
    """

    context: int
    program_bytes: int
    scan_bytes: int
    seconds: float | None = None


def small_model(top_k: int = 2048, limit: int = LONG) -> KimiConfig:
    """Four layers, two of which choose, with rows as wide as the released model's."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 4,
        "full_attention": (2, 4),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "max_position_embeddings": limit,
    }
    return parse(with_indexer(config_json("tiny", **sizes), index_topk=top_k, index_n_heads=8, index_head_dim=128))


def decode_steps(config: KimiConfig, context: int, dtype: str = "bfloat16") -> Steps:
    """Programs whose cache ends with this context, on one device."""
    layout = load_layout("single")
    return Steps(config, layout, make_mesh(layout), choose_precision(dtype), context, block=16)


def measure(config: KimiConfig, context: int, tokens: int = 0, seed: int = 0) -> Report:
    """Compiles decoding at the end of a context and, with ``tokens``, times it on a cache of random states."""
    steps = decode_steps(config, context)
    described = steps.describe_cache(1)
    start = context - max(tokens, 1) - 1
    rows = Rows(*(jnp.array([value], jnp.int32) for value in (5, start, max(tokens, 1) + 1, RUNNING)))
    neutral = ((0, np.float32), (1, np.float32), (0, np.int32), (0, np.uint32))
    sampling = Sampling(*(jnp.array([value], dtype) for value, dtype in neutral))
    limits = Limits(jnp.ones(config.vocab, bool), jnp.full((1, 4), -1, jnp.int32))
    given = (rows, sampling, limits, np.int32(tokens))
    decode: Any = steps.decode(random=False)
    program = decode.lower(shapes(steps.parameters), shapes(described), *given).compile()
    nothing_known = Expected(1.0, lambda _: Touch())
    accessed = round(moved(read_program(program.as_text()), nothing_known, lambda _: "step", depth=1).bytes)
    scanned = context * sum(spec.nbytes // context for entry in described for spec in index_arrays(entry))
    if not tokens:
        return Report(context, accessed, scanned)
    random = np.random.default_rng(seed)
    parameters = {name: _filled(spec, random, name) for name, spec in steps.parameters.items()}
    cache: Cache = jax.tree.map(lambda spec: _filled(spec, random), described, is_leaf=_is_spec)
    cache, rows, _ = program(parameters, cache, *given)
    # the position is the array's end now: the timed run goes over the last tokens again
    rows = rows._replace(position=jnp.array([start], jnp.int32), budget=given[0].budget, status=given[0].status)
    jax.block_until_ready(cache)
    began = time.perf_counter()
    _, rows, drawn = program(parameters, cache, rows, *given[1:])
    jax.block_until_ready(drawn)
    return Report(context, accessed, scanned, (time.perf_counter() - began) / tokens)


def index_arrays(entry: Any) -> list[ArraySpec]:
    """Descriptions of the index keys and scales of a cache entry."""
    return jax.tree.leaves(entry.index, is_leaf=_is_spec) if isinstance(entry, MlaCache) else []


def shapes(tree: Any) -> Any:
    """Descriptions as what a program is lowered with."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), tree, is_leaf=_is_spec)


def _is_spec(value: Any) -> bool:
    return isinstance(value, ArraySpec)


def _filled(spec: ArraySpec, random: np.random.Generator, name: str = "") -> jax.Array:
    """Random numbers that keep activations finite; experts' bytes are any."""
    if spec.dtype.kind in "ui":
        if name.endswith("weight_scale"):
            return jnp.full(spec.shape, 120, spec.dtype)
        return jnp.asarray(random.integers(0, 7, spec.shape).astype(spec.dtype))
    scale = spec.shape[-1] ** -0.5 if len(spec.shape) > 1 else 1.0
    return jnp.asarray((scale * random.standard_normal(spec.shape, np.float32)).astype(spec.dtype))


def main() -> None:
    """Prints one JSON object: both contexts, and what grows between them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=8, help="decoded and timed at each context (default: 8)")
    tokens = parser.parse_args().tokens
    config = small_model()
    short, long = (measure(config, context, tokens) for context in (SHORT, LONG))
    grown = long.program_bytes - short.program_bytes
    print(
        json.dumps(
            {
                "contexts": [report._asdict() for report in (short, long)],
                "grown_bytes_per_position": grown / (LONG - SHORT),
                "latent_bytes_per_position": sum(
                    entry.latent.nbytes // LONG
                    for entry in decode_steps(config, LONG).describe_cache(1)
                    if isinstance(entry, MlaCache)
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
