"""What a caller asks of the engine, checked before anything reaches a device."""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal, Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from kimi_jax.precision import BFLOAT16
from kimi_jax.problems import ProblemsError

FinishReason = Literal["stop", "length", "error"]

MAX_STOPS = 16
"""Stop ids of one request; a fixed width keeps one compiled program for all requests."""

MAX_BIAS = 300
"""Biased ids of one request, for the same reason."""

MAX_TOP = 20
"""Alternatives reported with a drawn id."""

LARGEST_BIAS = 100.0


class RequestError(ProblemsError):
    """A request that cannot be served as asked."""


class Grammar(Protocol):
    """What an answer may be: one object for one request, told every drawn id in order.

    It does not raise: one that cannot go on is finished. An id that ends its request as one of the ``stops`` is not told.
    """

    @property
    def finished(self) -> bool:
        """Whether the answer is complete; the request then ends with ``stop``."""
        ...

    def mask(self) -> np.ndarray[Any, Any]:
        """The ids that may come next, uint32 [ceil(vocab / 32)]: bit ``i % 32`` of word ``i // 32`` is id ``i``."""
        ...

    def accept(self, token: int) -> None:
        """Takes one id that its mask allowed."""
        ...


@dataclass(frozen=True, eq=False)
class ImageSpan:
    """One image in a prompt.

    Attributes:
      start: place of its first id in the prompt; as many ids as there are rows stand for it.
      rows: in the place of the embeddings of those ids, [tokens, embed]; on the host, shared, never written to.
      key: stands for the content: images of equal keys and lengths are the same to the prefix cache, whatever their rows.

    Raises:
      RequestError: rows that are no finite numbers in such an array, or a key that is none.
    """

    start: int
    rows: Float[np.ndarray, "tokens embed"] = field(repr=False)
    key: bytes

    def __post_init__(self) -> None:
        problems = list(_span_problems(self))
        if problems:
            raise RequestError("This image cannot be run", problems)

    @property
    def tokens(self) -> int:
        """Places that it takes."""
        return self.rows.shape[0]

    @property
    def end(self) -> int:
        """One behind its last id."""
        return self.start + self.tokens


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Scores are changed in this order: grammar, bias, repetition, frequency, presence, temperature; then min-p, top-k and top-p cut.

    Attributes:
      ids: prompt token ids.
      max_tokens: ids to draw at most.
      temperature: 0 is greedy.
      top_p: keep the likeliest ids whose probability reaches this, in (0, 1].
      top_k: keep this many likeliest ids; 0 keeps all.
      seed: of the draws; equal seeds and prompts give equal text.
      stops: ids that end the generation.
      min_p: drop ids less likely than this share of the likeliest; 0 keeps all.
      presence_penalty: taken once from the score of every id drawn before.
      frequency_penalty: taken as many times as the id was drawn before.
      repetition_penalty: divides a positive score, multiplies a negative one, of every id of prompt and answer; 1 changes
        nothing.
      bias: id -> added to its score.
      logprobs: alternatives to report with each drawn id.
      grammar: what the answer may be; None leaves it free.
      images: rows that take the place of embeddings, in the order of the prompt.
    """

    ids: Sequence[int]
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stops: Sequence[int] = ()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    logprobs: int = 0
    grammar: Grammar | None = None
    images: Sequence[ImageSpan] = ()

    @property
    def extras(self) -> tuple[str, ...]:
        """The fields asked for that only the engine's full programs know."""
        plain = {name: getattr(self, name) == neutral for name, neutral in _NEUTRAL.items()}
        return tuple(name for name, is_plain in plain.items() if not is_plain)


@dataclass(frozen=True)
class Event:
    """One drawn id of one request, or the end of it.

    Attributes:
      request: which one: its place among the requests given to a runner, its number in an engine.
      token: the id, None where only the end is reported.
      logprob: natural log of its probability at temperature 1.
      finish: set with a request's last event; ``stop`` reports the stop id as ``token`` too.
      top: the likeliest ids and their logprobs, likeliest first, as many as asked for.
      drafts: what became of the request's drafts so far, where the model has a draft.
    """

    request: int
    token: int | None
    logprob: float
    finish: FinishReason | None = None
    top: tuple[tuple[int, float], ...] = ()
    drafts: "DraftCounts | None" = None


