"""The OpenAI-compatible server as a script to copy: load a checkpoint onto a mesh, compile, serve until SIGTERM.

python scripts/serve.py FOLDER --layout tp8
"""

import argparse

import jax


def main() -> None:
    """Everything the server needs; `kimi-jax serve` adds flags, checks and sizes that fit the memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="random-tiny")
    parser.add_argument("--layout", default="single")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()

    import kimi_jax
    from kimi_jax.engine.budget import engine_limits
    from kimi_jax.engine.engine import Engine
    from kimi_jax.placement.layout import load_layout
    from kimi_jax.serve.limits import Limits
    from kimi_jax.serve.model import served
    from kimi_jax.serve.run import Server, bind, serve

    layout = load_layout(args.layout)
    if jax.config.jax_platforms in (None, "", "cpu"):
        jax.config.update("jax_num_cpu_devices", layout.devices)  # fake devices; no effect on accelerators

    model = kimi_jax.load(args.model, layout=layout)
    engine = Engine.build(
        model.runner.steps, model.runner.params, model.runner.allowed, engine_limits(model.runner.steps)
    )
    what = served(model, engine, [args.model])
    serve(Server(what, engine, Limits()), bind("127.0.0.1", args.port))


if __name__ == "__main__":
    main()
