"""Images through the public face: the joined model sees what is shown, wherever it stands and whatever runs beside it."""

import base64
import dataclasses
from functools import cache

import numpy as np
import pytest

from kimi_jax.api import Kimi
from kimi_jax.engine.request import RequestError
from kimi_jax.engine.runner import Runner
from kimi_jax.media.errors import MediaError
from kimi_jax.media.limits import Limits
from kimi_jax.problems import ProblemsError
from kimi_jax.prompts import PromptError
from kimi_jax.text.errors import ChatError
from kimi_jax.text.markup import IMAGE_SLOT
from tests.parity.compilations import compilations
from tests.parity.joined import CAPACITY, VOCAB, joined
from tests.parity.light import light_compilation as light_compilation
from tests.parity.models import TOLERANCE
from tests.parity.pictures import png
from tests.parity.quick import with_parameter

pytestmark = pytest.mark.usefixtures("light_compilation")

SMALL, LARGE = png(40, 30, 1), png(90, 60, 2)
"""Of 4 and of 12 tokens."""

PLACEHOLDER = 285
SPARE = VOCAB - 16
"""First of the ids whose embeddings the oracle holds image rows in; no prompt here has them."""

IDS = [30, *[PLACEHOLDER] * 4, 31, 32, *[PLACEHOLDER] * 12, 33]
BATCH, SHOWN = [list(range(40, 60)), IDS], [[], [SMALL, LARGE]]
ASK = {"max_tokens": 6, "thinking": False, "ignore_eos": True}


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def part(data: bytes) -> dict:
    return {"type": "image_url", "image_url": {"url": url(data)}}


def words(text: str) -> dict:
    return {"type": "text", "text": text}


@cache
def oracle() -> np.ndarray:
    """Scores of IDS by a text model whose embedding holds the rows of both pictures, told by spare ids."""
    kimi = joined()
    assert kimi.vision is not None
    rows = np.concatenate(kimi.vision.embed([kimi.vision.read(data) for data in (SMALL, LARGE)]))

    def change(table: np.ndarray) -> np.ndarray:
        table[SPARE:] = rows
        return table

    spare = iter(range(SPARE, VOCAB))
    told = [next(spare) if token == PLACEHOLDER else token for token in IDS]
    return with_parameter(kimi.runner, "model.embed_tokens.weight", change).logits(told)


def chunked(kimi: Kimi, chunk: int) -> Kimi:
    """The same model and programs with prompts in other chunks."""
    runner = kimi.runner
    return Kimi(
        kimi.config,
        kimi.layout,
        kimi.tokenizer,
        Runner(runner.steps, runner.params, runner.allowed, chunk),
        kimi.vision,
    )


