"""A checkpoint as GGUF, by llama.cpp's own converter.

    python to_gguf.py LLAMA_CPP CHECKPOINT OUT bf16|f32

``LLAMA_CPP`` is the vendored tree of llama-cpp-python's source. Only its vocabulary step is replaced, by a byte-level
one: a random checkpoint has no tokenizer. Experts stay MXFP4, repacked without loss.
"""

import sys
from pathlib import Path
from typing import Any

SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that stand for themselves in a byte-level vocabulary."""

NORMAL, BYTE_LEVEL = 1, 4


def byte_vocabulary(self: Any) -> None:
    """256 bytes, then reserved ids."""
    writer, size = self.gguf_writer, self.hparams["vocab_size"]
    hidden = [byte for byte in range(256) if byte not in SHOWN]
    names = [chr(byte) if byte in SHOWN else chr(256 + hidden.index(byte)) for byte in range(256)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*names, *(f"<|fill_{index}|>" for index in range(256, size))])
    writer.add_token_types([NORMAL] * 256 + [BYTE_LEVEL] * (size - 256))
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)


def main() -> None:
    """Converts what the command line names."""
    source, checkpoint, out, kind = Path(sys.argv[1]), *sys.argv[2:5]
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import convert_hf_to_gguf
    from conversion import kimi_k3

    kimi_k3.KimiK3Model.set_vocab = byte_vocabulary
    sys.argv = ["convert", checkpoint, "--outfile", out, "--outtype", kind]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
