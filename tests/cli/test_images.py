"""``--image`` of the verbs, up to the model: which pictures it is given, and what is refused before it is loaded."""

import base64
import io
import json
from types import SimpleNamespace

import pytest

from kimi_jax import api
from kimi_jax.cli.chat import Chat
from kimi_jax.cli.images import as_url
from kimi_jax.cli.main import main
from kimi_jax.completion import Completion
from kimi_jax.image_encoder import ImageEncoder
from kimi_jax.media.settings import Settings
from kimi_jax.prompts import PromptError, PromptReader
from kimi_jax.text.segments import Segment
from tests.cli.test_chat import OPTIONS, Model
from tests.parity.pictures import png
from tests.text.data import TINY

(PLACEHOLDER,) = TINY.encode_segments([Segment("<|media_pad|>", True)])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some.png"
    path.write_bytes(png(40, 30))
    return str(path)


@pytest.fixture
def asked(monkeypatch):
    """What the verb loads and asks of the model."""
    asked = {}

    def generate(prompt, max_tokens, **options):
        asked.update(prompt=prompt, **options)
        return Completion("", (), "stop")

    def load(path, progress, **options):
        asked.update(load=options)
        return SimpleNamespace(tokenizer=TINY, generate=generate)

    monkeypatch.setattr(api, "load", load)
    return asked


class TestGenerate:
    def test_pictures_reach_the_model_in_their_order(self, asked, file, capsys):
        # red when only the last is kept, or the tower is left out
        url = "data:image/png;base64,AAAA"
        assert main(["generate", "--prompt", "What is it?", "--image", file, "--image", url, "--json"]) == 0
        assert asked["images"] == [file, url]
        assert (asked["load"]["vision"], asked["load"]["fetch_images"]) == (None, False)
        capsys.readouterr()
        assert main(["generate", "--prompt", "x", "--no-vision", "--json"]) == 0
        assert asked["load"]["vision"] is False

    @pytest.mark.parametrize(
        "words, said",
        [
            (["--image", "nowhere.png"], "--image nowhere.png: no such file"),
            (["--image", "https://example.com/a.png"], "--fetch-images allows to ask for it"),
            (["--image", "FILE", "--no-vision"], "--no-vision leaves it out"),
            (["--image", "FILE", "--raw"], "has no place in --raw text"),
        ],
    )
    def test_what_is_refused_before_a_model_is_loaded(self, asked, file, capsys, words, said):
        # red when minutes of loading come before the refusal
        words = [file if word == "FILE" else word for word in words]
        assert main(["generate", "--prompt", "x", *words]) == 2
        assert said in capsys.readouterr().err
        assert not asked

    def test_fetching_is_switched_on(self, asked, capsys):
        assert (
            main(["generate", "--prompt", "x", "--image", "https://example.com/a.png", "--fetch-images", "--json"]) == 0
        )
        assert asked["load"]["fetch_images"] is True  # red when the flag goes nowhere


def test_a_file_may_be_called_data(tmp_path, monkeypatch):
    # red when it is taken for a URL
    (tmp_path / "data").write_bytes(png(40, 30))
    monkeypatch.chdir(tmp_path)
    assert as_url("data").startswith("data:image/png;base64,")
    assert as_url("HTTP://a") == "HTTP://a"


class TestChat:
    def model(self, *answers):
        model = Model(*answers)
        config = SimpleNamespace(name="k", media_placeholder=PLACEHOLDER)
        model.prompts = PromptReader(config, TINY, ImageEncoder(None, {}, Settings()))
        return model

    def talk(self, model, *lines):
        notes = io.StringIO()
        chat = Chat(model, dict(OPTIONS), out=io.StringIO(), notes=notes)
        chat.talk(lines)
        return notes.getvalue(), chat.messages

    def test_a_picture_goes_before_the_next_message(self, file, tmp_path):
        # red when it goes to every message, is lost with /retry, or a saved conversation cannot be read back
        model = self.model([], [], [])
        saved = tmp_path / "saved.json"
        _, messages = self.talk(model, f"/image {file}", "What is it?", "/retry", "And?", f"/save {saved}")
        (first, text) = messages[0]["content"]
        head, data = first["image_url"]["url"].split(",")
        assert (head, base64.b64decode(data)) == ("data:image/png;base64", png(40, 30))
        assert text == {"type": "text", "text": "What is it?"}
        assert [message["content"] for message in messages if message["role"] == "user"][1] == "And?"
        assert [len(asked) for asked, *_ in model.asked] == [1, 1, 3]
        kept = json.loads(saved.read_text())["messages"]
        assert model.prompts.read(kept, ()).places == model.prompts.read(messages, ()).places != ()

    def test_what_cannot_be_shown_is_said(self, file, tmp_path):
        # red when a broken picture breaks the next message instead
        model = self.model([])
        (tmp_path / "bad.png").write_bytes(b"\x89PNG broken")
        notes, messages = self.talk(model, f"/image {tmp_path / 'bad.png'}", "/image", "/image nowhere.png", "Hi")
        assert "damaged" in notes and "needs a file" in notes and "No such file" in notes
        assert messages[0]["content"] == "Hi"

    def test_a_model_that_reads_no_images(self, file):
        # red when it is told nothing
        model = Model()
        model.prompts = PromptReader(SimpleNamespace(name="k3-text"), TINY, None, "it is a text model")
        notes, _ = self.talk(model, f"/image {file}")
        assert "k3-text cannot read images" in notes and "it is a text model" in notes
        with pytest.raises(PromptError):
            model.prompts.read("x", [file])
