"""kimi_jax, by the same protocol as its peers."""

import platform
from typing import Any

import numpy as np
import protocol


class Kimi:
    """The engine's own batches, fed with given ids."""

    def __init__(self, dtype: str) -> None:
        self.name, self.dtype = f"kimi_jax {dtype}", dtype
        self.batch: Any = None

    def load(self, checkpoint: str, threads: int) -> None:
        import jax

        import kimi_jax

        del threads  # XLA takes what the process is given
        self.runner = kimi_jax.load(checkpoint, dtype=self.dtype).runner
        self.vocab = self.runner.steps.config.vocab
        self.versions = f"jax {jax.__version__}, Python {platform.python_version()}"

    def prefill(self, ids: list[int]) -> int:
        return self.start([ids])[0]

    def start(self, prompts: list[list[int]]) -> list[int]:
        from kimi_jax.engine.request import Request

        if self.batch is not None:
            self.batch.close()
        room = self.runner.capacity - len(prompts[0])
        self.batch = self.runner.open([Request(prompt, max_tokens=room) for prompt in prompts])
        return [event.token for event in self.batch.news()]

    def step(self, tokens: list[int]) -> list[int]:
        return self.batch.feed(np.asarray(tokens, np.int32)).tolist()


if __name__ == "__main__":
    arguments = protocol.parser().parse_args()
    protocol.run(Kimi(arguments.dtype), arguments)