@dataclass(frozen=True)
class DraftCounts:
    """What became of drafts.

    Attributes:
      verified: drafts that the target has looked at.
      stayed: steps by how many of their drafts stayed: none, one, and so on.
    """

    verified: int
    stayed: tuple[int, ...]

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        """Both together; of the same block length."""
        stayed = (mine + its for mine, its in zip(self.stayed, other.stayed, strict=True))
        return DraftCounts(self.verified + other.verified, tuple(stayed))


def check(request: Request, vocab: int, capacity: int, embed: int | None = None) -> None:
    """Refuses what the device would clamp, wrap or run out of.

    Args:
      vocab: ids must be below it.
      capacity: tokens a sequence can hold.
      embed: width of the rows of images; None where there may be none.

    Raises:
      RequestError: lists every problem with its limit.
    """
    ids, stops = _array(request.ids), _array(request.stops)
    problems = [*_wrong("the prompt", ids, vocab), *_wrong("stops", stops, vocab)]
    if ids.size == 0:
        problems.append("the prompt is empty; give at least one token")
    if ids.size >= capacity:
        problems.append(
            f"the prompt has {ids.size:,} tokens and a sequence holds {capacity:,} with its answer; "
            f"shorten it to {capacity - 1:,} or load with max_seq_len={ids.size + 1} or more"
        )
    if stops.size > MAX_STOPS:
        problems.append(f"{stops.size} stop ids; at most {MAX_STOPS} are kept on the device")
    problems += number_problems(**{name: getattr(request, name) for name, *_ in _LIMITS})
    problems += _bias_problems(request.bias, vocab)
    problems += _image_problems(request.images, ids.size, embed)
    if problems:
        raise RequestError("This request cannot be run", problems)


def refuse_extras(request: Request) -> None:
    """Refuses what only an engine's full programs do.

    Raises:
      RequestError: names every such field.
    """
    if request.extras:
        raise RequestError(
            "This request cannot be run",
            [f"{name} is not known to a batch that is run to its end" for name in request.extras],
            "Serve it (kimi-jax serve), or leave out " + ", ".join(request.extras) + ".",
        )


def number_problems(**numbers: Any) -> list[str]:
    """What is wrong with numbers of a request, by field; nothing else of the request is needed."""
    problems = []
    for name, kind, low, high in _LIMITS:
        if name not in numbers:
            continue
        value = numbers[name]
        if not _is(value, kind, low, high):
            what = "an integer" if kind is Integral else "a number"
            problems.append(f"{name} = {_shown(value)}; it must be {what} from {low} to {high}")
    return problems


def check_ids(
    given: Sequence[int], vocab: int, capacity: int, images: Sequence[ImageSpan] = (), embed: int | None = None
) -> None:
    """Refuses ids that cannot be scored: as :func:`check` does, but they may fill all of ``capacity``.

    Raises:
      RequestError: lists every problem with its limit.
    """
    ids = _array(given)
    problems = _wrong("the prompt", ids, vocab)
    if ids.size == 0:
        problems.append("the prompt is empty; give at least one token")
    if ids.size > capacity:
        problems.append(
            f"the prompt has {ids.size:,} tokens and a sequence holds {capacity:,}; load with max_seq_len={ids.size} or more"
        )
    problems += _image_problems(images, ids.size, embed)
    if problems:
        raise RequestError("These ids cannot be scored", problems)


_LIMITS = (
    ("max_tokens", Integral, 1, 1 << 30),
    ("temperature", Real, 0.0, 100.0),
    ("top_p", Real, 1e-6, 1.0),
    ("top_k", Integral, 0, 1 << 30),
    ("seed", Integral, 0, (1 << 32) - 1),
    ("min_p", Real, 0.0, 1.0),
    ("presence_penalty", Real, -2.0, 2.0),
    ("frequency_penalty", Real, -2.0, 2.0),
    ("repetition_penalty", Real, 0.01, 100.0),
    ("logprobs", Integral, 0, MAX_TOP),
)
"""Field of a request, what it must be, and its least and largest value."""

_NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "bias": {},
        "logprobs": 0,
        "grammar": None,
    }
)


_BFLOAT16_EXPONENT = 0x7F80
"""Bits that are all set in what is not finite, and only there."""

_short = reprlib.Repr()
_short.maxlong = 40


def _shown(value: object) -> str:
    try:
        return _short.repr(value)
    except ValueError:  # Python refuses to write an integer of thousands of digits
        return f"a {type(value).__name__} of thousands of digits"


def _array(ids: Sequence[int]) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(ids)
    except ValueError:  # lists of unequal lengths
        return np.empty((1, 1))


def _wrong(what: str, ids: np.ndarray[Any, Any], vocab: int) -> list[str]:
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        return [f"{what} must be a flat list of integer token ids"]
    bad = ids[(ids < 0) | (ids >= vocab)]
    return [f"{what} holds {bad.size} ids such as {bad[0]} outside the vocabulary 0..{vocab - 1}"] if bad.size else []


def _span_problems(span: ImageSpan) -> Iterator[str]:
    rows: Any = span.rows
    if (
        not isinstance(rows, np.ndarray)
        or rows.ndim != 2
        or 0 in rows.shape
        or not jnp.issubdtype(rows.dtype, jnp.floating)
    ):
        shape = f"{rows.dtype}{list(rows.shape)}" if isinstance(rows, np.ndarray) else type(rows).__name__
        yield f"its rows are {shape}; floating-point numbers in [tokens, embed] work"
    elif not _finite(rows):
        yield "its rows hold values that are not finite"
    if not isinstance(span.key, bytes) or not span.key:
        yield f"its key is {_shown(span.key)}; bytes that stand for its content work"


def _finite(rows: np.ndarray[Any, Any]) -> bool:
    if rows.dtype != BFLOAT16:
        return bool(np.isfinite(rows).all())
    # NumPy asks of a bfloat16 array while it holds the interpreter: most of a second for the largest picture
    exponents = rows.view(np.uint16) & _BFLOAT16_EXPONENT
    return not (exponents == _BFLOAT16_EXPONENT).any()


def _image_problems(images: Sequence[ImageSpan], length: int, embed: int | None) -> Iterator[str]:
    if images and embed is None:
        yield f"{len(images)} images; this engine was built for text only"
        return
    after = 0
    for number, span in enumerate(images):
        if not _is(span.start, Integral, after, length - span.tokens):
            where = f"from {after:,}" if after else "anywhere"
            yield (
                f"image {number} begins at {_shown(span.start)} with {span.tokens:,} ids; it must lie in the prompt of {length:,} "
                f"ids, {where}"
            )
            continue
        after = span.end
        if span.rows.shape[1] != embed:
            yield f"the rows of image {number} have {span.rows.shape[1]:,} values; those of this model have {embed:,}"


def _bias_problems(bias: Mapping[int, float], vocab: int) -> list[str]:
    if not isinstance(bias, Mapping):
        return [f"bias = {_shown(bias)}; it must map token ids to numbers"]
    problems = [f"{len(bias)} biased ids; at most {MAX_BIAS} are kept on the device"] if len(bias) > MAX_BIAS else []
    wrong = [number for number in bias if not _is(number, Integral, 0, vocab - 1)]
    if wrong:
        problems.append(f"bias names {len(wrong)} ids such as {_shown(wrong[0])} outside the vocabulary 0..{vocab - 1}")
    far = [value for value in bias.values() if not _is(value, Real, -LARGEST_BIAS, LARGEST_BIAS)]
    if far:
        problems.append(
            f"bias holds {len(far)} values such as {_shown(far[0])}; "
            f"each must be a number from {-LARGEST_BIAS} to {LARGEST_BIAS}"
        )
    return problems


def _is(value: Any, kind: type, low: float, high: float) -> bool:
    return not isinstance(value, bool) and isinstance(value, kind) and low <= value <= high  # pyright: ignore[reportOperatorIssue]
