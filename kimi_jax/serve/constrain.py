"""What an answer must look like, where a request says so: one grammar for each answer."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from kimi_jax.serve.model import Served
from kimi_jax.serve.schema import ChatBody
from kimi_jax.text.grammar import GrammarFailed, ReplyGrammar
from kimi_jax.text.markup import END

log = logging.getLogger(__name__)


class GuardedGrammar:
    """A grammar that ends the answer when it gives up: the engine and its other requests go on.

    Attributes:
      failure: why it gave up; None as long as the answer has its form.
    """

    def __init__(self, grammar: ReplyGrammar, end: int, vocab: int) -> None:
        self._grammar, self._end, self._words = grammar, end, -(-vocab // 32)
        self.failure: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the answer is complete, or given up."""
        return self._grammar.finished or self.failure is not None

    def mask(self) -> np.ndarray[Any, Any]:
        """The ids that may come next; the end alone after a failure."""
        if self.failure is None:
            try:
                return self._grammar.mask()
            except Exception as error:
                self._give_up(error)
        bits = np.zeros(self._words, np.uint32)
        bits[self._end // 32] = 1 << (self._end % 32)
        return bits

    def accept(self, token: int) -> None:
        """Takes the drawn id."""
        if self.failure is None:
            try:
                self._grammar.accept(token)
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if not isinstance(error, GrammarFailed):  # a fault, but of one answer: it must not end the engine
            log.error("a grammar failed as none should", exc_info=error)
        self.failure = str(error) if isinstance(error, GrammarFailed) else "a fault of the server; its log says more"


def constraint(body: ChatBody, model: Served, thinking: bool) -> Callable[[], GuardedGrammar] | None:
    """Makes the grammar of an answer, a new one each time; None where answers are free.

    Raises:
      GrammarError, ChatError: forms that cannot be enforced, all of them.
    """

    def grammar() -> ReplyGrammar | None:
        return model.grammars.reply(
            thinking=thinking,
            tools=body.tools,
            tool_choice=body.tool_choice,
            parallel_tool_calls=body.parallel_tool_calls,
            response_format=body.response_format,
        )

    def guarded() -> GuardedGrammar:
        made = grammar()
        assert made is not None  # the first was
        return GuardedGrammar(made, model.tokenizer.special_id(END), model.vocab)

    return None if grammar() is None else guarded
