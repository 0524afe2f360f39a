"""Replies that must have a form: JSON, tool calls, arguments that follow a schema. Source: chat-format, sections 9 and 13.

What a request asks for becomes a grammar of the whole reply, thoughts included, over the vocabulary's own tokens. At each
step it says which tokens may come next. Thoughts are free text: the form applies to what follows them.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from kimi_jax.problems import ProblemsError
from kimi_jax.text.errors import ChatError, shown
from kimi_jax.text.grammar_calls import is_strict, tools_element
from kimi_jax.text.grammar_rules import TEXT, Rules
from kimi_jax.text.grammar_schema import SchemaError, check_schema
from kimi_jax.text.markup import END
from kimi_jax.text.notices import response_schema
from kimi_jax.text.segments import closed, opened
from kimi_jax.text.tokenizer import PATTERN, Tokenizer
from kimi_jax.text.tool_choice import resolve_tool_choice

MAX_TOOLS = 128
"""Tools of one request that may be constrained."""

MAX_GRAMMAR = 1 << 20
"""Characters of a grammar."""

_STACK = 64 << 20  # bytes, of which a schema at the limit of nesting takes a tenth; only what is used is ever allocated
_STACK_SIZE = threading.Lock()  # it is a setting of the whole process

T = TypeVar("T")

_KEPT = 64  # grammars that are not compiled again


class GrammarError(ChatError):
    """A form that cannot be enforced; names every part of the request that is in the way. A client error, HTTP 400."""

    def __init__(self, *problems: str) -> None:
        ProblemsError.__init__(self, "This form of reply cannot be enforced", problems)


class GrammarFailed(RuntimeError):
    """A grammar that gave up in the middle of a reply: its limits are reached, or a token was drawn that it forbids."""


class ReplyGrammar:
    """Which tokens may come next in one reply. Not to be shared between threads.

    Attributes:
      finished: whether the reply is complete, its end token included.
    """

    def __init__(self, matcher: Any, vocab: int, end: int) -> None:
        self._matcher, self._words, self._end = matcher, -(-vocab // 32), end
        self.finished = False

    def mask(self) -> np.ndarray[Any, Any]:
        """The tokens that may come next: uint32 [vocab / 32, rounded up], bit i of the whole for token i.

        Raises:
          GrammarFailed: the grammar has become too complex.
        """
        bits = np.zeros(self._words, np.uint32)
        if self._matcher.is_stopped() and not self._matcher.is_error():
            bits[self._end // 32] = 1 << (self._end % 32)
            return bits
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()
        return bits

    def accept(self, token: int) -> None:
        """Takes the token that was drawn.

        Raises:
          GrammarFailed: it is not one of those allowed.
        """
        if self.finished:
            raise GrammarFailed(f"token {token} after the end of the reply")
        self._matcher.consume_token(token)
        self._check()
        self.finished = token == self._end

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(f"the grammar gave up: {(self._matcher.get_error() or '?').splitlines()[0][:200]}")


class Grammars:
    """Makes the grammars of requests to a model; one object serves all requests and threads.

    Args:
      tokenizer: the model's. Reading its vocabulary takes about a second at full size.

    Raises:
      ImportError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from llguidance import LLTokenizer

        self._tokenizer = tokenizer
        self._end = tokenizer.special_id(END)
        self._tokens = LLTokenizer.from_tiktoken(  # pyright: ignore[reportAttributeAccessIssue]
            encoder=tokenizer.ranks,
            special_tokens=tokenizer.special_ids,
            pattern=PATTERN,
            eos_token=[self._end],
            n_vocab=tokenizer.vocab_size,
            slices=None,
        )
        self._compiled = lru_cache(_KEPT)(self._compile)

    def reply(
        self,
        *,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
    ) -> ReplyGrammar | None:
        """The grammar of a reply, or None where the request leaves its form free.

        Free are: no tools and plain text; tool_choice "none"; "auto" with tools of which none is strict, unless
        ``parallel_tool_calls`` is false; a json_schema whose ``strict`` is false.

        Args:
          thinking: whether the prompt has opened the thoughts (the renderer's state).
          tools: all that may be called.
          tool_choice: as the client sent it.
          parallel_tool_calls: false for one call at most.
          response_format: as the client sent it.

        Raises:
          GrammarError: schemas that are wrong, too large, or use what cannot be enforced.
          ChatError: a tool choice that is none.
        """
        choice = resolve_tool_choice(tool_choice, tools)
        offered = [] if choice.kind == "none" else _functions(tools or ())
        if choice.kind == "named":
            offered = [tool for tool in offered if tool["function"]["name"] == choice.name]
        must_call = choice.kind in ("required", "named")
        schema = _answer_schema(response_format)
        if must_call and schema is not None:
            raise GrammarError(
                f"response_format asks for JSON and tool_choice {shown(tool_choice)} for calls; one of them works"
            )
        bound = must_call or not parallel_tool_calls or any(map(is_strict, offered))
        if schema is None and not (offered and bound):
            return None
        rules = Rules(self._tokenizer)
        try:
            calls = tools_element(rules, offered, several=parallel_tool_calls) if offered else ""
        except SchemaError as error:
            raise GrammarError(*error.args) from None
        if schema is not None:
            rules.add("answer", rules.json(schema), "response_format.json_schema")
        rules.add("start", _frame(rules, thinking, schema is not None, calls, must_call))
        text = rules.text()
        if len(text) > MAX_GRAMMAR:
            raise GrammarError(
                f"the schemas together make a grammar of {len(text):,} characters; up to {MAX_GRAMMAR:,} work"
            )
        try:
            matcher = self._compiled(text)
        except ValueError as error:
            raise GrammarError(rules.explain(str(error))) from None
        return ReplyGrammar(matcher.deep_copy(), self._tokenizer.vocab_size, self._end)

    def _compile(self, text: str) -> Any:
        """A matcher at the start of a reply; only copies of it are advanced."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        grammar = LLMatcher.grammar_from_lark(text)
        matcher = with_deep_stack(lambda: LLMatcher(self._tokens, grammar, log_level=0, limits=limits))
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher


def with_deep_stack(work: Callable[[], T]) -> T:
    """What ``work`` returns, on a thread of its own: llguidance recurses over schemas, and a stack that ends kills the process."""
    with ThreadPoolExecutor(1) as pool:
        with _STACK_SIZE:
            before = threading.stack_size(_STACK)
            try:
                made = pool.submit(work)  # starts the thread
            finally:
                threading.stack_size(before)
        return made.result()


def _frame(rules: Rules, thinking: bool, answer: bool, calls: str, must_call: bool) -> str:
    """The channels of a reply after its prompt, in order."""
    thoughts = f"{TEXT} {rules.ids(closed('think'))} {rules.ids(opened('response'))}" if thinking else ""
    end = rules.ids(closed("response"))
    if not answer:
        body = f"{TEXT} {end} {calls}{'' if must_call or not calls else '?'}"
    elif calls:  # who calls need not answer yet
        body = f"(answer {end} {calls}? | {end} {calls})"
    else:
        body = f"answer {end}"
    return f"{thoughts} {body} {rules.ids(closed('message'))}"


def _answer_schema(response_format: Any) -> Any:
    """The schema of an answer that must be JSON, or None."""
    if not isinstance(response_format, Mapping):
        return None
    if response_format.get("type") == "json_object":
        return {"type": "object"}
    if response_format.get("type") != "json_schema":
        return None
    given = response_format.get("json_schema")
    if isinstance(given, Mapping) and given.get("strict") is False:
        return None
    schema = response_schema(given)
    try:
        check_schema(schema)
    except SchemaError as error:
        raise GrammarError(f"response_format.json_schema: {error}") from None
    return schema


def _functions(tools: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The tools, each seen to have a name."""
    names: set[str] = set()
    problems = [f"{len(tools)} tools; up to {MAX_TOOLS} work"] if len(tools) > MAX_TOOLS else []
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            problems.append(f"tools[{at}].function.name is {shown(name)}; the name of a function works")
        elif name in names:
            problems.append(f"tools[{at}] is called {shown(name)} like another; names that differ work")
        else:
            names.add(name)
    if problems:
        raise GrammarError(*problems)
    return list(tools)
