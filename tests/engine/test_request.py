import numpy as np
import pytest

from kimi_jax.engine.request import (
    MAX_BIAS,
    MAX_STOPS,
    ImageSpan,
    Request,
    RequestError,
    check,
    check_ids,
    refuse_extras,
)
from kimi_jax.ops.sample import extras
from kimi_jax.precision import BFLOAT16

VOCAB, CAPACITY = 100, 32


def problems(ids=(1, 2, 3), **fields):
    with pytest.raises(RequestError) as caught:
        check(Request(ids, **fields), VOCAB, CAPACITY)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"ids": [0, VOCAB - 1]},
        {"ids": np.arange(CAPACITY - 1)},
        {"ids": np.array([1], np.uint8)},
        {"ids": (5,) * (CAPACITY - 1)},
        {"max_tokens": 1, "temperature": 0, "top_p": 1, "top_k": 0, "seed": 0},
        {"max_tokens": 1 << 30, "temperature": 100.0, "top_p": 1e-6, "top_k": 1 << 30, "seed": (1 << 32) - 1},
        {"max_tokens": np.int64(5), "temperature": np.float32(0.5), "top_p": np.float64(0.5), "seed": np.uint32(7)},
        {"stops": [0, VOCAB - 1]},
        {"stops": range(MAX_STOPS)},
        {"min_p": 1, "presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 0.01, "logprobs": 20},
        {"min_p": 0.0, "presence_penalty": 2, "frequency_penalty": -2.0, "repetition_penalty": 100, "logprobs": 0},
        {"bias": {0: -100, VOCAB - 1: 100.0, np.int64(5): np.float32(0.5)}},
    ],
)
def test_what_is_accepted(fields):
    check(Request(**{"ids": [1, 2, 3], **fields}), VOCAB, CAPACITY)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([], "the prompt is empty; give at least one token"),
        ([1, -1], "the prompt holds 1 ids such as -1 outside the vocabulary 0..99"),
        ([VOCAB, 1, 500], "the prompt holds 2 ids such as 100 outside the vocabulary 0..99"),
        ([1 << 40], "ids such as 1099511627776 outside"),
        ([1 << 70], "the prompt must be a flat list of integer token ids"),
        ([1.0], "the prompt must be a flat list of integer token ids"),
        ([True], "the prompt must be a flat list of integer token ids"),
        (["1"], "the prompt must be a flat list of integer token ids"),
        ("text", "the prompt must be a flat list of integer token ids"),
        (7, "the prompt must be a flat list of integer token ids"),
        ([[1, 2]], "the prompt must be a flat list of integer token ids"),
        ([[1, 2], [3]], "the prompt must be a flat list of integer token ids"),  # red: NumPy's own ValueError
        (
            [1] * CAPACITY,
            "the prompt has 32 tokens and a sequence holds 32 with its answer; shorten it to 31 or load with max_seq_len=33",
        ),
    ],
)
def test_prompts_that_are_refused(ids, said):  # PF-63, PF-75
    (problem,) = problems(ids)
    assert said in problem


@pytest.mark.parametrize(
    ("field", "values", "limits"),
    [
        ("max_tokens", [0, -1, (1 << 30) + 1, 1.0, "1", None, True], "an integer from 1 to 1073741824"),
        ("temperature", [-0.1, 100.1, float("nan"), float("inf"), "1", None, True], "a number from 0.0 to 100.0"),
        ("top_p", [0, 0.0, 1.01, -1, float("nan"), None, True], "a number from 1e-06 to 1.0"),
        ("top_k", [-1, (1 << 30) + 1, 1.5, None, False], "an integer from 0 to 1073741824"),
        ("seed", [-1, 1 << 32, 0.5, None, "x"], "an integer from 0 to 4294967295"),
        ("min_p", [-0.1, 1.1, float("nan"), None, True], "a number from 0.0 to 1.0"),
        ("presence_penalty", [-2.1, 2.1, float("nan"), "1"], "a number from -2.0 to 2.0"),
        ("frequency_penalty", [-2.1, 2.1, float("inf"), False], "a number from -2.0 to 2.0"),
        ("repetition_penalty", [0, -1.0, 101, float("nan"), None], "a number from 0.01 to 100.0"),
        ("logprobs", [-1, 21, 1.0, None, True], "an integer from 0 to 20"),
    ],
)
def test_every_limit(field, values, limits):
    for value in values:
        (problem,) = problems(**{field: value})
        assert problem == f"{field} = {value!r}; it must be {limits}"


@pytest.mark.parametrize(
    ("stops", "said"),
    [
        (range(MAX_STOPS + 1), "17 stop ids; at most 16 are kept on the device"),
        ([-1], "stops holds 1 ids such as -1 outside"),  # on the device -1 is an empty place
        ([VOCAB], "stops holds 1 ids such as 100 outside"),
        (["x"], "stops must be a flat list"),
        (5, "stops must be a flat list"),
    ],
)
def test_stop_ids(stops, said):
    (problem,) = problems(stops=stops)
    assert said in problem


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        ({-1: 1.0}, ["bias names 1 ids such as -1 outside the vocabulary 0..99"]),  # on the device -1 is an empty place
        ({VOCAB: 1.0, "7": 1.0}, ["bias names 2 ids such as 100 outside"]),
        ({True: 1.0}, ["bias names 1 ids such as True outside"]),
        (
            {1: 100.5, 2: float("nan"), 3: "x"},
            ["bias holds 3 values such as 100.5; each must be a number from -100.0 to 100.0"],
        ),
        ([1, 2], ["bias = [1, 2]; it must map token ids to numbers"]),
        (
            {-number: 200 for number in range(1, 302)},
            ["301 biased ids; at most 300", "301 ids such as -1", "301 values"],
        ),
    ],
)
def test_bias(bias, said):
    found = problems(bias=bias)
    assert len(found) == len(said)
    for problem, part in zip(found, said, strict=True):
        assert part in problem


