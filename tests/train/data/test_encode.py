"""Examples as ids: the bytes of inference, the mask of what the assistant writes, and back through the parser."""

import json

import numpy as np
import pytest

from kimi_jax.completion import AnswerBuilder, Reading
from kimi_jax.engine.request import Event
from kimi_jax.text.markup import image_prompt
from kimi_jax.text.render import render
from kimi_jax.train.data.drawing import picture, png
from kimi_jax.train.data.encode import EncodeLengthError, encode, prompt_ids
from kimi_jax.train.data.tasks import MODES, PICTURES, TASKS, example

LONG_CHAT = ("chat", "result", "shapes")


def read(one, ids, tokenizer):
    """What a model that draws these ids has answered."""
    builder = AnswerBuilder(Reading(tokenizer, True, one.thinking, bool(one.tools), (), tokenizer.stop_ids), 0)
    for number in ids[:-1]:
        builder.push(Event(0, int(number), 0.0, None))
    builder.push(Event(0, int(ids[-1]), 0.0, "stop"))
    return builder.completion()


@pytest.mark.parametrize("name", TASKS)
def test_what_is_taught_is_what_the_parser_reads(name, nano_tokenizer):
    for at, (mode, _) in enumerate(MODES * 2):
        one = example(name, "train", 4, at, mode)
        ids, mask = encode(one, nano_tokenizer)
        prompt = prompt_ids(one, nano_tokenizer)
        assert ids[: len(prompt)].tolist() == prompt  # red when prompts are encoded in another way than conversations
        assert not mask[len(prompt) - 1] and mask[len(prompt) :].all()  # red when the open think tag is trained
        found = read(one, ids[len(prompt) :], nano_tokenizer)
        assert found.finish_reason == ("tool_calls" if one.reply.get("tool_calls") else "stop")
        assert (found.reasoning or "") == (one.reply["reasoning_content"] if one.thinking else "")
        assert found.text == one.reply["content"]
        calls = [(call.name, json.loads(call.arguments)) for call in found.tool_calls]
        wanted = [call["function"] for call in one.reply.get("tool_calls", ())]
        assert calls == [(call["name"], json.loads(call["arguments"])) for call in wanted]


@pytest.mark.parametrize("name", LONG_CHAT)
def test_every_reply_and_nothing_else_is_trained(name, nano_tokenizer):
    end = nano_tokenizer.special_id("<|end_of_msg|>")
    for at in range(4):
        one = example(name, "train", 6, at)
        ids, mask = encode(one, nano_tokenizer)
        starts = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])) == 1)
        stops = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])) == -1)
        replies = [message for message in one.messages if message["role"] == "assistant"]
        assert len(starts) == len(replies)
        assert (ids[stops - 1] == end).all()  # red when the end of a message is not trained
        for start, stop, message in zip(starts, stops, replies, strict=True):
            text = nano_tokenizer.decode(ids[start:stop].tolist())
            assert message["content"] in text and "user" not in text
            opened = nano_tokenizer.decode(ids[:start].tolist())
            assert opened.endswith("<|open|>think<|sep|>" if one.thinking else "<|open|>response<|sep|>")


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_drawings_take_the_way_of_every_picture(name, nano_tokenizer):
    pytest.importorskip("PIL", reason="pip install 'kimi-jax[vision]'")
    from kimi_jax.media.limits import Limits
    from kimi_jax.media.prepare import prepare
    from kimi_jax.media.settings import Settings

    for at in range(4):
        one = example(name, "train", 1, at)
        ours, theirs = picture(one.images[0]), prepare(png(one.images[0]), Settings(), Limits())
        assert (ours.width, ours.height, ours.grid) == (theirs.width, theirs.height, theirs.grid)
        np.testing.assert_array_equal(ours.patches, theirs.patches)  # red when patches are cut column by column
        prompts = [image_prompt(theirs.width, theirs.height, theirs.tokens)]
        segments = render(one.prompt, thinking=one.thinking, effort=one.effort, image_prompts=prompts)
        assert nano_tokenizer.encode_segments(segments) == prompt_ids(one, nano_tokenizer)


def test_nothing_is_cut_in_silence(nano_tokenizer):
    one = example("needle:200", "train", 0, 0)
    size = len(encode(one, nano_tokenizer).ids)
    assert len(encode(one, nano_tokenizer, most=size).ids) == size
    with pytest.raises(EncodeLengthError, match=rf"{size} tokens, the limit is {size - 1}"):
        encode(one, nano_tokenizer, most=size - 1)


@pytest.mark.parametrize("length", [100, 400, 1600])
def test_notes_are_about_as_long_as_asked_for(length, nano_tokenizer):
    sizes = [
        len(encode(example(f"needle:{length}", "held-out", 0, at, (False, None)), nano_tokenizer).ids)
        for at in range(5)
    ]
    assert 0.85 * length < np.mean(sizes) < 1.2 * length + 60
