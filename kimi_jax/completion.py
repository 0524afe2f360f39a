"""From drawn ids to what a caller sees: text, reasoning, tool calls, and why it ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kimi_jax.engine.request import DraftCounts, Event
from kimi_jax.text.detokenize import Detokenizer
from kimi_jax.text.markup import SEALED, SPELLED
from kimi_jax.text.parse import Reply, ToolCall, parse
from kimi_jax.text.stop import StopStrings
from kimi_jax.text.stream import CallDelta, Delta, StreamParser
from kimi_jax.text.tokenizer import Tokenizer
from kimi_jax.text.usage import count_reasoning_tokens


@dataclass(frozen=True)
class DraftUsage:
    """What a draft model did for one completion.

    Attributes:
      steps: passes of the target after the prompt.
      drafted: drafts that it looked at.
      accepted: those that are part of the completion.
      mean_length: tokens per step, the target's own included.
      by_position: share of the steps that kept the draft at each place of the block.
    """

    steps: int
    drafted: int
    accepted: int
    mean_length: float
    by_position: tuple[float, ...]

    @classmethod
    def of(cls, counts: DraftCounts) -> "DraftUsage":
        """The figures of some counts; all 0 where no step was taken."""
        stayed = counts.stayed
        steps, accepted = sum(stayed), sum(number * steps for number, steps in enumerate(stayed))
        kept = tuple(round(sum(stayed[place:]) / max(steps, 1), 4) for place in range(1, len(stayed)))
        return cls(steps, counts.verified, accepted, round(1 + accepted / steps, 4) if steps else 0.0, kept)


@dataclass(frozen=True)
class Usage:
    """Tokens of one completion; ``drafts`` where the model has a draft."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    drafts: DraftUsage | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Completion:
    """A finished answer.

    Attributes:
      text: the answer; for a conversation without its thoughts and tool calls.
      token_ids: every drawn id, an ending stop id included.
      finish_reason: ``stop``, ``length``, ``tool_calls``, or ``error`` when the scores were not finite.
      reasoning: what the model thought, None where it did not.
      tool_calls: calls that the model asks for.
      logprobs: natural log of each id's probability at temperature 1, when asked for.
      usage: token counts.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[float, ...] | None = None
    usage: Usage = field(default=Usage(0, 0))


@dataclass(frozen=True)
class Piece:
    """What one more id adds to a streamed answer; the pieces of an answer add up to its completion."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True)
class Reading:
    """How the ids of one answer are read.

    Attributes:
      tokenizer: None for a model without tokenizer files: ids only, no text.
      chat: whether the answer has the channels of a conversation; otherwise all of it is text.
      thinking: whether the prompt has opened the thinking channel.
      tools: whether tool calls were offered.
      stop: strings that end the answer when its text or its thoughts hold one; they are not part of it. The markup of
        channels and tool calls is not searched.
      stop_ids: ids that end the answer; they leave no text.
      call_pieces: whether the arguments of tool calls come piece by piece, so that a call that is cut off has come in part.
    """

    tokenizer: Tokenizer | None
    chat: bool
    thinking: bool = True
    tools: bool = False
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    call_pieces: bool = False


class AnswerBuilder:
    """Takes the events of one request in order and gives pieces; knows the whole answer at the end."""

    def __init__(self, reading: Reading, prompt_tokens: int) -> None:
        self._reading, self._prompt_tokens = reading, prompt_tokens
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._text: list[str] = []
        self._finish: str | None = None
        self._called = False
        self._drafts: DraftCounts | None = None
        self._thoughts, self._answer = StopStrings(reading.stop), StopStrings(reading.stop)
        markup = SEALED if reading.chat else SPELLED
        self._detokenizer = (
            Detokenizer(reading.tokenizer, skip=reading.stop_ids, markup=markup) if reading.tokenizer else None
        )
        self._parser = (
            StreamParser(
                thinking=reading.thinking, tools=reading.tools, argument_pieces=reading.call_pieces, markup=SEALED
            )
            if reading.chat
            else None
        )

    @property
    def finished(self) -> bool:
        """Whether the answer is complete; later events are ignored. True as soon as a stop string is found."""
        return self._finish is not None

    def push(self, event: Event) -> Piece:
        """The news of one event."""
        if self.finished:
            return Piece()
        text, last = "", event.finish is not None
        self._drafts = event.drafts or self._drafts
        if event.token is not None:
            self._ids.append(event.token)
            self._logprobs.append(event.logprob)
            text = self._detokenizer.push(event.token) if self._detokenizer else ""
        if last and self._detokenizer:
            text += self._detokenizer.flush()
        self._text.append(text)
        thoughts, answer, calls = self._until_stop(self._read(text, last), last)
        self._called = self._called or bool(calls)
        finish: str | None = event.finish
        if self._thoughts.found or self._answer.found:
            finish = "stop"
        elif finish == "stop" and self._called:
            finish = "tool_calls"
        self._finish = finish
        return Piece(answer, thoughts, calls, () if event.token is None else (event.token,), finish)

    def _read(self, text: str, last: bool) -> Delta:
        if self._parser is None:
            return Delta(content=text)
        first = self._parser.push(text)
        rest = self._parser.finish() if last else Delta()
        return Delta(first.reasoning + rest.reasoning, first.content + rest.content, first.tool_calls + rest.tool_calls)

    def _until_stop(self, news: Delta, last: bool) -> tuple[str, str, tuple[CallDelta, ...]]:
        """The news as far as no stop string has ended the answer: thoughts come first, then the answer, then calls."""
        thoughts = self._thoughts.push(news.reasoning)
        if self._thoughts.found:
            return thoughts, "", ()
        if news.content or news.tool_calls or last:
            thoughts += self._thoughts.flush()
        answer = self._answer.push(news.content)
        if news.tool_calls or last:
            answer += self._answer.flush()
        return thoughts, answer, news.tool_calls

    def completion(self, logprobs: bool = False) -> Completion:
        """The answer as far as it has come."""
        reading, text = self._reading, "".join(self._text)
        reply = Reply(None, text, ())
        thoughts = 0
        if reading.chat and reading.tokenizer:
            reply = parse(text, thinking=reading.thinking, tools=reading.tools, markup=SEALED)
            read = [number for number in self._ids if number not in reading.stop_ids]
            thoughts = count_reasoning_tokens(read, reading.tokenizer, thinking=reading.thinking)
        reply = _cut(reply, reading.stop)
        return Completion(
            text=reply.content or "",
            token_ids=tuple(self._ids),
            finish_reason=self._finish or "length",
            reasoning=reply.reasoning,
            tool_calls=reply.tool_calls,
            logprobs=tuple(self._logprobs) if logprobs else None,
            usage=Usage(self._prompt_tokens, len(self._ids), thoughts, self._drafts and DraftUsage.of(self._drafts)),
        )


def _cut(reply: Reply, stop: Sequence[str]) -> Reply:
    """The reply up to the first stop string in its thoughts, else in its answer; reading ended there, before any call."""
    thoughts = StopStrings(stop)
    reasoning = thoughts.push(reply.reasoning or "") + thoughts.flush()
    if thoughts.found:
        return Reply(reasoning or None, None, ())
    answer = StopStrings(stop)
    content = answer.push(reply.content or "") + answer.flush()
    return Reply(reply.reasoning, content or None, reply.tool_calls)
