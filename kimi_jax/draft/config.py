"""Sizes of the DSpark draft models that have been published (draft notes, sections 2 and 4)."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from kimi_jax.problems import ProblemsError


class DraftError(ProblemsError):
    """A draft that is not known."""


@dataclass(frozen=True)
class GqaSizes:
    """Grouped-query attention of a draft."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class MlaSizes:
    """Latent attention of a draft; unlike the target's, part of each key is rotated and no output gate follows."""

    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class DraftConfig:
    """One draft model.

    Attributes:
      target: shipped name of the model it was trained for.
      attention: which backbone.
      taps: hidden vectors of the target that it reads per token.
      block: tokens it drafts in one step.
      sees: whether a drafted position sees the whole block or only what is before it.
      eps: of every norm, also those of the latents.
      confidence: whether there is a confidence head, and whether it also reads the token before.
    """

    target: str
    attention: GqaSizes | MlaSizes
    markov_rank: int
    hidden: int = 7168
    vocab: int = 163840
    layers: int = 5
    ffn: int = 14336
    taps: int = 5
    block: int = 7
    sees: Literal["block", "past"] = "block"
    eps: float = 1e-5
    confidence: Literal["none", "hidden", "hidden and token"] = "hidden and token"


PUBLISHED: Mapping[str, DraftConfig] = MappingProxyType(
    {
        "k3-mla": DraftConfig("k3", MlaSizes(64, 1536, 512, 128, 64, 128), markov_rank=256),
        "k3.1-gqa": DraftConfig("k3.1-pro", GqaSizes(64, 16, 64), markov_rank=256),
        "k3.1-mla": DraftConfig("k3.1-pro", MlaSizes(96, 1536, 512, 128, 64, 128), markov_rank=512, sees="past"),
    }
)
"""``k3-mla``: lightseekorg's for Kimi-K3. For K3.1 Pro: ``k3.1-gqa`` is LithosAI's, ``k3.1-mla`` Inferact's preview."""


def published_draft(name: str) -> DraftConfig:
    """A published draft by its name here.

    Raises:
      DraftError: there is none of that name.
    """
    if name not in PUBLISHED:
        raise DraftError(f'No draft is called "{name}"', [f"known: {', '.join(PUBLISHED)}"])
    return PUBLISHED[name]


def draft_name(config: DraftConfig) -> str:
    """The name under which a draft is published here, or that it is another."""
    return next((name for name, known in PUBLISHED.items() if known == config), "another")
