"""The rotary positions of a draft's config.json, in the spellings of the stacks that write one (DSpark notes, sections 3 and 6)."""

from collections.abc import Mapping
from typing import Any

from kimi_jax.config_section import Section, shown
from kimi_jax.draft.rope import RopeConfig, YarnConfig

KEYS = ("rope_theta", "rope_parameters", "rope_scaling")
"""Keys of config.json that this module reads."""

_PLAIN, _YARN = ("default", "none"), ("yarn", "deepseek_yarn")
_INSIDE = (
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "attention_factor", "truncate"),
)
_LARGEST = 1e9


def read_rope(values: Mapping[str, Any], problems: list[str]) -> RopeConfig:
    """The rotary positions that a configuration names; what is wrong with them goes to ``problems``."""
    top = Section(values, "", problems)
    named = [section for key in KEYS[1:] if (section := top.section(key)) is not None]
    if len(named) == 2 and named[0].values != named[1].values:
        top.complain("rope_scaling", f"= {shown(named[1].values)}, but rope_parameters says {shown(named[0].values)}")
    inside = named[0] if named else Section({}, "rope_parameters.", problems)
    theta = _theta(top, inside)
    kind = inside.values.get("rope_type", inside.values.get("type", "default"))
    inside.refuse_unknown(_INSIDE)
    if kind in _PLAIN:
        return RopeConfig(theta)
    if kind not in _YARN:
        inside.complain("rope_type", f"= {shown(kind)}; only default and yarn are built")
        return RopeConfig(theta)
    original = inside.integer("original_max_position_embeddings")
    low, high = inside.number("beta_slow", 1e-3, _LARGEST, 1.0), inside.number("beta_fast", 1e-3, _LARGEST, 32.0)
    factor = inside.number("factor", 1, _LARGEST)
    truncate = inside.boolean("truncate", True)
    optional = {key: _optional(inside, key) for key in ("mscale", "mscale_all_dim", "attention_factor")}
    return RopeConfig(theta, YarnConfig(factor, original, high, low, truncate, **optional))


def _theta(top: Section, inside: Section) -> float:
    given = [section for section in (top, inside) if "rope_theta" in section.values]
    if len(given) == 2 and top.values["rope_theta"] != inside.values["rope_theta"]:
        inside.complain(
            "rope_theta", f"= {shown(inside.values['rope_theta'])}, but beside it {shown(top.values['rope_theta'])}"
        )
    return (given or [top])[-1].number("rope_theta", 2, 1e12)


def _optional(inside: Section, key: str) -> float | None:
    return None if inside.values.get(key) is None else inside.number(key, 0, _LARGEST)
