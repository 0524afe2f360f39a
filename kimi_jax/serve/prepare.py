"""A checked body to engine requests: the prompt rendered and encoded, and how each answer is to be read."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from kimi_jax.completion import Reading
from kimi_jax.engine.request import Grammar, Request
from kimi_jax.media.errors import MediaError
from kimi_jax.media.picture import Picture
from kimi_jax.media.prompt import Span, find_spans
from kimi_jax.problems import ProblemsError, nearest
from kimi_jax.serve import limits
from kimi_jax.serve.constrain import constraint
from kimi_jax.serve.errors import ApiError, refused
from kimi_jax.serve.images import Look
from kimi_jax.serve.model import Served
from kimi_jax.serve.schema import ChatBody, CompletionBody, DetokenizeBody, Generation, TokenizeBody
from kimi_jax.text.effort import Thinking, resolve_thinking
from kimi_jax.text.errors import ChatError, shown
from kimi_jax.text.markup import image_prompt
from kimi_jax.text.render import render
from kimi_jax.text.tokenizer import EncodeError
from kimi_jax.text.tool_choice import ToolChoice, resolve_tool_choice

_TEMPLATE_KEYS = ("thinking", "enable_thinking", "thinking_effort")

NO_IMAGES = Look()

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """What the engine is asked, one request for each answer.

    Attributes:
      requests: in the order of answers: all of the first prompt, then all of the second.
      each: answers to each prompt.
      reading: how every answer is read.
      prompts: text of each request's prompt, where it is to be repeated; otherwise empty.
      draws: False when the prompts are to be repeated and nothing else.
      scored: whether the tokens of prompts are to be scored too.
      pictures: that every request has; whoever makes rows of them takes them out.
      places: where they are in the prompt.
    """

    requests: tuple[Request, ...]
    each: int
    reading: Reading
    prompts: tuple[str, ...] = ()
    draws: bool = True
    scored: bool = False
    pictures: list[Picture] = field(default_factory=list)
    places: tuple[Span, ...] = ()


def prepare_chat(body: ChatBody, model: Served, look: Look = NO_IMAGES) -> Prepared:
    """Renders a conversation with its images. Raises ApiError 400 with everything that is wrong, 404 for another model."""
    model.check_name(body.model)
    wrong = _Problems()
    talk = _conversation(body, model, wrong, look, 2 * model.capacity)
    grammar = None
    if talk.choice is not None:
        grammar = wrong.take(lambda: constraint(body, model, talk.thinking.thinking))
    asked = _Asked(body, model, body.most, body.top_logprobs, wrong)
    asked.check_length("the prompt", talk.ids)
    asked.check_count(body.n)
    wrong.refuse()
    places = _places(talk.ids, model, look)
    reading = Reading(
        model.tokenizer,
        chat=True,
        thinking=talk.thinking.thinking,
        tools=talk.choice is not None and talk.choice.kind != "none",
        stop=body.stop,
        stop_ids=asked.stops,
        call_pieces=body.stream,
    )
    requests = asked.requests([talk.ids], grammar)
    return Prepared(requests, body.n, reading, pictures=list(look.pictures), places=places)


def prepare_completion(body: CompletionBody, model: Served) -> Prepared:
    """Encodes texts; markup in them stays text. Raises ApiError 400 with everything that is wrong, 404 for another model."""
    model.check_name(body.model)
    wrong = _Problems()
    scored = body.echo and body.logprobs is not None
    if scored and not model.scores_prompts:
        wrong.add(["echo with logprobs needs a server started with --enable-prompt-logprobs; either alone works here"])
    asked = _Asked(body, model, max(body.max_tokens, 1), body.logprobs or 0, wrong)
    prompts = []
    for place, prompt in enumerate(body.prompt):
        name = "the prompt" if len(body.prompt) == 1 else f"prompt {place}"
        ids = (
            prompt
            if isinstance(prompt, list)
            else wrong.take(lambda text=prompt: _encode(text, model, 2 * model.capacity)) or []
        )
        asked.check_length(name, ids)
        wrong.add([f"{name} is empty; at least one token works"] if not prompt else [])
        wrong.add(_vocabulary_problems(name, ids, model))
        wrong.add(_placeholder_problems(name, ids, model))
        prompts.append(ids)
    asked.check_count(len(prompts) * body.n)
    count = sum(map(len, prompts)) * body.n * ((body.logprobs or 0) + 1)
    if scored and count > limits.PROMPT_SCORES:
        wrong.add([f"{count:,} log-probabilities of prompt tokens; up to {limits.PROMPT_SCORES:,} in one answer work"])
    wrong.refuse()
    reading = Reading(model.tokenizer, chat=False, stop=body.stop, stop_ids=asked.stops)
    texts = [model.tokenizer.decode(ids) for ids in prompts for _ in range(body.n)] if body.echo else []
    return Prepared(asked.requests(prompts), body.n, reading, tuple(texts), body.max_tokens > 0, scored)


def tokenize(body: TokenizeBody, model: Served, look: Look = NO_IMAGES) -> list[int]:
    """The ids of a text, or of a conversation with its images. Raises ApiError as the others do."""
    model.check_name(body.model)
    wrong = _Problems()
    most = limits.TOKENIZED
    if body.prompt is not None:
        text = body.prompt
        ids = wrong.take(lambda: _encode(text, model, most)) or []
    else:
        ids = _conversation(body, model, wrong, look, most).ids
    if len(ids) > most:
        wrong.add([f"this is more than {most:,} tokens; up to as many are given"], "context_length_exceeded")
    wrong.refuse()
    return ids


def detokenize(body: DetokenizeBody, model: Served) -> str:
    """The text of ids. Raises ApiError as the others do."""
    model.check_name(body.model)
    wrong = _Problems()
    wrong.add(_vocabulary_problems("tokens", body.tokens, model))
    wrong.refuse()
    return model.tokenizer.decode(body.tokens)


class _Problems:
    """Everything that is wrong with one request."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._code = "invalid_value"

    def add(self, problems: Iterable[str], code: str = "invalid_value") -> None:
        for problem in problems:
            self._found.append(problem)
            self._code = code

    def take(self, make: Callable[[], T]) -> T | None:
        """What ``make`` makes, or None after noting why it refuses to."""
        try:
            return make()
        except ProblemsError as error:
            self.add(error.problems)
            return None

    def refuse(self) -> None:
        if self._found:
            raise ApiError(400, "This request cannot be answered", list(dict.fromkeys(self._found)), code=self._code)


