"""The bodies of requests: every field, its type and its limits. What is no field here is refused, not ignored."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kimi_jax.serve import limits
from kimi_jax.serve.errors import invalid

Object = dict[str, Any]
"""A client's object that is passed on unchanged: the renderer and the grammar check what they read."""

Name = Annotated[str, Field(min_length=1, max_length=limits.NAME)]
Stop = Annotated[str, Field(min_length=1, max_length=limits.STOP_LENGTH)]
Id = Annotated[int, Field(ge=0)]


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    """One prompt or a list of them, as a list; a prompt is a text or a list of ids."""
    alone = isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value))
    prompts = [value] if alone else value
    if not isinstance(prompts, list):
        raise ValueError("a text, a list of token ids, or a list of either works")
    for place, prompt in enumerate(prompts):
        ids = isinstance(prompt, list) and all(type(item) is int for item in prompt)
        if not (isinstance(prompt, str) or ids):
            raise ValueError(f"prompt {place} is neither a text nor a list of token ids")
    return prompts


class Body(BaseModel):
    """A body. Types are exact: "5" is no number, 5.0 no integer, true neither."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    refusals: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Fields that clients know from elsewhere -> why they are not accepted and what works."""

    @classmethod
    def read(cls, value: Object) -> Self:
        """The body of a JSON object. Raises ApiError with everything that is wrong."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise invalid(error, tuple(cls.model_fields), cls.refusals) from None


class StreamOptions(Body):
    """How an answer is streamed; obfuscation is accepted and never used."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Generation(Body):
    """What every request for an answer may say."""

    model: Name | None = None
    n: int = Field(1, ge=1, le=limits.CHOICES)
    temperature: float = Field(1.0, ge=0, le=limits.TEMPERATURE)
    top_p: float = Field(0.95, ge=1e-6, le=1)
    top_k: int = Field(0, ge=-1, le=limits.TOKENS)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-limits.PENALTY, le=limits.PENALTY)
    frequency_penalty: float = Field(0.0, ge=-limits.PENALTY, le=limits.PENALTY)
    repetition_penalty: float = Field(1.0, ge=limits.REPETITION[0], le=limits.REPETITION[1])
    logit_bias: dict[str, Annotated[float, Field(ge=-limits.BIAS, le=limits.BIAS)]] = Field(
        default_factory=dict, max_length=limits.BIASED_IDS
    )
    seed: int | None = Field(None, ge=-limits.SEED, lt=limits.SEED)
    stop: Annotated[list[Stop], BeforeValidator(_one_or_more), Field(max_length=limits.STOPS)] = Field(
        default_factory=list
    )
    stop_token_ids: list[Id] = Field(default_factory=list, max_length=limits.STOP_IDS)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    # accepted and without effect here: they are about accounts and billing
    user: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=limits.METADATA)] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are given without stream; stream: true, or no stream_options, works")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(Generation):
    """A body of /v1/chat/completions."""

    messages: list[Object] = Field(min_length=1, max_length=limits.MESSAGES)
    max_tokens: int | None = Field(None, ge=1, le=limits.TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=limits.TOKENS)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=limits.TOP_LOGPROBS)
    tools: list[Object] = Field(default_factory=list, max_length=limits.TOOLS)
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool = True
    response_format: Object | None = None
    reasoning_effort: str | None = None
    thinking: Object | None = None
    chat_template_kwargs: Object | None = None
    modalities: list[Literal["text"]] | None = None

    refusals = MappingProxyType(
        {
            "functions": "it was replaced; tools works",
            "function_call": "it was replaced; tool_choice works",
            "audio": "this model writes text only",
            "prediction": "predicted output is not built",
            "web_search_options": "the server reaches no web; offer a tool",
            "best_of": "n works",
            "echo": "/v1/completions has it",
            "min_tokens": "ignore_eos with max_tokens gives a fixed length",
            "max_new_tokens": "max_tokens works",
            "guided_json": "response_format works",
            "verbosity": "reasoning_effort works",
        }
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs; logprobs: true works")
        asked = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(asked) == 2:
            raise ValueError("max_tokens and max_completion_tokens are the same and differ; give one")
        return self

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(Generation):
    """A body of /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts), Field(min_length=1, max_length=limits.PROMPTS)]
    max_tokens: int = Field(16, ge=0, le=limits.TOKENS)
    logprobs: int | None = Field(None, ge=0, le=limits.TOP_LOGPROBS)
    echo: bool = False
    best_of: int | None = None

    refusals = MappingProxyType(
        {
            "suffix": "this model does not fill in the middle; put what stands before into the prompt",
            "messages": "/v1/chat/completions has them",
            "tools": "/v1/chat/completions has them",
            "response_format": "/v1/chat/completions has it",
            "max_completion_tokens": "max_tokens works here",
            "min_tokens": "ignore_eos with max_tokens gives a fixed length",
        }
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(
                f"best_of is {self.best_of} and n is {self.n}; only equal values work: all answers are returned"
            )
        if self.n * len(self.prompt) > limits.ANSWERS:
            raise ValueError(
                f"{len(self.prompt)} prompts with n = {self.n} are {self.n * len(self.prompt)} answers; "
                f"up to {limits.ANSWERS} in one request work"
            )
        if self.max_tokens == 0 and not self.echo:
            raise ValueError(
                "max_tokens is 0 without echo, which asks for nothing; max_tokens from 1, or echo: true, works"
            )
        return self


class TokenizeBody(Body):
    """A body of /tokenize: a text as it is, or a conversation as /v1/chat/completions would render it."""

    model: Name | None = None
    prompt: str | None = None
    messages: list[Object] | None = Field(None, min_length=1, max_length=limits.MESSAGES)
    tools: list[Object] = Field(default_factory=list, max_length=limits.TOOLS)
    tool_choice: str | Object | None = None
    response_format: Object | None = None
    reasoning_effort: str | None = None
    thinking: Object | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True  # this vocabulary adds none, asked or not
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError(
                "one of prompt and messages works; " + ("both are" if self.prompt else "neither is") + " given"
            )
        return self


class DetokenizeBody(Body):
    """A body of /detokenize."""

    model: Name | None = None
    tokens: list[Id] = Field(max_length=limits.JSON_MARKS)
