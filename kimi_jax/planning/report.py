"""A plan as one JSON object: keys are only ever added, bytes are whole numbers, null is unknown.

Times are milliseconds.

``config`` name; ``architecture``.
``layout``: ``name``, ``description``, ``devices``, ``mesh``, ``axes``, ``cache``.
``device``: ``name``, ``description``, ``node`` (devices in one), ``memory_bytes``, ``bandwidth_bytes_per_s``.
``options``: ``context``, ``batch``, ``rows`` (the batch in equal shares), ``dtype``, ``kv_dtype``, ``index_dtype``,
  ``experts``, ``fp8``, ``vision``, ``draft``, ``draft_place``, ``prefill_chunk``, ``memory_fraction``.
``parameters``: ``total``, ``active`` (per text token), ``active_without_head``.
``weights`` and ``state``: ``rows`` (name -> ``label``, ``arrays``, ``whole_bytes``, ``device_bytes``,
  ``padding_bytes``, ``whole_gb``, ``device_gb``; GB = 1e9 bytes, three decimals) and ``total`` (the same, and
  ``device_gib``). Vision that is not loaded counts in ``other`` and ``total`` as whole, not per device. ``state``
  also has ``device_bytes_per_token`` (of one sequence) and ``whole_bytes_per_sequence``.
``memory``, of one device: ``need_bytes``, ``need_gib``, ``capacity_bytes``, ``capacity_gib``, ``percent``,
  ``left_gib`` (of the whole capacity), ``usable_bytes`` (capacity times memory fraction), ``left_bytes`` (of the
  usable part).
``fit``: ``fits``, ``sequences`` (of this context), ``longest_context`` (tokens of each sequence of this batch that
  the memory could hold), ``tried`` (list of ``what``, ``options``, ``need_bytes``, ``fits``), ``smallest`` (the entry
  that fits, or null).
``calls``: list of ``kind`` (decode, prefill), ``rows``, ``tokens``, ``context``, ``experts_touched``, ``bytes``,
  ``flops`` (dtype -> count), ``lower_ms``, ``bound_by``, ``modelled_ms``, ``tokens_per_s``, ``collectives``,
  ``collective_ms``, ``launches``, ``launch_ms``, ``parts`` (list of ``part``, ``bytes``, ``flops``, ``launches``,
  ``spread``, ``on_chip``, ``memory_ms``, ``arithmetic_ms``, ``ms``), ``exchanges`` (list of ``part``, ``kind``,
  ``count``, ``bytes``, ``participants``, ``sent_bytes``, ``ms``), ``unknown`` (numbers that the device file lacks).
``latent_trade``: null, or what splitting latent projections, router and query latent changes in a decode step with
  nothing cached: ``bytes_saved``, ``read_ms_saved``, ``collectives_added``, ``collective_ms_added``, ``worth``.
``speculation``: null, or every length of the draft's block: ``acceptance`` (chance of each place), ``held`` (tokens of each
  sequence), ``record_bytes`` and ``recurrent_bytes`` of one device (what the longest block keeps until its verdict; states and
  windows, which are written once a step), ``launch_us`` (assumed costs of a launch where the device file knows none), ``lengths``
  (list of ``drafts``, ``verified`` (tokens of a sequence that the target looks at), ``mean_length`` (tokens that stay of a step),
  ``experts_touched``, ``bytes``, ``lower_ms``, ``bound_by``, ``modelled_ms``, ``launches``, ``collectives``, ``collective_ms``,
  ``speeds`` (tokens/s of the whole mesh, for each cost of a launch)), ``best`` (list of ``us``, ``drafts``, ``speed``).
``search``: null, or ``goal``, ``ranked`` (list of ``layout``, ``value``, ``batch``, ``device_bytes``, ``step_ms``),
  ``refused`` (list of ``layout``, ``why``), ``why`` (lines).
``notes``: lines that a reader of the numbers should know.
"""

from collections.abc import Mapping
from typing import Any

from kimi_jax.draft.config import draft_name
from kimi_jax.placement.bytes import Bytes, total
from kimi_jax.placement.roofline import Exchange, Timed
from kimi_jax.planning.ask import Ask, vision_arrays
from kimi_jax.planning.bounds import Call
from kimi_jax.planning.fit import Fit, Tried
from kimi_jax.planning.notes import notes
from kimi_jax.planning.parts import LABELS
from kimi_jax.planning.record import Plan
from kimi_jax.planning.search import Search
from kimi_jax.planning.sizes import Sizes
from kimi_jax.planning.speculation import Speculation
from kimi_jax.planning.trade import Trade

