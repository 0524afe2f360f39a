"""Held-out accuracy of a model on kimi-nano's own tasks: prompts made here, answers drawn in batches and scored."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_jax.api import Kimi
from kimi_jax.completion import Completion
from kimi_jax.problems import ProblemsError
from kimi_jax.text.detokenize import Detokenizer
from kimi_jax.text.markup import SEALED
from kimi_jax.text.parse import parse
from kimi_jax.text.tokenizer import Tokenizer
from kimi_jax.train.data.drawing import picture
from kimi_jax.train.data.encode import encode, prompt_ids
from kimi_jax.train.data.example import Example
from kimi_jax.train.data.score import Given, GivenCall, Score, scores
from kimi_jax.train.data.tasks import PICTURES, Mode, example, task

IMAGE_NAMES = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")


class NanoError(ProblemsError):
    """A model that these tasks cannot be asked of."""


@dataclass(frozen=True)
class Row:
    """What a model reaches on one task.

    Attributes:
      task: name.
      rows: examples asked.
      right: share of right answers.
      valid: of the answers with tool calls, the share whose calls fit their schemas; None where no answer has any.
      cut: share of answers that did not end by themselves.
      prompt_tokens, completion_tokens: means.
      draft_length: tokens per step with a draft, the target's own included; None without one.
    """

    task: str
    rows: int
    right: float
    valid: float | None
    cut: float
    prompt_tokens: float
    completion_tokens: float
    draft_length: float | None


@dataclass(frozen=True)
class Answered:
    """One example with what came back."""

    example: Example
    given: Given
    score: Score
    completion: Completion
    prompt_tokens: int


def askable(model: Kimi, names: Sequence[str], *, named: bool) -> tuple[list[str], list[str]]:
    """The tasks that a model can be asked, and notes about those that are left out.

    Args:
      model: loaded.
      names: of tasks.
      named: whether they were asked for by name: what cannot be asked is then an error.

    Raises:
      NanoError: no tokenizer, or a named task that needs what the model lacks.
      TaskError: an unknown task.
    """
    for name in names:
        task(name)
    if model.tokenizer is None:
        raise NanoError(
            "This model cannot be asked",
            [f"{model.config.name} has no tokenizer files beside it"],
            "Add tiktoken.model and tokenizer_config.json to the folder: python -m kimi_jax.train.data.tokenizer --out FOLDER.",
        )
    seen = [name for name in names if name in PICTURES]
    problems = _blind(model, model.tokenizer) if seen else []
    if not problems:
        return list(names), []
    if named:
        raise NanoError(f"This model cannot be asked {', '.join(seen)}", problems, "The tasks without pictures work.")
    return [name for name in names if name not in seen], [f"{', '.join(seen)} left out: {problems[0]}"]


def _blind(model: Kimi, tokenizer: Tokenizer) -> list[str]:
    """Why a model reads no pictures."""
    problems = [] if model.vision is not None else [f"it reads no pictures: {model.no_vision}"]
    lacks = [name for name in IMAGE_NAMES if name not in tokenizer.special_ids]
    if lacks:
        problems.append(f"its tokenizer does not name {', '.join(lacks)}")
        return problems
    place, configured = tokenizer.special_id(IMAGE_NAMES[-1]), model.config.media_placeholder
    if configured not in (None, place):
        problems.append(f"{IMAGE_NAMES[-1]} is {place} in its tokenizer and {configured} in its configuration")
    return problems


def evaluate(
    model: Kimi,
    name: str,
    rows: int,
    seed: int,
    *,
    mode: Mode = (True, "max"),
    batch: int = 16,
    max_tokens: int | None = None,
    watch: Callable[[int], None] = lambda done: None,
) -> tuple[Row, list[Answered]]:
    """Asks held-out examples of one task, greedily.

    Args:
      model: with a tokenizer.
      name: of the task.
      rows: examples.
      seed: of their stream.
      mode: (thinking, effort) of all replies.
      batch: examples at a time.
      max_tokens: of an answer; twice the longest right one where omitted.
      watch: told how many examples are answered.

    Raises:
      RequestError: prompts and answers that are longer than a sequence may be.
    """
    assert model.tokenizer is not None  # askable
    asked = [example(name, "held-out", seed, at, mode) for at in range(rows)]
    answered: list[Answered] = []
    for some in _batches(model.tokenizer, asked, batch, max_tokens):
        answered += _answer(model, model.tokenizer, *some, batch)
        watch(len(answered))
    return _row(name, answered), answered


def _batches(
    tokenizer: Tokenizer, asked: list[Example], batch: int, most: int | None
) -> Iterator[tuple[list[Example], int]]:
    """Examples of like length together, each batch with the tokens of its longest answer, doubled."""
    sized = sorted(((len(encode(one, tokenizer).ids), at) for at, one in enumerate(asked)))
    for start in range(0, len(sized), batch):
        some = [asked[at] for _, at in sized[start : start + batch]]
        longest = max(int(encode(one, tokenizer).mask.sum()) for one in some)
        yield some, most or 2 * longest + 8


def _answer(model: Kimi, tokenizer: Tokenizer, some: list[Example], most: int, batch: int) -> Iterator[Answered]:
    filled = some + some[:1] * (batch - len(some))  # one batch size: another would compile again
    prompts = [prompt_ids(one, tokenizer) for one in filled]
    images = [[picture(pixels) for pixels in one.images] for one in filled]
    found = model.generate_batch(prompts, most, images=images if any(images) else ())
    for one, prompt, completion in zip(some, prompts, found, strict=False):
        given = read_reply(one, completion.token_ids, tokenizer)
        yield Answered(one, given, scores(one, given), completion, len(prompt))


def read_reply(asked: Example, ids: Sequence[int], tokenizer: Tokenizer) -> Given:
    """The answer in some drawn ids: what a client would see of it, thoughts left out."""
    reader = Detokenizer(tokenizer, skip=tokenizer.stop_ids, markup=SEALED)
    text = "".join([*map(reader.push, ids), reader.flush()])
    reply = parse(text, thinking=asked.thinking, tools=bool(asked.tools), markup=SEALED)
    return Given(reply.content or "", tuple(GivenCall(call.name, call.arguments) for call in reply.tool_calls))


def _row(name: str, answered: list[Answered]) -> Row:
    def mean(values: Sequence[Any]) -> float:
        return round(sum(values) / len(values), 4)

    valid = [one.score.valid for one in answered if one.score.valid is not None]
    lengths = [one.completion.usage.drafts.mean_length for one in answered if one.completion.usage.drafts]
    return Row(
        name,
        len(answered),
        mean([one.score.right for one in answered]),
        mean(valid) if valid else None,
        mean([one.completion.finish_reason != "stop" for one in answered]),
        mean([one.prompt_tokens for one in answered]),
        mean([len(one.completion.token_ids) for one in answered]),
        mean(lengths) if lengths else None,
    )
