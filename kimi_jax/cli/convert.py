"""``kimi-jax convert``: a released checkpoint into an orbax folder that any layout opens, or back."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from kimi_jax.cli.model_args import ArgumentError, prepare_devices


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser(
        "convert",
        help="turn a released checkpoint into an orbax folder, or back",
        description="A folder in Hugging Face layout becomes an orbax folder; an orbax folder becomes what it was.",
    )
    parser.add_argument("source", metavar="SRC", help="checkpoint folder or shipped name")
    parser.add_argument("destination", metavar="DST", help="folder to make; it must not exist")
    parser.add_argument(
        "--layout", default=None, help="devices that share the work (default: single); any reads the result"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Converts and says what was written."""
    from kimi_jax.placement.layout import load_layout

    layout = load_layout(args.layout or "single")
    prepare_devices(layout)
    from kimi_jax.checkpoint.convert import convert
    from kimi_jax.checkpoint.converted import is_converted
    from kimi_jax.checkpoint.export import export
    from kimi_jax.cli.progress import LoadProgress
    from kimi_jax.config import load_config
    from kimi_jax.model import abstract
    from kimi_jax.placement.collectives import Parallel
    from kimi_jax.placement.mesh import make_mesh
    from kimi_jax.precision import Precision
    from kimi_jax.testing.shipped import shipped_model

    source, destination = shipped_model(args.source) or Path(args.source), Path(args.destination)
    if source.resolve() in destination.resolve().parents:
        raise ArgumentError(
            "This checkpoint cannot be converted", [f"{destination} lies inside {source}"], "Give another place."
        )
    back = is_converted(source)
    if back and args.layout is not None:
        raise ArgumentError(
            "This layout has no use", [f"{source} is converted; the way back uses no devices"], "Leave it out."
        )
    config = load_config(source)
    stored = abstract(config, Precision(), Parallel.single())[1]
    began = time.perf_counter()
    with LoadProgress("converting") as progress:
        if back:
            written = export(source, destination, stored, tied_head=config.tied_head, progress=progress)
        else:
            mesh = make_mesh(layout)
            written = convert(source, destination, stored, layout, mesh, tied_head=config.tied_head, progress=progress)
    seconds = time.perf_counter() - began
    form = "released" if back else "orbax"
    if args.json:
        report = {"source": str(source), "destination": str(destination), "form": form, **written._asdict()}
        print(json.dumps({**report, "seconds": round(seconds, 3)}))
    else:
        kind = "tensors" if back else "arrays"
        print(f"{destination}: {form} checkpoint, {written.arrays} {kind}, {written.bytes:,} bytes in {seconds:.1f} s")
    return 0
