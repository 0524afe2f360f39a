"""The images of a conversation, in the order in which the renderer asks for their prompts. Source: chat-format, section 6."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kimi_jax.text.errors import ChatError, shown
from kimi_jax.text.tool_results import Message, placed

IMAGE_PARTS = ("image", "image_url")


class ImagePart(NamedTuple):
    """An image that a message refers to: its place in the request, for errors, and its URL, empty where it has none."""

    where: str
    url: str


def image_parts(messages: Sequence[Message], *, bare: bool = False) -> list[ImagePart]:
    """Every image that `render` gives a prompt to, in its order: tool results are put in the order of their calls.

    Text is never searched for images, whatever it says.

    Args:
      messages: of a conversation.
      bare: whether a part may have no URL, its picture coming from elsewhere.

    Raises:
      ChatError: image parts without a URL, each with its place in the request.
    """
    found, problems = [], []
    for item in placed(messages):
        if isinstance(item, ChatError):
            continue  # the renderer says so
        for where, part in _parts(item.message, f"messages[{item.index}]"):
            url = _url(part)
            if isinstance(url, str) or (bare and url is None):
                found.append(ImagePart(where, url or ""))
            else:
                problems.append(
                    f"{where} is an image part whose URL is {shown(url)}; "
                    '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}} works'
                )
    if problems:
        raise ChatError(*problems)
    return found


def _parts(message: Message, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    content = message.get("content")
    declares = message.get("role") in ("system", "developer") and message.get("tools")
    if declares or not isinstance(content, list | tuple):
        return
    for at, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS:
            yield f"{where}.content[{at}]", part


def _url(part: Mapping[str, Any]) -> Any:
    given = next((part[key] for key in ("image_url", "image", "url") if part.get(key) is not None), None)
    return given.get("url") if isinstance(given, Mapping) else given
