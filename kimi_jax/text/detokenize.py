"""Token ids to text while they come, never half a character. Source: chat-format, sections 2 and 10.2."""

import codecs
from collections.abc import Collection

from kimi_jax.text.markup import CLOSE, END, OPEN, SEALED, SEP, SPELLED, Markup, sealed
from kimi_jax.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one sequence of ids. The pieces add up to what `Tokenizer.decode` makes of all ids at once.

    Args:
      tokenizer: gives the bytes of each id.
      skip: ids that leave no text.
      markup: how control tokens appear. With `SEALED` a parser can tell them from text that spells their names.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip: Collection[int] = (), markup: Markup = SPELLED) -> None:
        self._tokenizer = tokenizer
        self._skip = frozenset(skip)
        self._sealed = markup is SEALED
        looks = {OPEN: markup.open, CLOSE: markup.close, SEP: markup.sep, END: markup.end}
        self._looks = {tokenizer.special_id(name): look for name, look in looks.items()}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, number: int) -> str:
        """The text that this id completes; empty while a character is incomplete. Raises ValueError for no token."""
        if number in self._skip:
            return ""
        if self._sealed and number in self._looks:
            return self.flush() + self._looks[number]
        return self._shown(self._decoder.decode(self._tokenizer.token_bytes(number)))

    def flush(self) -> str:
        """The text of an incomplete character at the end, as U+FFFD; empty otherwise. The next id starts afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return self._shown(text)

    def _shown(self, text: str) -> str:
        return sealed(text) if self._sealed else text
