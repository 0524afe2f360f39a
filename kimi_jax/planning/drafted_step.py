"""One speculative step as parts: the target's look at a block, the fold of what stays, and the draft's own work."""

from dataclasses import replace

from kimi_jax.draft.config import DraftConfig, GqaSizes
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.layout import Layout
from kimi_jax.placement.roofline import Collective, Work, product_flops
from kimi_jax.planning.ask import Arrays, Ask
from kimi_jax.planning.parts import DRAFT
from kimi_jax.planning.step import Step, step
from kimi_jax.precision import FLOAT32, Precision

LAYER_LAUNCHES = {"gqa": 12, "mla": 14}
"""Kernels of a draft's layer beside its products, if nothing is fused: norms, rotations, writes, attention, gate, sums."""

PLACE_LAUNCHES = 4
"""Of one drafted place: a row of the first Markov table, the product with the second, sum and choice."""


def drafted_step(ask: Ask, drafts: int, context: int) -> Step:
    """A step of ``drafts`` drafts and their anchor, ``context`` tokens being held of each sequence; 0 is a plain decode step.

    Args:
      ask: must name a draft where there are any.
    """
    tokens = drafts + 1
    whole = step(
        ask.config, ask.placed, ask.weights, ask.cache, ask.precision,
        rows=ask.rows, tokens=tokens, context=context, held=drafts > 0,
    )  # fmt: skip
    if not drafts:
        return whole
    assert ask.draft is not None
    rows = ask.rows / ask.placed.parts("batch")
    own = Call(ask.draft, ask.placed, ask.precision, rows, drafts, context)
    head = sum(ask.placed.local_bytes(ask.weights[name]) for name in ask.weights if name.startswith("lm_head."))
    again = Work("head", head, tuple(_head_flops(ask, rows * drafts)), launches=1)
    work = (*whole.work, again, own.weights(ask.weights), own.rows_read(ask))
    merged = [_sum(part, [each for each in work if each.part == part]) for part in dict.fromkeys(w.part for w in work)]
    return replace(whole, work=tuple(merged), collectives=(*whole.collectives, *own.collectives()))


class Call:
    """The draft's part of a step on one device: one pass over a block, its Markov chain, and the rows of what stays."""

    def __init__(
        self, draft: DraftConfig, layout: Layout, precision: Precision, rows: float, drafts: int, context: int
    ) -> None:
        self.draft, self.layout, self.precision = draft, layout, precision
        self.sequences, self.drafts, self.context = rows, drafts, context
        self.gqa = isinstance(draft.attention, GqaSizes)

    def weights(self, arrays: Arrays) -> Work:
        """Every parameter once; what makes context rows twice, in the block and at the commit; a Markov product for every place."""
        size, flops, launches = 0.0, 0.0, self.draft.layers * LAYER_LAUNCHES["gqa" if self.gqa else "mla"]
        launches += self.drafts * PLACE_LAUNCHES + 2
        block, stays = self.sequences * self.drafts, self.sequences * (self.drafts + 1)
        for name, spec in arrays.items():
            if not name.startswith(DRAFT):
                continue
            held, matrix = self.layout.local_bytes(spec), len(spec.shape) == 2
            if "markov_w1" in name:
                size += block * held / spec.shape[0]
                continue
            fused = name.startswith((f"{DRAFT}context_proj", f"{DRAFT}fc"))
            rows_of = any(each in name for each in (".k_proj", ".v_proj", ".kv_a_proj"))
            times = self.drafts if "markov_w2" in name else 2 if rows_of else 1
            inputs = self.sequences * self.drafts if "markov_w2" in name else stays if fused else block
            size += times * held
            if matrix:
                flops += product_flops(spec, self.layout, inputs + (stays if rows_of else 0))[1]
                launches += times
        return Work("draft", size, (("bf16", flops),), launches)

    def rows_read(self, ask: Ask) -> Work:
        """Context rows of every layer read once and those of the block's tokens written."""
        held = sum(self.layout.local_bytes(spec) for spec in ask.state["draft_context"]) / self.sequences / ask.length
        attention = self.draft.attention
        width = attention.head_dim if isinstance(attention, GqaSizes) else attention.kv_rank + attention.rope_dim
        heads = attention.heads / self.layout.parts("draft_heads")
        pairs = self.sequences * self.drafts * (self.context + self.drafts)
        flops = self.draft.layers * pairs * heads * 2 * 2 * width
        size = self.sequences * (self.context + self.drafts + 1) * held
        return Work("draft_context", size, (("bf16", flops),))

    def collectives(self) -> list[Collective]:
        """Embedding of the block, two sums a layer, its scores and the ids that may be drawn."""
        parallel = Parallel.of(self.layout)
        hidden = self.sequences * self.drafts * self.draft.hidden * self.precision.activation.itemsize
        scores = self.sequences * self.drafts * self.draft.vocab * FLOAT32.itemsize
        found = [
            Collective("draft embedding", "all-reduce", 1, hidden, parallel.size("vocab")),
            Collective("draft attention", "all-reduce", self.draft.layers, hidden, parallel.size("draft_heads")),
            Collective("draft MLP", "all-reduce", self.draft.layers, hidden, parallel.size("draft_ffn")),
            Collective("draft scores", "all-gather", 1, scores, parallel.size("vocab")),
            Collective("ids that may be drafted", "all-gather", 1, self.draft.vocab, parallel.size("vocab")),
        ]
        return [each for each in found if each.participants > 1]


def _head_flops(ask: Ask, inputs: float) -> list[tuple[str, float]]:
    named = [spec for name, spec in ask.weights.items() if name.startswith("lm_head.") and len(spec.shape) == 2]
    return [product_flops(spec, ask.placed, inputs) for spec in named]


def _sum(part: str, works: list[Work]) -> Work:
    flops: dict[str, float] = {}
    for dtype, count in (pair for work in works for pair in work.flops):
        flops[dtype] = flops.get(dtype, 0.0) + count
    size, launches = sum(work.bytes for work in works), sum(work.launches for work in works)
    return replace(works[0], part=part, bytes=size, flops=tuple(flops.items()), launches=launches)
