"""Lines that keep the numbers of a plan from being misread: units, dtypes, and what is not known."""

from collections.abc import Iterator, Sequence

from kimi_jax.planning.ask import Ask
from kimi_jax.planning.bounds import Call
from kimi_jax.planning.record import Plan
from kimi_jax.planning.vision import vision_notes
from kimi_jax.quant.fp8_policy import GROUPS

GIB = 2**30
GROUP_NAMES = {
    "attention": "all attention projections",
    "mlp": "dense and shared MLPs",
    "index_query": "indexer wq_b",
    "latent": "latent projections",
    "router": "router",
    "head": "output head",
    "index_keys": "indexer wk and weights_proj",
}
"""What the groups of an FP8 treatment are called."""


def notes(plan: Plan) -> Iterator[str]:
    """What applies to this plan."""
    ask = plan.ask
    yield from _memory(ask)
    yield from _dtypes(ask)
    yield from _placement(ask)
    yield from vision_notes(ask)
    if plan.trade is not None:
        yield str(plan.trade)
    yield from _unknown(ask, plan.calls)


def _memory(ask: Ask) -> Iterator[str]:
    capacity = ask.device.hbm_bytes
    if capacity is not None:
        yield (
            f"{ask.device.name}: {capacity:,} bytes = {capacity / GIB:.3f} GiB = {capacity / 1e9:.3f} GB; "
            f"percent and left_gib are of all of it, fits is of {ask.memory_fraction:g} of it"
        )


def _dtypes(ask: Ask) -> Iterator[str]:
    precision, mla = ask.precision, ask.config.mla
    rows, layers = mla.row_dim * precision.latent.itemsize, len(ask.config.layers_of("mla"))
    all_layers = f"{rows * layers} over {layers} layers"
    yield f"latent rows are {precision.latent.name}: {rows} bytes a token and layer, {all_layers}"
    if ask.fp8.groups:
        there = [group for group in GROUPS if ask.config.indexer is not None or not group.startswith("index")]
        narrow = [GROUP_NAMES[group] for group in there if group in ask.fp8.groups]
        kept = [GROUP_NAMES[group] for group in there if group not in ask.fp8.groups]
        yield f"FP8 with one float32 scale per output channel: {', '.join(narrow)}"
        kept += ["embedding", "Attention Residuals rows", "norms"]
        yield f"kept in {precision.operand.name}: {', '.join(kept)}"


def _placement(ask: Ask) -> Iterator[str]:
    layout, node = ask.layout, ask.device.devices
    if ask.rows != ask.batch:
        yield f"{ask.batch} sequences are planned as {ask.rows}: {layout.name} holds equal shares on its replicas"
    if ask.length != ask.context:
        yield f"{ask.context:,} tokens are planned as {ask.length:,}: {layout.name} deals a sequence to its devices in whole turns"
    if node is not None and layout.devices > node:
        yield f"{layout.devices} devices are more than the {node} of one node: links between nodes are not modelled"
    if ask.vision == "split" and layout.parts("heads") > 1:
        whole = [axis for axis in ("vision_heads", "vision_ffn") if ask.placed.parts(axis) == 1]
        if whole:
            yield f"{' and '.join(whole)} do not divide by {layout.parts('heads')} and stay whole"


def _unknown(ask: Ask, calls: Sequence[Call]) -> Iterator[str]:
    unknown = sorted({key for call in calls for key in call.bound.unknown})
    if "launch_latency" in unknown:
        launches = max(call.bound.launches for call in calls)
        yield (
            f"{ask.device.name} has no published launch latency: modelled times leave launches out; "
            f"each microsecond that one costs adds up to {launches / 1e3:.2f} ms a call"
        )
    rest = [key for key in unknown if key != "launch_latency"]
    if rest:
        yield f"unknown for {ask.device.name} and left out: {', '.join(rest)}"
