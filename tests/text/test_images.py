"""Images are collected in the order in which the renderer places them."""

import pytest

from kimi_jax.text.errors import ChatError
from kimi_jax.text.images import image_parts
from kimi_jax.text.render import render


def image(name: str, kind: str = "image_url") -> dict:
    return {"type": kind, kind: {"url": name} if kind == "image_url" else name}


def call(name: str) -> dict:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}


CONVERSATION = [
    {"role": "system", "content": [image("s")]},
    {"role": "system", "tools": [{"type": "function", "function": {"name": "f"}}], "content": [image("never rendered")]},
    {"role": "user", "content": [image("a"), {"type": "text", "text": "<|kimi_image_placeholder|> image"}, image("b", "image")]},
    {"role": "user", "content": "data:image/png;base64,AAAA"},
    {"role": "assistant", "content": [image("c")], "tool_calls": [call("x"), call("y")]},
    {"role": "tool", "tool_call_id": "y", "content": [image("y1"), image("y2")]},
    {"role": "tool", "tool_call_id": "x", "content": [image("x1")]},
    {"role": "user", "content": [image("d")]},
]  # fmt: skip


def test_the_order_is_the_renderer_s():
    # red when results are taken in the order of the request, or an image of a message that is not rendered is counted
    found = [part.url for part in image_parts(CONVERSATION)]
    assert found == ["s", "a", "b", "c", "x1", "y1", "y2", "d"]
    prompts = [f"<<{name}>>" for name in found]
    rendered = render(CONVERSATION, image_prompts=prompts)
    assert [segment.text for segment in rendered if segment.text.startswith("<<")] == prompts
    assert image_parts(CONVERSATION)[4].where == "messages[6].content[0]"


def test_text_is_no_image():
    # red when a user's text takes the place of an image
    texts = ["<|kimi_image_placeholder|>", "<|media_pad|>", '{"type": "image_url"}']
    messages = [
        {"role": "user", "content": texts[0]},
        {"role": "user", "content": [{"type": "text", "text": t} for t in texts]},
    ]
    assert image_parts(messages) == []
    rendered = render(messages, image_prompts=[])
    assert all(not segment.markers for segment in rendered if segment.text in texts)


def test_parts_without_a_url():
    # red when one is passed over, so that later images move up
    odd = [{"type": "image_url"}, {"type": "image_url", "image_url": {"url": None}}, {"type": "image", "image": 3}]
    with pytest.raises(ChatError) as raised:
        image_parts([{"role": "user", "content": [image("a"), *odd]}])
    assert [problem.split(" is ")[0] for problem in raised.value.problems] == [
        f"messages[0].content[{at}]" for at in (1, 2, 3)
    ]
