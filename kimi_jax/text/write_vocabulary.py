"""Ordinary tokens to the two released tokenizer files. Source: chat-format, sections 1 and 2."""

import base64
import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from kimi_jax.text.vocabulary import CONFIG_FILE, MODEL_FILE

NAMED = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}
"""Reserved names and their distance from the first reserved id, as released."""

_NOT_SPECIAL = ("<|open|>", "<|close|>", "<|sep|>")  # the released config flags these three as ordinary

_PRINTABLE = [*chain(range(33, 127), range(161, 173), range(174, 256))]
BYTES = (*_PRINTABLE, *(value for value in range(256) if value not in _PRINTABLE))
"""Single bytes in the order of their ids: printable Latin-1 first, as in the released file."""


def write_vocabulary(folder: str | Path, tokens: Sequence[bytes]) -> Path:
    """Writes ``tiktoken.model`` and ``tokenizer_config.json`` into a folder, made if need be, and returns the folder.

    Args:
      folder: where to write.
      tokens: ordinary tokens in the order of their ids; the reserved ids follow them.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / MODEL_FILE).write_text("".join(lines))
    (folder / CONFIG_FILE).write_text(json.dumps(_config(len(tokens)), indent=1) + "\n")
    return folder


def _config(base: int) -> dict[str, object]:
    added = {
        str(base + offset): {
            "content": name,
            "special": name not in _NOT_SPECIAL,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
        }
        for name, offset in NAMED.items()
    }
    tokens = {"bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    return {"added_tokens_decoder": added, **tokens, "model_max_length": 1e30}