GB, GIB = 10**9, 2**30


def as_json(plan: Plan) -> dict[str, Any]:
    """The object that the module describes."""
    ask, found, parameters, fit = plan.ask, plan.sizes, plan.parameters, plan.fit
    layout, device, precision = ask.placed, ask.device, ask.precision
    return {
        "config": ask.config.name,
        "architecture": ask.config.architecture,
        "layout": {
            "name": layout.name,
            "description": layout.description,
            "devices": layout.devices,
            "mesh": dict(layout.mesh),
            "axes": {axis: list(mesh_axes) for axis, mesh_axes in layout.axes.items()},
            "cache": {axis: list(mesh_axes) for axis, mesh_axes in layout.cache.items()},
        },
        "device": {
            "name": device.name,
            "description": device.description,
            "node": device.devices,
            "memory_bytes": device.hbm_bytes,
            "bandwidth_bytes_per_s": device.hbm_bandwidth,
        },
        "options": {
            "context": ask.context,
            "batch": ask.batch,
            "rows": ask.rows,
            "dtype": precision.activation.name,
            "kv_dtype": precision.latent.name,
            "index_dtype": precision.index if ask.config.indexer else None,
            "experts": precision.experts,
            "fp8": ask.fp8.name,
            "vision": ask.vision,
            "draft": draft_name(ask.draft) if ask.draft else None,
            "draft_place": ask.draft_place,
            "prefill_chunk": ask.prefill_chunk,
            "memory_fraction": ask.memory_fraction,
        },
        "parameters": {
            "total": parameters.total,
            "active": parameters.active,
            "active_without_head": parameters.active_without_head,
        },
        "weights": _table(counted(ask, found)),
        "state": {**_table(found.state), **per_sequence(ask, found)},
        "memory": _memory(fit),
        "fit": {
            "fits": fit.fits,
            "sequences": fit.sequences,
            "longest_context": fit.longest_context,
            "tried": [_tried(each) for each in fit.tried],
            "smallest": _tried(fit.smallest) if fit.smallest else None,
        },
        "calls": [_call(call) for call in plan.calls],
        "latent_trade": _trade(plan.trade) if plan.trade else None,
        "speculation": _speculation(plan.speculation) if plan.speculation else None,
        "search": _search(plan.ranking) if plan.ranking else None,
        "notes": list(notes(plan)),
    }


def counted(ask: Ask, found: Sizes) -> Mapping[str, Bytes]:
    """The rows of the published byte table: vision that is not loaded counts as whole in ``other``, as published."""
    unloaded = {} if ask.vision != "off" else vision_arrays(ask.config, ask.precision)
    whole = sum(spec.nbytes for spec in unloaded.values())
    return {row: size + Bytes(whole=whole) if row == "other" else size for row, size in found.weights.items()}


def per_sequence(ask: Ask, found: Sizes) -> dict[str, float]:
    """What one more token and one more sequence cost."""
    by_token = ("latent", "index_keys", "draft_context")
    held = [found.state[row] for row in by_token if row in found.state]
    rows = ask.rows / ask.layout.parts("batch")
    whole = sum(size.whole for row, size in found.state.items() if row != "attn_res")
    return {
        "device_bytes_per_token": sum(size.per_device for size in held) / rows / ask.length,
        "whole_bytes_per_sequence": whole / ask.rows,
    }


def milliseconds(seconds: float | None) -> float | None:
    """Rounded to a nanosecond."""
    return None if seconds is None else round(seconds * 1e3, 6)


def _table(rows: Mapping[str, Bytes]) -> dict[str, Any]:
    sums = total(rows)
    return {
        "rows": {name: {"label": LABELS[name], **_row(size)} for name, size in rows.items()},
        "total": {**_row(sums), "device_gib": round(sums.per_device / GIB, 3)},
    }


def _row(size: Bytes) -> dict[str, Any]:
    return {
        "arrays": size.arrays,
        "whole_bytes": size.whole,
        "device_bytes": size.per_device,
        "padding_bytes": size.padding,
        "whole_gb": round(size.whole / GB, 3),
        "device_gb": round(size.per_device / GB, 3),
    }


