"""Far into a context a K3.1 Pro step reads the keys of the indexer, and of everything else as much as near its start."""

from dataclasses import replace

import pytest

from kimi_jax.testing.long_context import measure, small_model


@pytest.mark.slow
def test_only_the_scan_grows():
    # red when latent rows are widened, copied or masked whole (2,304 bytes a token here), or scores of single heads kept
    config = replace(small_model(top_k=64), attention=("kda", "mla"))
    short, long = (measure(config, context) for context in (1 << 12, 1 << 15))
    per_position = (long.program_bytes - short.program_bytes) / (long.context - short.context)
    assert per_position < 20  # scores: filled, read, written again and read by the sort
    assert long.scan_bytes == 128 * 4 * long.context
