"""``kimi-jax doctor``: is this machine ready, what is missing, and what works here as it is.

Keys of the JSON form: ``platform`` (what was asked for), ``ready``, ``model``, ``layout``, ``context``, ``findings``
(each ``name``, ``state`` ok, missing or wrong, ``found``, ``todo``, ``needed``), ``works`` (commands), ``machine`` (the facts).
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_jax.cli.model_args import ArgumentError
from kimi_jax.cli.shipped_config import shipped_config

if TYPE_CHECKING:
    from kimi_jax.doctor.checks import Finding

PLATFORMS = ("auto", "cpu", "rocm")
LAYOUTS = {"cpu": "single", "rocm": "tp8"}
MODELS = {"cpu": "random-tiny", "rocm": "k3"}
DEVICES = {"cpu": "cpu", "rocm": "mi355x"}


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("doctor", help="is this machine ready, what is missing, what works here")
    parser.add_argument(
        "--platform",
        choices=PLATFORMS,
        default="auto",
        help="what shall run the model (default: rocm where an AMD GPU is)",
    )
    parser.add_argument(
        "--model", default=None, help="weights folder, there or to come, or a name (default: k3; random-tiny on cpu)"
    )
    parser.add_argument("--layout", default=None, help="layout name or file (default: tp8; single on cpu)")
    parser.add_argument("--context", type=int, default=8192, help="tokens of the sequence to hold (default: 8192)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Looks, judges, prints; 1 where something that the platform needs is missing or wrong."""
    if args.context < 1:
        raise ArgumentError("This cannot be checked", [f"--context {args.context}; it must be 1 or more"])
    from kimi_jax.doctor.machine import gather

    folder = None if args.model is None or _is_name(args.model) else Path(args.model)
    if sys.stderr.isatty():
        print("starting JAX once, to see its devices", file=sys.stderr)
    machine = gather(folder)
    platform = args.platform
    if platform == "auto":
        platform = "rocm" if machine.driver or machine.started.platform == "rocm" else "cpu"
    import jax

    jax.config.update("jax_platforms", "cpu")  # what follows is arithmetic: it must not wait for a GPU
    from kimi_jax.config import KimiConfig, load_config
    from kimi_jax.doctor.checks import Asked, examine, ready, what_works
    from kimi_jax.doctor.need import need_of
    from kimi_jax.doctor.pins import declared
    from kimi_jax.placement.device import load_device
    from kimi_jax.placement.layout import load_layout

    named = args.model or MODELS[platform]
    if folder is not None and not (folder / "config.json").is_file():
        named = "k3"  # nothing is there yet: the room is for the model that this project is for
    config = shipped_config(named)
    config = config if isinstance(config, KimiConfig) else load_config(config)
    layout = load_layout(args.layout or LAYOUTS[platform])
    need = need_of(config, layout, load_device(DEVICES[platform]), args.context)
    findings = examine(machine, Asked(platform, declared(), need, folder is not None))
    works, done = what_works(machine, findings), ready(findings)
    if args.json:
        told = {"model": need.model, "layout": need.layout.name, "context": need.context}
        listed = {"findings": [asdict(finding) for finding in findings], "works": list(works)}
        print(json.dumps({"platform": platform, "ready": done, **told, **listed, "machine": asdict(machine)}))
    else:
        for finding in findings:
            print(*_lines(finding), sep="\n")
        print(f"\n{'Ready' if done else 'Not ready'} for {need.model} on {need.layout.name}, {platform}.")
        print("Works here as it is:" if works else "Nothing works here before that is put right.")
        print(*(f"  {line}" for line in works), sep="\n")
    return 0 if done else 1


def _is_name(model: str) -> bool:
    from kimi_jax.config import SHIPPED
    from kimi_jax.testing.shipped import SHIPPED_MODELS

    return model in (*SHIPPED, *SHIPPED_MODELS)


def _lines(finding: "Finding") -> list[str]:
    note = "" if finding.needed or finding.state == "ok" else " (not needed to run)"
    lines = [f"{finding.state:8}{finding.name}: {finding.found}{note}"]
    return [*lines, f"{'':8}-> {finding.todo}"] if finding.todo else lines
