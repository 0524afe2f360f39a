"""What a check found, as one JSON object and as a table.

Keys of the object: ``format`` (1), ``mode`` (``pallas``, or ``interpret``: kernels step by step on a CPU, nothing timed),
``sizes`` (of the cases), ``device``, ``cases``, ``model``, ``summary``.

``device``: ``kind``, ``platform``, ``runtime``, ``driver``, ``count``, ``memory_bytes``, ``versions`` (by package), ``file``
(the device file that is held against, null for a device without one), ``hbm_bandwidth`` (bytes/s, the file's), ``peaks`` (FLOP/s
by dtype), ``last_cache`` (bytes that copies of inputs must exceed twice), ``copy_bandwidth`` (bytes/s read and written, measured;
null where nothing was timed), ``share_of`` (``file`` or ``copy``: what shares of bandwidth are of).

``cases``, in order: ``name``, ``passed``, ``error`` (why there is nothing else; else empty), ``arrays`` (each ``array``,
``max_abs``, ``max_rel``, ``tolerance``, ``reason``, ``passed``; a null difference is not finite), ``bytes`` and ``flops`` of a
call, ``peak`` (dtype), and ``timing``, null where nothing was timed: ``seconds`` (median of a call), ``spread`` (slowest less
fastest run, over the median), ``runs``, ``calls`` (in a run), ``copies`` (of the inputs, in turn), ``cold`` (they exceed the last
cache), ``bytes_per_s``, ``bandwidth_share``, ``flop_per_s``, ``peak_share`` (null where the device's number is unknown).

``model``: ``name``, ``passed``, ``error``, ``ids``, ``reference_ids``, ``seconds``; null where it was not asked for.
``summary``: ``passed`` (everything), ``failed`` (names), ``checked``, ``seconds``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kimi_jax.placement.device import Device
from kimi_jax.testing.device_check import device as devices
from kimi_jax.testing.device_check.case import Case
from kimi_jax.testing.device_check.catalogue import MODEL
from kimi_jax.testing.device_check.sizes import SIZES

FORMAT = 1

TIMES = f" {'us':>9} {'+-%':>5} {'GB/s':>7} {'%':>5} {'TFLOP/s':>8} {'%':>5}"


def report(
    mode: str,
    size: str,
    found: Mapping[str, Any],
    copy_bandwidth: float | None,
    results: Mapping[str, Mapping[str, Any]],
    cases: Mapping[str, Case],
    model: Mapping[str, Any] | None,
    seconds: float,
) -> dict[str, Any]:
    """The JSON object."""
    known = devices.known_device(found["kind"])
    bandwidth = known.hbm_bandwidth if known else copy_bandwidth
    told = [_case(cases[name], results[name], bandwidth, known) for name in results]
    whole = [] if model is None else [{"name": MODEL, **model}]
    failed = [each["name"] for each in (*told, *whole) if not each["passed"]]
    return {
        "format": FORMAT,
        "mode": mode,
        "sizes": {"name": size, **asdict(SIZES[size])},
        "device": {
            **found,
            "file": known.name if known else None,
            "hbm_bandwidth": known.hbm_bandwidth if known else None,
            "peaks": dict(known.peaks) if known else {},
            "last_cache": devices.LAST_CACHE[known.name] if known else devices.LARGEST_CACHE,
            "copy_bandwidth": copy_bandwidth,
            "share_of": "file" if known else "copy",
        },
        "cases": told,
        "model": whole[0] if whole else None,
        "summary": {"passed": not failed, "failed": failed, "checked": len(told) + len(whole), "seconds": seconds},
    }


def _case(case: Case, result: Mapping[str, Any], bandwidth: float | None, known: Device | None) -> dict[str, Any]:
    timing = result.get("timing")
    if timing is not None:
        rate, peak = case.flops / timing["seconds"], known.peak(case.peak) if known else None
        timing = {
            **timing,
            "bytes_per_s": case.bytes / timing["seconds"],
            "bandwidth_share": case.bytes / timing["seconds"] / bandwidth if bandwidth else None,
            "flop_per_s": rate,
            "peak_share": rate / peak if peak else None,
        }
    return {
        "name": case.name,
        "passed": result.get("passed", False),
        "error": result["error"],
        "arrays": result.get("arrays", []),
        "bytes": case.bytes,
        "flops": case.flops,
        "peak": case.peak,
        "timing": timing,
    }


def table(told: Mapping[str, Any]) -> list[str]:
    """Lines for a reader."""
    device = told["device"]
    lines = [
        f"{device['kind']} ({device['platform']}, {device['runtime'].splitlines()[0]}; driver {device['driver']})",
        f"{told['mode']} kernels at {told['sizes']['name']} sizes; JAX {device['versions'].get('jax')}",
        *_bandwidths(device),
        "",
        f"{'case':36} {'parity':8} {'worst / allowed':>19}"
        + (TIMES if any(case["timing"] for case in told["cases"]) else ""),
    ]
    notes: list[str] = []
    for case in told["cases"]:
        lines.append(_row(case))
        notes += [f"{case['name']}: {note}" for note in _notes(case)]
    if told["model"] is not None:
        model = told["model"]
        lines.append(f"{model['name']:36} {_word(model)}")
        notes += [f"{model['name']}: {note}" for note in _model_notes(model)]
    if any(case["timing"] and not case["timing"]["cold"] for case in told["cases"]):
        notes.append(
            "w: inputs stay in the last cache, or arithmetic is the limit; the share of bandwidth is not of memory's"
        )
    summary = told["summary"]
    done = summary["checked"] - len(summary["failed"])
    return [
        *lines,
        *([""] if notes else []),
        *notes,
        "",
        f"{done} of {summary['checked']} passed, {summary['seconds']:.0f} s",
    ]


def _bandwidths(device: Mapping[str, Any]) -> Sequence[str]:
    if device["copy_bandwidth"] is None:
        return ()
    measured = f"measured copy {device['copy_bandwidth'] / 1e9:.0f} GB/s"
    if device["file"] is None:
        return (
            f"no device file for this kind: bandwidth % is of the {measured}, inputs are kept out of a cache of 256 MiB",
        )
    return (f"memory {device['hbm_bandwidth'] / 1e9:.0f} GB/s by {device['file']}.toml, what % is of; {measured}",)


def _row(case: Mapping[str, Any]) -> str:
    row = f"{case['name']:36} {_word(case):8} {_worst(case['arrays']):>19}"
    timing = case["timing"]
    if timing is None:
        return row
    row += f" {timing['seconds'] * 1e6:9.1f} {timing['spread'] * 100:5.0f} {timing['bytes_per_s'] / 1e9:7.0f}"
    row += f" {_percent(timing['bandwidth_share'])} {timing['flop_per_s'] / 1e12:8.2f} {_percent(timing['peak_share'])}"
    return row + ("" if timing["cold"] else " w")


def _worst(arrays: Sequence[Mapping[str, Any]]) -> str:
    """The array that is nearest to its tolerance, or furthest over it."""
    if not arrays:
        return ""

    def used(array: Mapping[str, Any]) -> float:
        if array["max_rel"] is None:
            return float("inf")
        return array["max_rel"] / array["tolerance"] if array["tolerance"] else (array["max_rel"] and float("inf"))

    worst = max(arrays, key=used)
    if worst["max_rel"] is None:
        return "not finite"
    return f"{worst['max_rel']:.1e} / {worst['tolerance']:.1e}"


def _notes(case: Mapping[str, Any]) -> list[str]:
    if case["error"]:
        return [case["error"].splitlines()[0][:300]]
    return [
        f"{array['array']} differs by {array['max_rel']} of its largest entry, {array['tolerance']} allowed ({array['reason']})"
        for array in case["arrays"]
        if not array["passed"]
    ]


def _model_notes(model: Mapping[str, Any]) -> list[str]:
    if model["error"]:
        return [model["error"]]
    return [] if model["passed"] else [f"drew {model['ids']}, the reference {model['reference_ids']}"]


def _word(result: Mapping[str, Any]) -> str:
    return "error" if result["error"] else "ok" if result["passed"] else "WRONG"


def _percent(share: float | None) -> str:
    return f"{'':5}" if share is None else f"{share * 100:5.1f}"
