"""What a decode step must move, and how much of each of its arguments a kernel touches: by the rules of the roofline."""

from kimi_jax.cache import MlaCache
from kimi_jax.placement.moved import Expected, Touch
from kimi_jax.planning.parts import part_of
from kimi_jax.planning.record import Plan
from kimi_jax.planning.step import touched_experts


def expected_bytes(planned: Plan) -> Expected:
    """Of a decode step at the end of the context, when the caches of latent attention are full."""
    ask = planned.ask
    at_end = next(call for call in planned.calls if (call.kind, call.context) == ("decode", ask.context - 1))
    rows = ask.rows / ask.placed.parts("batch")
    routed = Touch(read=touched_experts(ask.config, rows) / ask.config.moe.experts)
    held = _held(planned)

    def touch(argument: str) -> Touch:
        if argument in held:
            return held[argument]
        name = argument.removeprefix("params['").removesuffix("']")
        is_routed = name != argument and part_of(name, ask.config) == "routed_experts"
        return routed if is_routed else Touch()

    return Expected(at_end.bound.bytes, touch)


def _held(planned: Plan) -> dict[str, Touch]:
    """Latent rows, of which an indexer chooses some, and index keys, which it reads all; a row of each is written."""
    ask, held = planned.ask, {}
    indexer = ask.config.indexer
    chosen = 1.0 if indexer is None else min(1.0, indexer.top_k / ask.length)
    for layer, entry in enumerate(ask.cache):
        if not isinstance(entry, MlaCache):
            continue
        written = ask.placed.local_bytes(entry.latent) // ask.length
        held[f"cache[{layer}].latent"] = Touch(chosen, written)
        for name, spec in zip(("keys", "scales"), entry.index, strict=False):
            if spec:
                held[f"cache[{layer}].index.{name}"] = Touch(updated=ask.placed.local_bytes(spec) // ask.length)
    return held
