"""Placeholders of pictures in a prompt, in chunks and in pages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.media.errors import MediaError
from kimi_jax.media.prompt import call_rows, chunk_rows, find_spans, page_marks
from kimi_jax.media.settings import Settings
from kimi_jax.media.size_plan import plan_size
from kimi_jax.testing.tokenizer import write_tiny_tokenizer
from kimi_jax.text.images import image_parts
from kimi_jax.text.markup import image_prompt
from kimi_jax.text.render import render
from kimi_jax.text.segments import Segment
from kimi_jax.text.tokenizer import Tokenizer

PAD = 99


def prompt(*parts: int) -> list[int]:
    """Text of so many ids, a picture of so many places, text ..."""
    return [PAD if index % 2 else 7 for index, count in enumerate(parts) for _ in range(count)]


def test_spans():
    # red when a picture is given the places of another
    spans = find_spans(prompt(3, 4, 1, 2, 0), PAD, [(4, b"a"), (2, b"b")])
    assert [(span.start, span.end, span.digest) for span in spans] == [(3, 7, b"a"), (8, 10, b"b")]
    assert find_spans([1, 2], PAD, []) == ()


@pytest.mark.parametrize(
    "ids, tokens, message",
    [
        (prompt(1, 3), [4], "3 image placeholders for 4 rows of 1 images"),
        (prompt(1, 5), [4], "5 image placeholders for 4 rows"),
        (prompt(1, 1), [], "1 image placeholders for 0 rows of 0 images"),
        (prompt(1, 2, 1, 2), [1, 3], "image 1 do not stand side by side"),
        (prompt(1, 2), [2, 0], "image 1 do not"),
    ],
)
def test_other_numbers_of_placeholders(ids, tokens, message):
    # red when rows are cut off or filled up, or a placeholder that no picture asked for gets a row
    with pytest.raises(MediaError, match=message):
        find_spans(ids, PAD, [(count, b"x") for count in tokens])


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=6),
    st.lists(st.integers(1, 5), min_size=1, max_size=12),
)
def test_chunks_put_together_are_the_whole(parts, cuts):
    # red when a picture that is cut by a chunk loses a row, begins anew in the next, or lands in its neighbour
    ids = np.array(prompt(*parts))
    counts = parts[1::2]
    spans = find_spans(ids.tolist(), PAD, [(count, b"x") for count in counts])
    rows = [1 + np.arange(count)[:, None] * 10.0 + number for number, count in enumerate(counts)]
    whole = np.zeros((len(ids), 1))
    whole[ids == PAD] = np.concatenate(rows)
    start = 0
    for cut in [*cuts, len(ids)]:
        count = min(cut, len(ids) - start)
        found = chunk_rows(spans, rows, start, count)
        wanted = ids[start : start + count] == PAD
        assert (found is None) == (not wanted.any())
        if found is not None:
            np.testing.assert_array_equal(found[0], whole[start : start + count])
            np.testing.assert_array_equal(found[1], wanted)
        start += count


def test_rows_of_another_picture():
    # red when rows that do not fit are taken all the same
    spans = find_spans(prompt(1, 3), PAD, [(3, b"x")])
    with pytest.raises(ValueError, match="3 placeholders has 4 rows"):
        chunk_rows(spans, [np.zeros((4, 2))], 0, 4)


def test_rows_of_a_call():
    # red when a row's pictures reach its neighbour or its padding
    spans = find_spans(prompt(1, 2), PAD, [(2, b"x")])
    chunk = chunk_rows(spans, [np.array([[5.0, 6.0], [7.0, 8.0]])], 0, 3)
    rows, here = call_rows([None, chunk, None], 4)
    assert here.tolist() == [[False] * 4, [False, True, True, False], [False] * 4]
    assert rows[1].tolist() == [[0, 0], [5, 6], [7, 8], [0, 0]]
    assert not rows[[0, 2]].any()
    assert call_rows([None, None], 4) is None


def test_marks_of_pages():
    # red when a page with a part of a picture has no mark of it, or one without has one
    spans = find_spans(prompt(3, 4, 2, 1, 6), PAD, [(4, b"A"), (1, b"B")])
    a, again, b, nothing = page_marks(spans, 4, 4)
    assert a == again != b and b and not nothing
    assert page_marks(spans, 5, 3) == [a, a + b, b""]
    assert page_marks(spans, 4, 1) == [a]
    other = find_spans(prompt(3, 4, 2, 1, 6), PAD, [(4, b"A"), (1, b"C")])
    assert page_marks(other, 4, 2) == [a, a]
    assert page_marks(other, 4, 4)[2] != b


def test_marks_that_must_differ():
    # red when digests run into one another, or one picture of six places counts as two of three
    def marks(*pictures):
        return page_marks(find_spans([PAD] * 6, PAD, pictures), 8, 1)

    several = [((3, b"A"), (3, b"BC")), ((3, b"AB"), (3, b"C")), ((6, b"ABC"),), ((2, b"A"), (4, b"BC"))]
    assert len({marks(*pictures)[0] for pictures in several}) == len(several)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder, size=1024)
    return Tokenizer.from_folder(folder)


def test_a_whole_conversation(tokenizer):
    # red when the resized size is written, placeholders are not widened, or text and images change places
    (pad,) = tokenizer.encode_segments([Segment("<|media_pad|>", True)])
    sizes = {"a": (640, 480), "b": (30, 16), "c": (10_000, 20)}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "<|media_pad|>"}, image("a"), image("b")]},
        {"role": "assistant", "content": "<|kimi_image_placeholder|>"},
        {
            "role": "user",
            "content": [image("c"), {"type": "text", "text": "<|media_begin|>image 1x1<|media_content|>"}],
        },
    ]
    found = [part.url for part in image_parts(messages)]
    plans = [plan_size(*sizes[name], Settings()) for name in found]
    prompts = [image_prompt(*sizes[name], plan.tokens) for name, plan in zip(found, plans, strict=True)]
    ids = tokenizer.encode_segments(render(messages, image_prompts=prompts))
    spans = find_spans(ids, pad, [(plan.tokens, name.encode()) for name, plan in zip(found, plans, strict=True)])
    assert [(span.tokens, span.digest) for span in spans] == [(414, b"a"), (2, b"b"), (256, b"c")]
    for span, name in zip(spans, found, strict=True):
        width, height = sizes[name]
        assert tokenizer.decode(ids[: span.start]).endswith(f"image {width}x{height}<|media_content|>")


def image(name: str) -> dict:
    return {"type": "image_url", "image_url": {"url": name}}
