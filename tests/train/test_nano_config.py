"""The sizes of kimi-nano: what ships must be small, and every shipped layout must divide it."""

from pathlib import Path

import kimi_jax
from kimi_jax.config import load_config
from kimi_jax.layers.vision import vision_parameters
from kimi_jax.model import abstract
from kimi_jax.placement.bytes import bytes_of
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.files import shipped_names
from kimi_jax.placement.layout import load_layout
from kimi_jax.precision import Precision
from kimi_jax.train.optimiser import kind_of

CONFIG = Path(kimi_jax.__file__).parent / "configs" / "kimi-nano.json"


def test_nano_is_small_whole_in_every_layout_and_all_of_it_has_an_optimiser():
    # red when a size stops dividing by eight, a matrix is added that the optimiser's table does not name, or sizes grow
    config = load_config(CONFIG)
    text = abstract(config, Precision(), Parallel.single())[1]
    held = text | vision_parameters(config, Precision())
    assert sum(spec.nbytes for spec in held.values()) < 12_000_000
    assert config.moe.experts >= 32 and config.indexer is not None and config.indexer.top_k == 64
    for name in shipped_names("layouts"):
        layout = load_layout(name)
        assert sum(bytes_of(spec, layout).padding for spec in held.values()) == 0, name
    masters = abstract(config, Precision(experts="masters"), Parallel.single())[1]
    assert {kind_of(name) for name in masters if not name.endswith("e_score_correction_bias")} == {
        "muon by head",
        "muon",
        "adamw",
    }
