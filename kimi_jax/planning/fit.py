"""Does it fit: what is left on a device, how much more it would hold, or the smallest change that makes it fit.

Changes are tried with the planner itself, in a stated order: those that alter least first, singly, then in pairs, and
so on.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from kimi_jax.placement.axes import AXES
from kimi_jax.placement.files import shipped_names
from kimi_jax.placement.layout import Layout, LayoutError, load_layout, validate
from kimi_jax.planning.ask import Ask, changed
from kimi_jax.planning.sizes import Sizes, sizes
from kimi_jax.precision import LATENTS
from kimi_jax.quant.fp8_policy import form_problems, fp8_policy

SMALL_CHUNK = 2048
LEAN_AXES = ("latent", "router_expert", "q_lora")
LARGEST_MESH = 64


@dataclass(frozen=True)
class Change:
    """One way to ask for less.

    Attributes:
      what: in words.
      options: command-line options that ask for it.
      ask: the changed ask.
    """

    what: str
    options: str
    ask: Ask


@dataclass(frozen=True)
class Tried:
    """A change and what it leads to; bytes are of one device."""

    change: Change
    need: int
    fits: bool


@dataclass(frozen=True)
class Fit:
    """The answer. Bytes are of one device; everything is None where the device's memory is unknown.

    Attributes:
      fits: whether need is at most usable.
      need: weights and running state.
      capacity: memory of the device file.
      usable: the share of it that the ask lets arrays take.
      left: usable less need; negative where it does not fit.
      sequences: of this context that fit at once.
      longest_context: tokens that each sequence of this batch could hold in the memory, whatever the model's own limit.
      tried: changes in the order in which they were tried; empty where it fits.
      smallest: the first that fits, None where none does.
    """

    fits: bool | None
    need: int
    capacity: int | None
    usable: int | None
    left: int | None
    sequences: int | None
    longest_context: int | None
    tried: tuple[Tried, ...] = ()
    smallest: Tried | None = None


def fit(ask: Ask, found: Sizes) -> Fit:
    """The answer for an ask whose sizes are known."""
    capacity = ask.device.hbm_bytes
    if capacity is None:
        return Fit(None, found.device_bytes, None, None, None, None, None)
    usable = usable_bytes(ask)
    assert usable is not None
    left = usable - found.device_bytes
    answer = Fit(left >= 0, found.device_bytes, capacity, usable, left, sequences_that_fit(ask), longest_context(ask))
    return answer if left >= 0 else _with_changes(answer, ask, usable)


def usable_bytes(ask: Ask) -> int | None:
    """Bytes of one device that arrays may take; None where its memory is unknown."""
    return None if ask.device.hbm_bytes is None else math.floor(ask.device.hbm_bytes * ask.memory_fraction)


def sequences_that_fit(ask: Ask) -> int | None:
    """How many sequences of the ask's context fit beside the weights, over the whole mesh."""
    usable, replicas = usable_bytes(ask), ask.layout.parts("batch")
    if usable is None:
        return None
    one = sizes(changed(ask, batch=replicas))
    per_row = one.cache_bytes
    free = usable - one.device_bytes + per_row
    return max(free // per_row, 0) * replicas


def longest_context(ask: Ask) -> int | None:
    """The most tokens that each sequence of the ask's batch could hold; 0 where not even one fits."""
    usable = usable_bytes(ask)
    if usable is None:
        return None

    def fits(context: int) -> bool:
        return sizes(changed(ask, context=context)).device_bytes <= usable

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < 1 << 40 and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _with_changes(answer: Fit, ask: Ask, usable: int) -> Fit:
    """Tries changes until one fits."""
    tried: list[Tried] = []
    for change in _changes(ask, answer):
        need = sizes(change.ask).device_bytes
        tried.append(Tried(change, need, need <= usable))
        if need <= usable:
            return replace(answer, tried=tuple(tried), smallest=tried[-1])
    return replace(answer, tried=tuple(tried))


def _changes(ask: Ask, answer: Fit) -> Iterator[Change]:
    """What keeps the request, singly and together; larger layouts; fewer tokens or sequences; more devices."""
    usable = [make for make in _KEEPING if make(ask) is not None]
    for count in range(1, len(usable) + 1):
        for chosen in combinations(usable, count):
            together = _together(ask, chosen)
            if together is not None:
                yield together
    for name in shipped_names("layouts"):
        larger = changed(ask, layout=load_layout(name))
        if larger.layout.devices > ask.layout.devices and fits_arrays(larger):
            yield Change(f"{larger.layout.devices} devices", f"--layout {name}", larger)
    if answer.longest_context:
        context = min(answer.longest_context, ask.config.max_positions)
        yield Change("fewer tokens per sequence", f"--context {context}", changed(ask, context=context))
    if answer.sequences:
        batch = answer.sequences
        yield Change("fewer sequences", f"--batch {batch}", changed(ask, batch=batch))
    yield from _more_devices(ask)


def _together(ask: Ask, chosen: tuple[Callable[[Ask], Change | None], ...]) -> Change | None:
    """Several changes, one after the other; None where one leaves nothing for another to do."""
    what, options, layout = [], {}, ask.layout
    for make in chosen:
        change = make(ask)
        if change is None:
            return None
        ask = change.ask
        what.append(change.what)
        options[change.options.split()[0]] = change.options
    if ask.layout != layout:
        options["--layout"] = _layout_option(ask.layout, layout)
    return Change(", ".join(what), " ".join(options.values()), ask)


def _narrow_latent(ask: Ask) -> Change | None:
    if ask.precision.exact or ask.precision.latent == LATENTS["fp8"]:
        return None
    narrow = replace(ask.precision, latent=LATENTS["fp8"])
    return Change("one-byte latent rows", "--kv-dtype fp8", changed(ask, precision=narrow))


def _narrow_index(ask: Ask) -> Change | None:
    if ask.config.indexer is None or ask.precision.exact or ask.precision.index == "mxfp4":
        return None
    form = "fp8" if ask.precision.index == "bfloat16" else "mxfp4"
    narrow = replace(ask.precision, index=form)
    return Change(f"{form} index keys", f"--index-dtype {form}", changed(ask, precision=narrow))


def _small_chunk(ask: Ask) -> Change | None:
    if ask.chunk <= SMALL_CHUNK:
        return None
    smaller = changed(ask, prefill_chunk=SMALL_CHUNK)
    return Change(f"prefill chunks of {SMALL_CHUNK} tokens", f"--prefill-chunk {SMALL_CHUNK}", smaller)


def _lean(ask: Ask) -> Change | None:
    missing = [axis for axis in LEAN_AXES if ask.layout.parts(axis) == 1]
    return _mapped(ask, missing, "latent projections, router and query latent split")


def _split_sequence(ask: Ask) -> Change | None:
    missing = ["sequence"] if ask.layout.parts("sequence") == 1 else []
    return _mapped(ask, missing, "cached rows split by position (decode context parallelism)")


def _fp8_weights(ask: Ask) -> Change | None:
    policy = fp8_policy("ptpc")
    if ask.fp8.groups or ask.precision.exact or form_problems(policy, ask.device.target, ask.device.name):
        return None
    return Change("FP8 projections", "--fp8 ptpc", changed(ask, fp8=policy))


_KEEPING = (_narrow_latent, _narrow_index, _small_chunk, _lean, _split_sequence, _fp8_weights)
"""Changes that keep context and batch, those that alter least first."""


def _mapped(ask: Ask, names: Sequence[str], what: str) -> Change | None:
    """The named axes over the mesh axes that share the heads, where the arrays allow it."""
    if not names or ask.layout.parts("heads") == 1:
        return None
    better = changed(ask, layout=split_over_heads(ask.layout, names))
    return Change(what, _layout_option(better.layout, ask.layout), better) if fits_arrays(better) else None


def split_over_heads(layout: Layout, names: Sequence[str]) -> Layout:
    """A layout with some more named axes over the mesh axes that share the heads."""
    heads = layout.mesh_axes("heads")
    axes, cache = dict(layout.axes), dict(layout.cache)
    for name in names:
        (cache if AXES[name].owner == "cache" else axes)[name] = heads
    return replace(layout, name=f"{layout.name}+{'+'.join(names)}", description="", axes=axes, cache=cache)


def _layout_option(layout: Layout, base: Layout) -> str:
    """The shipped layout that places everything alike, or what to add to a copy of the one it was made from."""
    for name in shipped_names("layouts"):
        other = load_layout(name)
        if replace(other, name=layout.name, description=layout.description) == layout:
            return f"--layout {name}"
    added = {**layout.axes, **layout.cache}.items() - {**base.axes, **base.cache}.items()
    lines = ", ".join(f"{axis} = {list(mesh_axes)}" for axis, mesh_axes in sorted(added))
    return f"--layout FILE (a copy of {base.name} with {lines})"


def fits_arrays(ask: Ask) -> bool:
    """Whether the layout of an ask can cut every array of it."""
    try:
        validate(ask.placed, ask.arrays)
    except LayoutError:
        return False
    return True


def _more_devices(ask: Ask) -> Iterator[Change]:
    """The mesh axis that shares the heads at every larger size that the arrays allow, smallest first."""
    layout, heads = ask.layout, ask.layout.mesh_axes("heads")
    axis = heads[0] if heads else next(iter(layout.mesh))
    for size in range(layout.mesh[axis] + 1, LARGEST_MESH + 1):
        mesh = {**layout.mesh, axis: size}
        larger = replace(layout, name=f"{layout.name} with {axis} = {size}", description="", mesh=mesh)
        more = changed(ask, layout=larger)
        if heads and fits_arrays(more):
            option = f"--layout FILE (a copy of {layout.name} with {axis} = {size})"
            yield Change(f"{larger.devices} devices", option, more)
