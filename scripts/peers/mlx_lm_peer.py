"""mlx-lm on the CPU backend of MLX: float32 matrices (its bfloat16 is slower still) and MXFP4 experts."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import protocol
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import load_model


class Mlx:
    """mlx-lm's model and its own cache."""

    name = "mlx-lm float32 + MXFP4"
    versions = f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"

    def load(self, checkpoint: str, threads: int) -> None:
        del threads
        mx.set_default_device(mx.cpu)
        self.model, config = load_model(Path(checkpoint))
        leaves: Any = tree_flatten(self.model.parameters())
        wide = [(name, leaf.astype(mx.float32)) for name, leaf in leaves if leaf.dtype == mx.bfloat16]
        self.model.update(tree_unflatten(wide))
        mx.eval(self.model.parameters())
        self.vocab = config["text_config"]["vocab_size"]

    def prefill(self, ids: list[int]) -> int:
        return self.start([ids])[0]

    def start(self, prompts: list[list[int]]) -> list[int]:
        self.cache = self.model.make_cache()
        return self._call(np.asarray(prompts, np.int32))

    def step(self, tokens: list[int]) -> list[int]:
        return self._call(np.asarray(tokens, np.int32)[:, None])

    def _call(self, ids: np.ndarray) -> list[int]:
        chosen = mx.argmax(self.model(mx.array(ids), cache=self.cache)[:, -1], -1)
        mx.eval(chosen, [entry.state for entry in self.cache])
        return chosen.tolist()


if __name__ == "__main__":
    protocol.run(Mlx(), protocol.parser().parse_args())