class _Talk(NamedTuple):
    ids: list[int]
    thinking: Thinking
    choice: ToolChoice | None


def _conversation(body: ChatBody | TokenizeBody, model: Served, wrong: _Problems, look: Look, most: int) -> _Talk:
    """Renders the messages of a body; what comes back after a problem, or with more than ``most`` ids, is not to be used."""
    kwargs: Mapping[str, Any] = body.chat_template_kwargs or {}
    wrong.add(
        f"chat_template_kwargs has no {shown(key)}{nearest(key[: limits.NAME], _TEMPLATE_KEYS)}"
        for key in kwargs
        if key not in _TEMPLATE_KEYS
    )
    wrong.add(_tool_problems(body.tools))
    can_disable = not model.always_thinks
    thinking = wrong.take(
        lambda: resolve_thinking(body.reasoning_effort, kwargs, body.thinking, can_disable=can_disable)
    )
    thinking = thinking or Thinking(True, None)
    choice = wrong.take(lambda: resolve_tool_choice(body.tool_choice, body.tools))
    messages = body.messages or []
    wrong.add(look.problems, "invalid_image")
    prompts = [image_prompt(picture.width, picture.height, picture.tokens) for picture in look.pictures]
    segments = wrong.take(
        lambda: render(
            messages,
            tools=body.tools,
            thinking=thinking.thinking,
            effort=thinking.effort,
            tool_choice=body.tool_choice if choice else None,
            response_format=body.response_format,
            add_generation_prompt=body.add_generation_prompt if isinstance(body, TokenizeBody) else True,
            image_prompts=None if look.problems else prompts,  # those that are wrong still have a place
        )
    )
    return _Talk(model.tokenizer.encode_segments(segments or [], most), thinking, choice)


