"""Token counts of a reply that its text alone does not give. Source: chat-format, section 12."""

from collections.abc import Sequence

from kimi_jax.text.detokenize import Detokenizer
from kimi_jax.text.markup import SEALED
from kimi_jax.text.parse import reasoning_end
from kimi_jax.text.tokenizer import Tokenizer


def count_reasoning_tokens(ids: Sequence[int], tokenizer: Tokenizer, *, thinking: bool = True) -> int:
    """How many ids of a reply are thoughts: those inside the thinking element, its markers left out."""
    if not thinking:
        return 0
    decoder = Detokenizer(tokenizer, markup=SEALED)
    texts = [decoder.push(number) for number in ids]
    text = "".join(texts).partition(SEALED.end)[0]
    start = len(SEALED.think_open) if text.startswith(SEALED.think_open) else 0
    end = start + len(SEALED.without_cut_marker(text[start:][: reasoning_end(text[start:], SEALED)]))
    count = position = 0
    for piece in texts:
        count += start <= position < end
        position += len(piece)
    return count
