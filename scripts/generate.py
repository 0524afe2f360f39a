"""A jitted inference script to copy: load a checkpoint onto a mesh, continue a prompt, print as it comes.

python scripts/generate.py FOLDER "Hello" --layout tp8
"""

import argparse

import jax


def main() -> None:
    """Everything the script does; the same calls work on one CPU device, on fake devices and on a real mesh."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="random-tiny")
    parser.add_argument("prompt", nargs="?", default="Hello")
    parser.add_argument("--layout", default="single")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    import kimi_jax
    from kimi_jax.placement.layout import load_layout

    layout = load_layout(args.layout)
    if jax.config.jax_platforms in (None, "", "cpu"):
        jax.config.update("jax_num_cpu_devices", layout.devices)  # fake devices; no effect on accelerators

    model = kimi_jax.load(args.model, layout=layout)
    for piece in model.stream(args.prompt, args.max_tokens):
        print(piece.reasoning + piece.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
