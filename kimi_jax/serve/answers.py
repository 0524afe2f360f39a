"""Answers in OpenAI's form: whole, and as the chunks of a stream."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

from kimi_jax.completion import Completion, DraftUsage, Piece
from kimi_jax.engine.request import Event
from kimi_jax.text.tokenizer import Tokenizer

Json = dict[str, Any]

LEAST = -9999.0
"""Stands for the logarithm of 0, which JSON cannot write (the value that OpenAI's API uses)."""


class Form(Protocol):
    """How one kind of request is answered."""

    prefix: str
    """Of the id of an answer."""
    whole: str
    """``object`` of a whole answer."""
    chunk: str
    """``object`` of one chunk."""

    def opening(self, place: int) -> Json | None:
        """The choice of the chunk that opens an answer in a stream."""
        ...

    def delta(self, place: int, piece: Piece, scored: Sequence[Event]) -> Json:
        """The choice of a chunk."""
        ...

    def choice(self, place: int, done: Completion, scored: Sequence[Event]) -> Json:
        """The choice of a whole answer."""
        ...


class Chat:
    """/v1/chat/completions.

    Args:
      tokenizer: spells the ids of log-probabilities.
      logprobs: whether they were asked for.
    """

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._tokenizer, self._logprobs = tokenizer, logprobs

    def opening(self, place: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        return {"index": place, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, place: int, piece: Piece, scored: Sequence[Event]) -> Json:
        delta: Json = {}
        if piece.reasoning:
            delta |= {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning}
        if piece.text:
            delta["content"] = piece.text
        if piece.tool_calls:
            delta["tool_calls"] = [
                {"index": call.index, "function": {"arguments": call.arguments}}
                if call.name is None
                else {
                    "index": call.index,
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in piece.tool_calls
            ]
        return {
            "index": place,
            "delta": delta,
            "logprobs": self._scores(scored),
            "finish_reason": piece.finish_reason,
        }

    def choice(self, place: int, done: Completion, scored: Sequence[Event]) -> Json:
        message: Json = {"role": "assistant", "content": done.text or None, "refusal": None}
        if done.reasoning is not None:
            message |= {"reasoning_content": done.reasoning, "reasoning": done.reasoning}
        if done.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in done.tool_calls
            ]
        return {
            "index": place,
            "message": message,
            "logprobs": self._scores(scored),
            "finish_reason": done.finish_reason,
        }

    def _scores(self, scored: Sequence[Event]) -> Json | None:
        if not self._logprobs:
            return None
        content = [
            {
                **self._score(event.token or 0, event.logprob),
                "top_logprobs": [self._score(token, score) for token, score in event.top],
            }
            for event in scored
        ]
        return {"content": content, "refusal": None}

    def _score(self, token: int, score: float) -> Json:
        spelled = self._tokenizer.token_bytes(token)
        return {"token": spelled.decode(errors="replace"), "logprob": finite(score), "bytes": list(spelled)}


class Text:
    """/v1/completions.

    Args:
      tokenizer: spells the ids of log-probabilities.
      logprobs: whether they were asked for.
      prompts: what stands before each answer, where that was asked for.
    """

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer, logprobs: bool, prompts: Sequence[str] = ()) -> None:
        self._tokenizer, self._logprobs, self._prompts = tokenizer, logprobs, prompts
        self._offsets = dict(enumerate(map(len, prompts)))
        self._scored_prompts: Sequence[Sequence[Event]] = ()

    def score_prompts(self, scored: Sequence[Sequence[Event]]) -> None:
        """Gives the tokens of the prompt of each answer, scored."""
        self._scored_prompts = scored
        self._offsets.clear()

    def opening(self, place: int) -> Json | None:
        if not self._prompts:
            return None
        scores = self._scores(place, self._scored_prompts[place]) if self._scored_prompts else None
        return {"index": place, "text": self._prompts[place], "logprobs": scores, "finish_reason": None}

    def delta(self, place: int, piece: Piece, scored: Sequence[Event]) -> Json:
        return {
            "index": place,
            "text": piece.text,
            "logprobs": self._scores(place, scored),
            "finish_reason": piece.finish_reason,
        }

    def choice(self, place: int, done: Completion, scored: Sequence[Event]) -> Json:
        if self._scored_prompts:
            scored = [*self._scored_prompts[place], *scored]
        return {
            "index": place,
            "text": (self._prompts[place] if self._prompts else "") + done.text,
            "logprobs": self._scores(place, scored),
            "finish_reason": done.finish_reason,
        }

    def _scores(self, place: int, scored: Sequence[Event]) -> Json | None:
        if not self._logprobs:
            return None
        tokens = [self._spelled(event.token or 0) for event in scored]
        offsets, offset = [], self._offsets.get(place, 0)
        for event in scored:
            offsets.append(offset)
            offset += len(self._tokenizer.token_bytes(event.token or 0).decode(errors="ignore"))
        self._offsets[place] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [None if math.isnan(event.logprob) else finite(event.logprob) for event in scored],
            "top_logprobs": [self._top(event) for event in scored],
            "text_offset": offsets,
        }

    def _top(self, event: Event) -> Json | None:
        if math.isnan(event.logprob):
            return None
        every = ((event.token or 0, event.logprob), *event.top)
        return {self._spelled(token): finite(score) for token, score in every}

    def _spelled(self, token: int) -> str:
        """A token as a key: its text, or its bytes where they are no text by themselves (as OpenAI's API writes them)."""
        spelled = self._tokenizer.token_bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def usage(
    prompt_tokens: int, drawn: int, cached: int, reasoning: int | None, drafts: Sequence[DraftUsage] = ()
) -> Json:
    """Tokens of all answers of a request.

    Args:
      reasoning: of them, thoughts; None where there are none to count.
      drafts: of those answers that had any.
    """
    counts: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": drawn,
        "total_tokens": prompt_tokens + drawn,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    details: Json = {} if reasoning is None else {"reasoning_tokens": reasoning}
    if drafts:
        accepted = sum(one.accepted for one in drafts)
        rejected = sum(one.drafted for one in drafts) - accepted
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    if details:
        counts["completion_tokens_details"] = details
    return counts


def finite(score: float) -> float:
    """A log-probability that JSON can write."""
    return score if math.isfinite(score) else LEAST
