"""What a decode step must move, and how much of each of its arguments a kernel touches: by the rules of the roofline."""

from kimi_jax.cache import MlaCache
from kimi_jax.placement.moved import Expected, Touch
from kimi_jax.planning.parts import part_of
from kimi_jax.planning.record import Plan
from kimi_jax.planning.step import touched_experts


def expected_bytes(planned: Plan) -> Expected:
    """Of a decode step at the end of the context, when the latent cache is full."""
    ask = planned.ask
    at_end = next(call for call in planned.calls if (call.kind, call.context) == ("decode", ask.context - 1))
    rows = ask.rows / ask.placed.parts("batch")
    routed = Touch(read=touched_experts(ask.config, rows) / ask.config.moe.experts)
    latents = {
        f"cache[{layer}].latent": Touch(updated=ask.placed.local_bytes(entry.latent) // ask.length)
        for layer, entry in enumerate(ask.cache)
        if isinstance(entry, MlaCache)
    }

    def touch(argument: str) -> Touch:
        if argument in latents:
            return latents[argument]
        name = argument.removeprefix("params['").removesuffix("']")
        is_routed = name != argument and part_of(name, ask.config) == "routed_experts"
        return routed if is_routed else Touch()

    return Expected(at_end.bound.bytes, touch)