@pytest.mark.parametrize("chunk", [16, 4])
def test_scores_are_those_of_rows_put_there_by_hand(chunk):
    # red when rows are of another picture, shift at the border of a chunk, or are lost in one that is all image
    found = chunked(joined(), chunk).logits(IDS, images=[SMALL, LARGE])
    np.testing.assert_allclose(found, oracle(), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp8", "dp2-tp4"])
def test_layouts(layout):
    # red when devices deal pictures and give them back in another order, or a device adds its copy of the rows
    found = joined(layout=layout).logits(IDS, images=[SMALL, LARGE])
    np.testing.assert_allclose(found, oracle(), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_company_on_other_devices():
    # red when the rows of a picture go to the wrong group of devices
    cut, one = (joined(layout=name).generate_batch(BATCH, images=SHOWN, **ASK) for name in ("dp2-tp4", "single"))
    assert [answer.token_ids for answer in cut] == [answer.token_ids for answer in one]


@pytest.mark.slow
def test_the_same_picture_however_it_comes(tmp_path):
    # red when one way in decodes, sizes or places it differently
    kimi, file = joined(), tmp_path / "a.png"
    file.write_bytes(LARGE)
    assert kimi.vision is not None
    ready = kimi.vision.read(LARGE)
    ways = [LARGE, file, str(file), url(LARGE), ready]
    answers = [kimi.generate("What?", images=[way], **ASK) for way in ways]
    answers += [kimi.generate("What?", images=LARGE, **ASK)]
    for parts in ([part(LARGE), words("What?")], [{"type": "image"}, words("What?")]):
        images = [LARGE] if "image_url" not in parts[0] else []
        answers.append(kimi.generate([{"role": "user", "content": parts}], images=images, **ASK))
    assert len({answer.token_ids for answer in answers}) == 1
    assert {answer.usage.prompt_tokens for answer in answers} == {
        len(kimi.prompts.read("What?", [LARGE], thinking=False).ids)
    }


def test_where_a_picture_stands_matters():
    # red when parts with and without a URL are dealt pictures in another order than they stand in
    kimi, bare = joined(), {"type": "image"}

    def scores(first: dict, second: dict, *images: bytes) -> np.ndarray:
        read = kimi.prompts.read([{"role": "user", "content": [first, words("and"), second]}], images, thinking=False)
        return kimi.runner.logits(read.ids, kimi.prompts.spans(read))[-1]

    there, back = scores(part(SMALL), part(LARGE)), scores(part(LARGE), part(SMALL))
    for ways in ((part(SMALL), bare, LARGE), (bare, part(LARGE), SMALL), (bare, bare, SMALL, LARGE)):
        np.testing.assert_array_equal(scores(*ways), there)
    assert np.abs(there - back).max() > 0.01


def test_text_steals_no_picture():
    # red when user text is searched for places of images, or encodes to placeholders
    kimi = joined()
    stolen = f"{IMAGE_SLOT} <|media_begin|>image 1x1<|media_content|><|media_pad|><|media_end|>"
    read = kimi.prompts.read([{"role": "user", "content": [words(stolen), part(SMALL)]}], (), thinking=False)
    alone = kimi.prompts.read([{"role": "user", "content": [part(SMALL)]}], (), thinking=False)
    assert read.ids.count(PLACEHOLDER) == alone.ids.count(PLACEHOLDER) == 4
    begin = alone.places[0].start
    assert read.places[0].start > begin
    assert read.ids[read.places[0].start - 13 :][:20] == alone.ids[begin - 13 :][:20]
    assert kimi.prompts.read(stolen, (), thinking=False).places == ()


@pytest.mark.slow
def test_company_changes_nothing():
    # red when rows of a picture go to another row of the batch, or text beside pictures is not what it is alone
    kimi = joined()
    together = kimi.generate_batch(BATCH, images=SHOWN, **ASK)
    alone = [kimi.generate(prompt, images=images, **ASK) for prompt, images in zip(BATCH, SHOWN, strict=True)]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    pieces = list(kimi.stream(IDS, images=[SMALL, LARGE], **ASK))
    assert tuple(token for piece in pieces for token in piece.token_ids) == alone[1].token_ids


def test_nothing_compiles_again_and_nothing_is_seen_twice():
    # red when a picture's size, number or place makes a program, or kept rows are computed again
    kimi = joined()
    assert kimi.vision is not None
    kimi.generate("What?", images=[LARGE], **ASK)
    with compilations() as count:
        kimi.generate("And these two?", images=[png(29, 28, 5), png(56, 56, 6)], **ASK)
        kimi.generate("And without?", **ASK)
        assert count() == 0
    before = kimi.vision.kept.misses
    kimi.generate("Again?", images=[LARGE, LARGE], **ASK)
    assert kimi.vision.kept.misses == before


class TestRefusals:
    @pytest.mark.parametrize(
        "prompt, images, error, said",
        [
            ([{"role": "user", "content": [{"type": "image"}]}], [], MediaError, "1 image parts without a URL for 0 images"),
            ([{"role": "user", "content": "x"}], [SMALL], MediaError, "0 image parts without a URL for 1 images"),
            (IDS, [SMALL], MediaError, "16 image placeholders for 4 rows of 1 images"),
            (IDS, [], MediaError, "16 image placeholders for 0 rows of 0 images"),
            ([30, *[PLACEHOLDER] * 2, 31, *[PLACEHOLDER] * 2], [SMALL], MediaError, "do not stand side by side"),
            ("x", ["nowhere.png"], MediaError, r"images\[0\]: nowhere.png: No such file"),
            ("x", [b"no picture", 5], MediaError, r"2 problems(.|\n)*images\[0\]: it is none of PNG(.|\n)*images\[1\]: .*type int"),
            ("x", ["https://example.com/a.png"], MediaError, "are not fetched here"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}], [], MediaError,
             r"messages\[0\].content\[0\]: its URL begins '/etc/passwd'"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]}], [], ChatError, "whose URL is 5"),
            ("x", 5, PromptError, "images is of type int"),
            ("x" * CAPACITY, [LARGE], RequestError, "a sequence holds 128"),
        ],
    )  # fmt: skip
    def test_what_does_not_fit(self, prompt, images, error, said):
        # red when an image is dropped, a placeholder runs as text, a client's URL reads a file, or the tower runs before limits
        for ask in (joined().generate, joined().stream):
            with pytest.raises(error, match=said):
                ask(prompt, images=images, **ASK)

    def test_a_batch_needs_images_for_each_prompt(self):
        with pytest.raises(PromptError, match="for each of the 2 prompts"):
            joined().generate_batch(["a", "b"], images=[SMALL], **ASK)  # red when they all go to the first

    def test_limits_are_named(self):
        # red when the limit is not said
        strict = dataclasses.replace(joined().vision, limits=Limits(bytes=10))
        with pytest.raises(MediaError, match=r"the file has .* bytes, the limit is 10"):
            strict.read(SMALL)

    def test_a_model_without_its_tower(self):
        # red when pictures are passed over in silence
        kimi = joined(vision=False)
        assert kimi.vision is None and not any(name.startswith("vision_tower") for name in kimi.runner.params)
        for images, prompt in (([SMALL], "x"), ([], [{"role": "user", "content": [part(SMALL)]}])):
            with pytest.raises(ProblemsError, match=r"cannot read images(.|\n)*loaded without its vision tower"):
                kimi.generate(prompt, images=images)
