"""Examples as token ids, and which of them are trained: through the renderer that makes every prompt."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from kimi_jax.problems import ProblemsError
from kimi_jax.text.markup import image_prompt
from kimi_jax.text.render import render
from kimi_jax.text.segments import Segment
from kimi_jax.text.tokenizer import Tokenizer
from kimi_jax.train.data.drawing import TOKEN
from kimi_jax.train.data.example import Example, Pixels


class Encoded(NamedTuple):
    """One example.

    Attributes:
      ids: the whole conversation.
      mask: True where the id is one that the assistant writes, the end of its message included: what a loss is taken of.
    """

    ids: Int32[np.ndarray, " tokens"]
    mask: Bool[np.ndarray, " tokens"]


class EncodeLengthError(ProblemsError):
    """An example longer than asked for. It is never cut: half an answer teaches to stop in mid-sentence."""


def encode(example: Example, tokenizer: Tokenizer, most: int | None = None) -> Encoded:
    """The ids of a conversation and the mask of its loss.

    Every assistant message is trained: for each, the ids before it are those of the prompt that would ask for it.

    Args:
      example: any.
      tokenizer: of the model.
      most: tokens that are accepted.

    Raises:
      EncodeLengthError: more tokens than that.
    """
    ids: list[int] = []
    mask: list[bool] = []
    known: dict[Segment, list[int]] = {}  # tags come again and again
    for segment, trained in parts(example):
        some = known.get(segment) or known.setdefault(segment, tokenizer.encode(*segment))
        ids += some
        mask += [trained] * len(some)
    if most is not None and len(ids) > most:
        raise EncodeLengthError(
            f"This {example.task} example is too long", [f"it has {len(ids):,} tokens, the limit is {most:,}"]
        )
    return Encoded(np.array(ids, np.int32), np.array(mask, bool))


def parts(example: Example) -> list[tuple[Segment, bool]]:
    """The segments of a conversation, each with whether the assistant writes it."""
    whole = conversation(example)
    trained = [False] * len(whole)
    for at, message in enumerate(example.messages):
        if message["role"] != "assistant":
            continue
        before, after = _rendered(example, at, open_reply=True), _rendered(example, at + 1, open_reply=False)
        assert (
            whole[: len(before)] == before and whole[: len(after)] == after
        )  # a prompt is a prefix of what follows it
        trained[len(before) : len(after)] = [True] * (len(after) - len(before))
    return list(zip(whole, trained, strict=True))


def conversation(example: Example) -> list[Segment]:
    """The segments of a whole conversation."""
    return _rendered(example, len(example.messages), open_reply=False)


def prompt_ids(example: Example, tokenizer: Tokenizer) -> list[int]:
    """The ids that ask for the last message."""
    return tokenizer.encode_segments(_rendered(example, len(example.messages) - 1, open_reply=True))


def _rendered(example: Example, messages: int, *, open_reply: bool) -> list[Segment]:
    shown = example.messages[:messages]
    pictures = sum(_pictures(message["content"]) for message in shown)
    return render(
        shown,
        tools=example.tools,
        thinking=example.thinking,
        effort=example.effort,
        add_generation_prompt=open_reply,
        image_prompts=[_image_prompt(pixels) for pixels in example.images[:pictures]],
    )


def _pictures(content: str | Sequence[Mapping[str, str]]) -> int:
    return 0 if isinstance(content, str) else sum(part["type"] == "image" for part in content)


def _image_prompt(pixels: Pixels) -> str:
    height, width = pixels.shape[:2]
    return image_prompt(width, height, (height // TOKEN) * (width // TOKEN))