def _places(ids: Sequence[int], model: Served, look: Look) -> tuple[Span, ...]:
    """Where the images of a prompt are. Nothing else may stand in their places."""
    if model.placeholder is None:
        return ()
    try:
        return find_spans(ids, model.placeholder, [(picture.tokens, picture.digest) for picture in look.pictures])
    except MediaError as error:
        raise refused(error) from None


class _Asked:
    """The numbers of a request, made ready for the engine."""

    def __init__(self, body: Generation, model: Served, most: int | None, top: int, wrong: _Problems) -> None:
        self._body, self._model, self._most, self._top, self._wrong = body, model, most, top, wrong
        wrong.add(_vocabulary_problems("stop_token_ids", body.stop_token_ids, model))
        ended = () if body.ignore_eos else model.stop_ids
        self.stops = tuple(dict.fromkeys((*ended, *body.stop_token_ids)))
        self._bias = dict(self._biases())
        self._seed = secrets.randbits(32) if body.seed is None else body.seed

    def check_length(self, name: str, ids: Sequence[int]) -> None:
        """Notes a prompt that leaves no room for an answer."""
        most = self._model.capacity - 1
        if len(ids) > most:
            count = f"{len(ids):,}" if len(ids) <= 2 * (most + 1) else f"more than {2 * (most + 1):,}"
            problem = (
                f"{name} has {count} tokens and this server holds {most + 1:,} of prompt and answer; "
                f"up to {most:,} work, or start it with a larger --max-model-len"
            )
            self._wrong.add([problem], "context_length_exceeded")

    def check_count(self, answers: int) -> None:
        """Notes a request that the queue can never take whole."""
        if answers > self._model.queue:
            problem = (
                f"{answers} answers are asked for and {self._model.queue} requests may wait; ask for fewer at once"
            )
            self._wrong.add([problem])

    def requests(
        self, prompts: Sequence[list[int]], grammar: Callable[[], Grammar] | None = None
    ) -> tuple[Request, ...]:
        """One request for each answer to each prompt."""
        body = self._body
        return tuple(
            Request(
                ids,
                min(self._most or limits.TOKENS, self._model.capacity - len(ids)),
                body.temperature,
                body.top_p,
                max(body.top_k, 0),
                (self._seed + place) % (1 << 32),
                self.stops,
                min_p=body.min_p,
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                repetition_penalty=body.repetition_penalty,
                bias=self._bias,
                logprobs=self._top,
                grammar=grammar() if grammar else None,
            )
            for ids in prompts
            for place in range(body.n)
        )

    def _biases(self) -> Iterator[tuple[int, float]]:
        vocab = self._model.vocab
        for key, value in self._body.logit_bias.items():
            if key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab:
                yield int(key), value
            else:
                self._wrong.add([f"logit_bias names {shown(key)}; its keys are token ids from 0 to {vocab - 1}"])


def _encode(text: str, model: Served, most: int) -> list[int]:
    """The ids of a text, or a few more than ``most`` of them: it is refused then, and the rest may be minutes of work."""
    try:
        return model.tokenizer.encode(text, most=most)
    except EncodeError as error:
        raise ChatError(f"prompt: {error}; send whole characters") from None


def _vocabulary_problems(name: str, ids: Sequence[int], model: Served) -> Iterator[str]:
    strange = [number for number in ids if not 0 <= number < model.vocab]
    if strange:
        yield f"{name} holds {len(strange):,} ids such as {shown(strange[0])}; ids go from 0 to {model.vocab - 1}"


def _placeholder_problems(name: str, ids: Sequence[int], model: Served) -> Iterator[str]:
    places = ids.count(model.placeholder) if model.placeholder is not None else 0
    if places:
        yield f"{name} has {places:,} places for rows of images; image parts of /v1/chat/completions fill those"


def _tool_problems(tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for place, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            yield f'tools[{place}] is no {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}'
        elif not isinstance(name, str) or not 0 < len(name) <= limits.NAME:
            yield f"tools[{place}].function.name is {shown(name)}; a name of up to {limits.NAME} characters works"
        elif not isinstance(function.get("parameters", {}), Mapping | None):
            yield f"tools[{place}].function.parameters is {shown(function['parameters'])}; a JSON schema works"
