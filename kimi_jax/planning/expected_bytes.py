"""What a decode step must move, and how much of each of its arguments a kernel touches: by the rules of the roofline."""

from kimi_jax.cache import MlaCache
from kimi_jax.draft.dspark import describe_context
from kimi_jax.placement.moved import Expected, Touch
from kimi_jax.planning.drafted_step import drafted_step
from kimi_jax.planning.parts import part_of
from kimi_jax.planning.record import Plan
from kimi_jax.planning.step import touched_experts


def expected_bytes(planned: Plan, drafts: int = 0) -> Expected:
    """Of a decode step at the end of the context, when the caches of latent attention are full.

    Args:
      drafts: of a speculative step; its caches are the target's and the draft's.
    """
    ask = planned.ask
    rows, tokens = ask.rows / ask.placed.parts("batch"), drafts + 1
    least = drafted_step(ask, drafts, max(ask.context - tokens, 0)).bytes
    routed = Touch(read=touched_experts(ask.config, rows * tokens) / ask.config.moe.experts)
    held = _held(planned, "cache.target" if drafts else "cache", tokens)
    if drafts:
        held |= _context_rows(planned, tokens)

    def touch(argument: str) -> Touch:
        if argument in held:
            return held[argument]
        name = argument.removeprefix("params['").removesuffix("']")
        is_routed = name != argument and part_of(name, ask.config) == "routed_experts"
        return routed if is_routed else Touch()

    return Expected(least, touch)


def _held(planned: Plan, cache: str, tokens: int) -> dict[str, Touch]:
    """Latent rows, of which an indexer chooses some, and index keys, which it reads all; a row of each token is written."""
    ask, held = planned.ask, {}
    indexer = ask.config.indexer
    chosen = 1.0 if indexer is None else min(1.0, tokens * indexer.top_k / ask.length)
    for layer, entry in enumerate(ask.cache):
        if not isinstance(entry, MlaCache):
            continue
        written = tokens * ask.placed.local_bytes(entry.latent) // ask.length
        held[f"{cache}[{layer}].latent"] = Touch(chosen, written)
        for name, spec in zip(("keys", "scales"), entry.index, strict=False):
            if spec:
                rows = tokens * ask.placed.local_bytes(spec) // ask.length
                held[f"{cache}[{layer}].index.{name}"] = Touch(updated=rows)
    return held


def _context_rows(planned: Plan, tokens: int) -> dict[str, Touch]:
    """The draft's rows of every token, read whole by a block and written for what stays."""
    ask = planned.ask
    assert ask.draft is not None
    entries = describe_context(ask.draft, ask.rows, ask.length, ask.precision)
    named = ((f"cache.context[{i}][{at}]", spec) for i, entry in enumerate(entries) for at, spec in enumerate(entry))
    return {name: Touch(updated=tokens * ask.placed.local_bytes(spec) // ask.length) for name, spec in named}
