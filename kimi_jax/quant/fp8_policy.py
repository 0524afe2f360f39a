"""Which projections become FP8 when a model is loaded: one declaration for the planner, the loader and the steps.

Published treatment ("ptpc": per-token activation scale, per-output-channel weight scale, K3.1 Pro notes section 9):
attention projections, the dense and the shared MLPs, and the indexer's query projection. Everything else keeps what the
checkpoint holds: routed experts MXFP4; embedding, head, latent projections, router, indexer keys and weights, Attention
Residuals rows, norms, convolutions and vision bfloat16 or float32.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kimi_jax.problems import ProblemsError

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "attention": (
            r"self_attn\.(q|k|v|g|o|b|f_a|f_b)_proj\.weight"  # KDA
            r"|self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)\.weight"  # MLA, which shares g and o
        ),
        "mlp": r"(mlp|shared_experts)\.(gate|up|down)_proj\.weight",
        "index_query": r"indexer\.wq_b\.weight",
        "latent": r"routed_expert_(down|up)_proj\.weight",
        "router": r"block_sparse_moe\.gate\.weight",
        "head": r"lm_head\.weight",
        "index_keys": r"indexer\.(wk|weights_proj)\.weight",
    }
)
"""Group -> the parameters it holds, by the end of their dotted path."""

PTPC = ("attention", "mlp", "index_query")
"""The published treatment."""

FNUZ = ("gfx940", "gfx941", "gfx942")
"""Compiler targets whose matrix units read another form, e4m3fnuz (largest value 240, byte 0x80 is NaN); the two must never be
mixed."""


class Fp8Error(ProblemsError):
    """A treatment that is not known."""


@dataclass(frozen=True)
class Fp8Policy:
    """The groups of projections that are held in FP8."""

    groups: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As :func:`fp8_policy` reads it."""
        extra = [group for group in self.groups if group not in PTPC]
        base = "ptpc" if set(PTPC) <= set(self.groups) else ""
        named = extra if base else list(self.groups)
        return "+".join(filter(None, [base, *named])) or "none"

    def covers(self, parameter: str) -> bool:
        """Whether a parameter is held in FP8, by its dotted path."""
        return any(re.search(rf"(^|\.)({GROUPS[group]})$", parameter) for group in self.groups)


def fp8_policy(text: str | Fp8Policy | None) -> Fp8Policy:
    """A treatment by name: ``none``, ``ptpc``, or groups joined by ``+`` such as ``ptpc+latent+router+head``.

    Raises:
      Fp8Error: lists every name that is not known.
    """
    if isinstance(text, Fp8Policy):
        return text
    words = [] if text in (None, "none") else str(text).split("+")
    unknown = [f"{word!r} is no group" for word in words if word != "ptpc" and word not in GROUPS]
    if unknown:
        raise Fp8Error(
            f"No FP8 treatment {text!r}", unknown, f"Known: none, ptpc, {', '.join(GROUPS)}; join them with +."
        )
    chosen = {group for word in words for group in (PTPC if word == "ptpc" else (word,))}
    return Fp8Policy(tuple(group for group in GROUPS if group in chosen))


def form_problems(policy: Fp8Policy, target: str, device: str) -> list[str]:
    """Why a device cannot multiply what a treatment makes; empty where it can.

    Args:
      target: the device's compiler target ("gfx950"), or what its driver calls it ("gfx942:sramecc+:xnack-").
      device: its name, for the message.
    """
    if not policy.groups or target.split(":")[0] not in FNUZ:
        return []
    return [
        f"fp8 {policy.name!r} on {device}: {target} multiplies FP8 in the form e4m3fnuz, and only e4m3fn is built; what works: "
        "fp8 'none' there, or a device that reads e4m3fn such as mi355x"
    ]
