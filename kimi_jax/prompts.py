"""What a caller hands in, a text, a conversation or ids, each with images: made token ids and pictures in their places."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from kimi_jax.config import KimiConfig
from kimi_jax.engine.request import ImageSpan
from kimi_jax.image_encoder import IMAGE_TYPES, Image, ImageEncoder
from kimi_jax.media.errors import MediaError
from kimi_jax.media.picture import Picture
from kimi_jax.media.prompt import Span, find_spans
from kimi_jax.problems import ProblemsError
from kimi_jax.text.effort import REQUESTED
from kimi_jax.text.images import image_parts
from kimi_jax.text.markup import image_prompt
from kimi_jax.text.render import render
from kimi_jax.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


class PromptError(ProblemsError):
    """A prompt that this model cannot read."""


class Read(NamedTuple):
    """A prompt made ready.

    Attributes:
      ids: placeholders of images widened.
      pictures: its images in order.
      places: of their placeholders.
      chat: whether it is a conversation.
    """

    ids: list[int]
    pictures: list[Picture]
    places: tuple[Span, ...]
    chat: bool


@dataclass(frozen=True)
class PromptReader:
    """Reads prompts for one model.

    Attributes:
      tokenizer: None for ids only.
      vision: None for text only.
      no_vision: why there is none.
    """

    config: KimiConfig
    tokenizer: Tokenizer | None
    vision: ImageEncoder | None
    no_vision: str = ""

    def read(
        self, prompt: Prompt, images: Any, tools: Any = None, thinking: bool = True, effort: str | None = "max"
    ) -> Read:
        """A str is one user message, its images before it; a list of messages a conversation; ids are used as they are.

        Args:
          prompt: any of these.
          images: one or a list; of a conversation those for its image parts without a URL, in the order of the prompt.
          tools, thinking, effort: of a conversation; an effort as requests name it (``text.effort``).

        Raises:
          PromptError: no prompt, text for a model without a tokenizer, images for one without a tower.
          ChatError: messages that cannot be rendered.
          MediaError: an image that cannot be read, or images and places for them that differ in number.
        """
        given = image_list(images)
        messages = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if not (isinstance(prompt, str) or messages):
            if tools:
                problems = ["the prompt is token ids, used as they are; give messages"]
                raise PromptError("Tools cannot be offered", problems)
            return self.read_ids(prompt, given)
        if self.tokenizer is None:
            raise self.no_text("text prompts")
        conversation = (
            [_user_message(prompt, len(given))] if isinstance(prompt, str) else cast(Sequence[Message], prompt)
        )
        pictures = self._pictures(conversation, given)
        prompts = [image_prompt(picture.width, picture.height, picture.tokens) for picture in pictures]
        told = REQUESTED.get(effort, effort) if isinstance(effort, str) else effort
        segments = render(conversation, tools=tools, thinking=thinking, effort=told, image_prompts=prompts)
        ids = self.tokenizer.encode_segments(segments)
        return Read(ids, pictures, self._places(ids, pictures), True)

    def read_ids(self, ids: Any, images: Any) -> Read:
        """Token ids that hold a run of placeholders for each image."""
        numbers, given = plain_ids(ids), image_list(images)
        vision = self._seeing() if given else None
        wanted = [(f"images[{at}]", partial(vision.read, image)) for at, image in enumerate(given)] if vision else []
        pictures = vision.read_each(wanted) if vision else []
        return Read(numbers, pictures, self._places(numbers, pictures), False)

    def spans(self, read: Read) -> tuple[ImageSpan, ...]:
        """What a request carries of the images of a prompt; here the tower runs."""
        return self._seeing().spans(read.places, read.pictures) if read.pictures else ()

    def no_text(self, what: str) -> PromptError:
        """The error of text for a model without a tokenizer."""
        return PromptError(
            f"This model cannot read {what}",
            [f"{self.config.name} has no tokenizer files beside it"],
            "Give token ids (--ids FILE), or add tiktoken.model and tokenizer_config.json to the folder.",
        )

    def _pictures(self, messages: Any, given: list[Image]) -> list[Picture]:
        """The images of a conversation in its order: those behind URLs, and the given ones for the parts without."""
        sound = all(isinstance(message, Mapping) for message in messages)  # the renderer says what is wrong
        parts = image_parts(messages, bare=True) if sound else []
        bare = sum(not part.url for part in parts)
        if bare != len(given):
            raise MediaError(
                f"messages have {bare} image parts without a URL for {len(given)} images given beside them"
            )
        if not parts:
            return []
        vision, beside = self._seeing(), iter(enumerate(given))
        wanted = []
        for where, url in parts:
            if url:
                wanted.append((where, partial(vision.read_url, url)))
            else:
                number, image = next(beside)
                wanted.append((f"images[{number}]", partial(vision.read, image)))
        return vision.read_each(wanted)

    def _places(self, ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[Span, ...]:
        """A placeholder without an image is an error wherever images are read; a text model has no placeholders."""
        if self.vision is None or self.config.media_placeholder is None:
            return ()
        return find_spans(ids, self.config.media_placeholder, [(one.tokens, one.digest) for one in pictures])

    def _seeing(self) -> ImageEncoder:
        if self.vision is None:
            raise PromptError(f"{self.config.name} cannot read images", [self.no_vision], "Text works.")
        return self.vision


def image_list(images: Any) -> list[Image]:
    """Images as a list; one alone is meant as itself.

    Raises:
      PromptError: neither.
    """
    if images is None:
        return []
    if isinstance(images, IMAGE_TYPES):
        return [images]
    if not isinstance(images, Sequence):
        problems = [f"images is of type {type(images).__name__}; a list of images works"]
        raise PromptError("These images cannot be read", problems)
    return list(images)


def image_lists(images: Any, prompts: int) -> list[Any]:
    """The images of each prompt of a batch.

    Raises:
      PromptError: not one list for each.
    """
    if images is None or (isinstance(images, Sequence) and len(images) == 0):
        return [()] * prompts
    if isinstance(images, IMAGE_TYPES) or not isinstance(images, Sequence) or len(images) != prompts:
        raise PromptError("These images cannot be read", [f"give a list of images for each of the {prompts} prompts"])
    return list(images)


def plain_ids(ids: Any) -> list[int]:
    """Token ids as a list.

    Raises:
      PromptError: anything else.
    """
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of unequal lengths
        array = np.empty((1, 1))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        problems = ["give a str, a list of messages, or a flat list of integer token ids"]
        raise PromptError("This prompt cannot be used", problems)
    return [int(i) for i in array]


def _user_message(text: str, images: int) -> Message:
    if not images:
        return {"role": "user", "content": text}
    return {"role": "user", "content": [*[{"type": "image"}] * images, {"type": "text", "text": text}]}
