"""llama.cpp by the low-level interface of llama-cpp-python, which is built for this processor.

The checkpoint is a GGUF file (``to_gguf.py``): bfloat16 or float32 matrices and MXFP4 experts.
"""

import ctypes
from typing import Any

import llama_cpp
import numpy as np
import protocol

BATCH, SEQUENCES, LENGTH = 2048, 8, 4096


class Llama:
    """One context that holds all sequences."""

    name = "llama.cpp"
    versions = f"llama-cpp-python {llama_cpp.__version__}"

    def __init__(self) -> None:
        self.log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()

    def load(self, checkpoint: str, threads: int) -> None:
        model = llama_cpp.llama_model_default_params()
        model.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(checkpoint.encode(), model)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {checkpoint}")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = LENGTH, BATCH, 512
        context.n_seq_max, context.kv_unified = SEQUENCES, True
        context.n_threads = context.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch: Any = llama_cpp.llama_batch_init(LENGTH, 0, 1)
        self.position = 0

    def prefill(self, ids: list[int]) -> int:
        return self.start([ids])[0]

    def start(self, prompts: list[list[int]]) -> list[int]:
        llama_cpp.llama_memory_clear(self.memory, True)
        chosen = []
        for sequence, prompt in enumerate(prompts):
            last = len(prompt) - 1
            self._decode([(token, at, sequence, at == last) for at, token in enumerate(prompt)])
            chosen.append(self._likeliest(-1))
        self.position = len(prompts[0])
        return chosen

    def step(self, tokens: list[int]) -> list[int]:
        self._decode([(token, self.position, sequence, True) for sequence, token in enumerate(tokens)])
        self.position += 1
        return [self._likeliest(row) for row in range(len(tokens))]

    def _decode(self, items: list[tuple[int, int, int, bool]]) -> None:
        """Items: id, position, sequence, whether its logits are wanted."""
        batch = self.batch
        batch.n_tokens = len(items)
        for row, (token, position, sequence, wanted) in enumerate(items):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, position, 1, wanted
            batch.seq_id[row][0] = sequence
        if llama_cpp.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp refused a batch")

    def _likeliest(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax())


if __name__ == "__main__":
    arguments = protocol.parser().parse_args()
    peer = Llama()
    peer.name += " float32" if arguments.dtype == "float32" else " bfloat16 + MXFP4"
    protocol.run(peer, arguments)