def _memory(fit: Fit) -> dict[str, Any]:
    capacity, need = fit.capacity, fit.need
    return {
        "need_bytes": need,
        "need_gib": round(need / GIB, 3),
        "capacity_bytes": capacity,
        "capacity_gib": None if capacity is None else round(capacity / GIB, 3),
        "percent": None if capacity is None else round(100 * need / capacity, 1),
        "left_gib": None if capacity is None else round((capacity - need) / GIB, 3),
        "usable_bytes": fit.usable,
        "left_bytes": fit.left,
    }


def _tried(tried: Tried) -> dict[str, Any]:
    return {"what": tried.change.what, "options": tried.change.options, "need_bytes": tried.need, "fits": tried.fits}


def _call(call: Call) -> dict[str, Any]:
    bound = call.bound
    return {
        "kind": call.kind,
        "rows": call.rows,
        "tokens": call.tokens,
        "context": call.context,
        "experts_touched": round(call.experts, 2),
        "bytes": round(bound.bytes),
        "flops": {dtype: round(count) for dtype, count in bound.flops},
        "lower_ms": milliseconds(bound.lower),
        "bound_by": bound.by,
        "modelled_ms": milliseconds(bound.modelled),
        "tokens_per_s": None if call.tokens_per_second is None else round(call.tokens_per_second, 2),
        "collectives": bound.collectives,
        "collective_ms": milliseconds(bound.exchange_seconds),
        "launches": bound.launches,
        "launch_ms": milliseconds(bound.launch_seconds),
        "parts": [_part(part) for part in bound.parts],
        "exchanges": [_exchange(each) for each in bound.exchanges],
        "unknown": list(bound.unknown),
    }


def _part(part: Timed) -> dict[str, Any]:
    work = part.work
    return {
        "part": work.part,
        "bytes": round(work.bytes),
        "flops": {dtype: round(count) for dtype, count in work.flops},
        "launches": work.launches,
        "spread": round(work.spread, 4),
        "on_chip": work.on_chip,
        "memory_ms": milliseconds(part.memory),
        "arithmetic_ms": milliseconds(part.arithmetic),
        "ms": milliseconds(part.seconds),
    }


def _exchange(each: Exchange) -> dict[str, Any]:
    collective = each.collective
    return {
        "part": collective.part,
        "kind": collective.kind,
        "count": collective.count,
        "bytes": round(collective.bytes),
        "participants": collective.participants,
        "sent_bytes": round(collective.sent),
        "ms": milliseconds(each.seconds),
    }


def _trade(trade: Trade) -> dict[str, Any]:
    return {
        "bytes_saved": round(trade.bytes_saved),
        "read_ms_saved": milliseconds(trade.read_saved),
        "collectives_added": trade.collectives_added,
        "collective_ms_added": milliseconds(trade.exchange_added),
        "worth": trade.worth,
    }


def _speculation(found: Speculation) -> dict[str, Any]:
    costs = [round(cost * 1e6, 3) for cost in found.launch_seconds]
    best = [found.best(at) for at in range(len(costs))]
    return {
        "acceptance": list(found.acceptance),
        "held": found.context,
        "record_bytes": round(found.record_bytes),
        "recurrent_bytes": found.state_bytes,
        "launch_us": costs,
        "lengths": [
            {
                "drafts": each.drafts,
                "verified": each.drafts + 1,
                "mean_length": round(each.tokens, 4),
                "experts_touched": round(each.experts, 2),
                "bytes": round(each.bound.bytes),
                "lower_ms": milliseconds(each.bound.lower),
                "bound_by": each.bound.by,
                "modelled_ms": milliseconds(each.bound.modelled),
                "launches": each.bound.launches,
                "collectives": each.bound.collectives,
                "collective_ms": milliseconds(each.bound.exchange_seconds),
                "speeds": [None if speed is None else round(speed, 2) for speed in each.speeds],
            }
            for each in found.lengths
        ],
        "best": [
            {"us": cost, "drafts": each and each.drafts, "speed": each and round(each.speeds[at] or 0.0, 2)}
            for at, (cost, each) in enumerate(zip(costs, best, strict=True))
        ],
    }


def _search(ranking: Search) -> dict[str, Any]:
    return {
        "goal": ranking.goal,
        "ranked": [
            {
                "layout": each.layout,
                "value": each.value,
                "batch": each.batch,
                "device_bytes": each.device_bytes,
                "step_ms": milliseconds(each.call.bound.modelled),
            }
            for each in ranking.ranked
        ],
        "refused": [{"layout": name, "why": why} for name, why in ranking.refused],
        "why": list(ranking.why),
    }
