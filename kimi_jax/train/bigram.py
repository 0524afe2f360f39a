"""The baseline of a draft: the next token from the token before alone, counted, written as a draft that every engine runs.

Its Markov table holds the counts' logarithms and its last norm is zero, so the target's head adds nothing: drafting takes the
likeliest successor again and again, or draws from the counts where there is a temperature.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from kimi_jax.draft.config import GqaSizes
from kimi_jax.draft.config_read import DraftSpec
from kimi_jax.draft.dspark import draft_parameters
from kimi_jax.precision import Precision
from kimi_jax.train.draft_begin import new_draft
from kimi_jax.train.draft_data import Sample

UNSEEN = 1e-3
"""Count of a successor that was never seen."""


def bigram_draft(target: Any, samples: Sequence[Sample], block: int = 7) -> tuple[DraftSpec, Mapping[str, np.ndarray]]:
    """The draft and its float32 parameters, from the same sequences that a trained one sees: prompts count too.

    Args:
      target: configuration of the target.
    """
    counts = Counter(pair for sample in samples for pair in pairwise(sample.ids))
    used = sorted({token for pair in counts for token in pair})
    spec = new_draft(
        target, "gqa", layers=1, block=block, markov_rank=len(used), heads=2, kv_heads=1, head_dim=2, ffn=8
    )
    spec = replace(spec, sizes=replace(spec.sizes, confidence="none"), confidence=(False, None))
    assert isinstance(spec.sizes.attention, GqaSizes)
    arrays = {
        name: np.zeros(held.shape, np.float32) for name, held in draft_parameters(spec.sizes, Precision()).items()
    }
    place = {token: number for number, token in enumerate(used)}
    first, second = (arrays[f"markov_head.markov_w{number}.weight"] for number in (1, 2))
    first[used, np.arange(len(used))] = 1
    second[:] = np.log(UNSEEN)
    for (before, after), count in counts.items():
        second[after, place[before]] = np.log(count + UNSEEN)
    return spec, arrays