def test_as_many_biased_ids_as_the_device_has_places():
    assert MAX_BIAS == extras.BIAS


def test_all_at_once():
    wrong = {"max_tokens": 0, "temperature": -1, "top_p": 2, "top_k": -1, "seed": -1, "stops": range(90)}
    more = {
        "min_p": 2,
        "presence_penalty": 3,
        "frequency_penalty": 3,
        "repetition_penalty": 0,
        "logprobs": 30,
        "bias": 3,
    }
    assert len(problems([500] * 40, **wrong, **more)) == 14  # red when the first one ends the check


class TestExtras:
    def test_what_asks_for_nothing_more(self):
        neutral = {
            "min_p": 0,
            "presence_penalty": 0,
            "repetition_penalty": 1,
            "bias": {},
            "logprobs": 0,
            "grammar": None,
        }
        assert Request([1], temperature=1.0, top_k=3, stops=[1], **neutral).extras == ()

    def test_a_batch_refuses_each_by_name(self):
        request = Request([1], min_p=0.5, bias={1: 1.0}, logprobs=2)
        with pytest.raises(RequestError) as caught:
            refuse_extras(request)
        assert [problem.split()[0] for problem in caught.value.problems] == ["min_p", "bias", "logprobs"]
        refuse_extras(Request([1]))


class TestIdsToScore:
    def test_they_may_fill_the_sequence(self):
        check_ids([1] * CAPACITY, VOCAB, CAPACITY)
        with pytest.raises(RequestError, match="has 33 tokens and a sequence holds 32; load with max_seq_len=33"):
            check_ids([1] * (CAPACITY + 1), VOCAB, CAPACITY)

    def test_all_at_once(self):
        with pytest.raises(RequestError, match="2 problems") as caught:
            check_ids([-1] * 50, VOCAB, CAPACITY)
        assert "such as -1 outside" in caught.value.problems[0]
        with pytest.raises(RequestError, match="empty"):
            check_ids([], VOCAB, CAPACITY)


class TestImages:
    def span(self, start, tokens, embed=4, dtype=np.float32):
        return ImageSpan(start, np.ones((tokens, embed), dtype), b"key")

    def test_what_is_accepted(self):
        for dtype in (np.float32, BFLOAT16):
            spans = (self.span(0, 3, dtype=dtype), self.span(3, 1, dtype=dtype), self.span(9, 1, dtype=dtype))
            check(Request([1] * 10, images=spans), VOCAB, CAPACITY, 4)

    @pytest.mark.parametrize(
        ("places", "embed", "said"),
        [
            ([(-1, 2)], 4, "image 0 begins at -1 with 2 ids; it must lie in the prompt of 10 ids"),
            ([(9, 2)], 4, "image 0 begins at 9 with 2 ids"),  # red when its rows would reach the answer
            ([(4, 2), (5, 2)], 4, "image 1 begins at 5 with 2 ids; it must lie in the prompt of 10 ids, from 6"),
            ([(4, 2), (0, 2)], 4, "image 1 begins at 0"),
            ([(1.0, 2)], 4, "image 0 begins at 1.0"),
            ([(4, 2)], 5, "the rows of image 0 have 4 values; those of this model have 5"),
            ([(4, 2)], None, "1 images; this engine was built for text only"),
        ],
    )
    def test_places_that_are_refused(self, places, embed, said):
        # red when rows would be written over text, over one another, or outside the prompt
        with pytest.raises(RequestError) as caught:
            check(Request([1] * 10, images=[self.span(*place) for place in places]), VOCAB, CAPACITY, embed)
        (problem,) = caught.value.problems
        assert said in problem

    @pytest.mark.parametrize(
        ("rows", "key", "said"),
        [
            (np.ones(3, np.float32), b"k", "float32[3]; floating-point numbers in [tokens, embed] work"),
            (np.ones((0, 3), np.float32), b"k", "float32[0, 3]"),
            (np.ones((2, 3), np.int32), b"k", "int32[2, 3]"),
            ([[1.0]], b"k", "its rows are list"),
            (np.full((2, 3), np.nan, np.float32), b"k", "not finite"),
            (np.full((2, 3), -np.inf, BFLOAT16), b"k", "not finite"),
            (np.full((2, 3), np.nan, BFLOAT16), b"k", "not finite"),
            (np.ones((2, 3), np.float32), b"", "its key is b''"),
            (np.ones((2, 3), np.float32), "k", "its key is 'k'"),
        ],
    )
    def test_rows_that_are_refused(self, rows, key, said):
        # red when what is not finite, or no row at all, reaches the model
        with pytest.raises(RequestError, match="image") as caught:
            ImageSpan(0, rows, key)
        assert said in caught.value.problems[0]
