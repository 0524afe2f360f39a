"""What the face refuses before anything reaches a device; nothing here compiles a step."""

import json
import os

import numpy as np
import pytest

from kimi_jax.api import LoadError, load
from kimi_jax.checkpoint.header import CheckpointError
from kimi_jax.config import ConfigError
from kimi_jax.engine.request import RequestError
from kimi_jax.problems import ProblemsError
from kimi_jax.prompts import PromptError
from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.configs import config_json

SMALL = {"num_hidden_layers": 2, "full_attention": (2,), "hidden_size": 64, "num_experts": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("model"), config_json("tiny", **SMALL))


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


class TestPrompts:
    @pytest.mark.parametrize(
        "prompt", [5, None, 1.5, {}, {"role": "user"}, [[1, 2], [3]], [[1, 2]], [1.5], ["a"], [None], {1, 2}]
    )
    def test_what_is_no_prompt(self, model, prompt):
        for ask in (model.generate, model.stream, model.logits):
            with pytest.raises(PromptError, match="a flat list of integer token ids"):
                ask(prompt)  # red (TypeError, KeyError) when it is indexed before it is looked at

    @pytest.mark.parametrize("prompt", [[], (), np.array([], np.int32), [1024], [-1], [1] * 9000])
    def test_ids_that_do_not_fit(self, model, prompt):
        for ask in (model.generate, model.stream, model.logits):
            with pytest.raises(RequestError):
                ask(prompt)

    def test_the_first_prompt_that_is_wrong_stops_the_batch(self, model):
        with pytest.raises(RequestError):
            model.generate_batch([[1], [5000]])

    def test_one_text_is_no_list_of_prompts(self, model):
        with pytest.raises(LoadError, match="give a list of prompts"):
            model.generate_batch("Hi")  # red when it is read as two prompts of one character

    @pytest.mark.parametrize("kind", ["image", "image_url"])
    def test_an_image_in_a_message_is_not_dropped(self, model, kind):
        parts = [{"type": "text", "text": "What is it?"}, {"type": kind, kind: {"url": "data:"}}]
        with pytest.raises(PromptError, match=r"is a text model: its config\.json has no vision_config"):
            model.generate([{"role": "user", "content": parts}])  # red when the part is rendered as an empty place

    def test_no_prompts_are_no_work(self, model, monkeypatch):
        monkeypatch.setattr(model.runner, "open", None)  # red when an empty batch is prefilled
        assert model.generate_batch([]) == []

    @pytest.mark.parametrize("tools", [[{"type": "function", "function": {"name": "f"}}]])
    def test_tools_need_messages(self, model, tools):
        with pytest.raises(PromptError, match="the prompt is token ids"):
            model.generate([1, 2], tools=tools)  # red when they are ignored in silence


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"max_tokens": 0}, "max_tokens = 0"),
            ({"temperature": -1}, "temperature = -1"),
            ({"top_p": 0}, "top_p = 0"),
            ({"seed": 1 << 32}, "seed = 4294967296"),
            ({"stop": ""}, r"stop\[0\] is empty"),
            ({"stop": ["a", ""]}, r"stop\[1\] is empty"),
            ({"stop": [5]}, r"stop\[0\] is of type int"),
            ({"logprobs": 5}, "only those of the drawn ids"),
            ({"images": ["a"]}, "is a text model: its config.json has no vision_config"),
            ({"effort": "huge"}, "huge"),
            ({"temperature": 10**400}, "temperature = 1000"),  # red (OverflowError) when it is made a float first
            ({"temperature": 10**5000}, "temperature = .*it must be a number"),
            ({"temperature": "hot"}, "temperature = 'hot'; it must be a number"),
            ({"max_tokens": None}, "max_tokens = None; it must be an integer"),
            ({"images": 5}, "images is of type int"),  # red (TypeError) when its length is asked for
            ({"stop": 5}, "stop strings cannot be used"),
        ],
    )
    def test_what_is_refused(self, model, options, said):
        for ask in (model.generate, model.stream):
            with pytest.raises(ProblemsError, match=said):
                ask("Hi", **options)

    def test_unknown_options(self, model):
        with pytest.raises(TypeError, match="temprature"):
            model.generate("Hi", temprature=1)


class TestLoad:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (
                {"max_seq_len": 0},
                "max_seq_len = 0; it must be an integer from 2 to 8,192",
            ),  # red when 0 counts as missing
            ({"max_seq_len": 8193}, "max_seq_len = 8193; it must be an integer"),
            ({"max_seq_len": 2.5}, "max_seq_len = 2.5; it must be an integer"),  # red when types are not checked
            ({"prefill_chunk": 0, "decode_block": 0, "max_seq_len": 1}, "3 problems"),
            ({"draft": "x"}, "No draft can be read from x"),
            ({"dtype": "int8"}, "'int8' is not built"),
            ({"experts": "dense"}, "'dense' is not built"),
            ({"layout": "tp99"}, "tp99"),
            (
                {"layout": None},
                "This is no layout",
            ),  # these are red (TypeError) when a value is used before it is checked
            ({"layout": 8}, "Give a layout, its file, or one of: dp2-tp4"),
            ({"dtype": ["bfloat16"]}, r"dtype \['bfloat16'\] is not built"),
            ({"kv_dtype": {}}, "kv_dtype {} is not built"),
            ({"dtype": None}, "dtype None is not built"),
        ],
    )
    def test_options(self, folder, options, said):
        with pytest.raises(ProblemsError, match=said):
            load(folder, **options)

    def test_names(self):
        with pytest.raises(LoadError, match=r"k3 has no weights here(.|\n)*kimi-jax plan k3, kimi-jax compile k3"):
            load("k3")  # red when it is looked up as a folder only
        with pytest.raises(LoadError, match='did you mean "random-tiny"'):
            load("random-tyni")
        with pytest.raises(LoadError, match="no such folder; known: random-tiny"):
            load("zzz")

    def test_a_pipe_is_not_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / "config.json")
        with pytest.raises(ConfigError, match="is no regular file"):
            load(tmp_path)  # red: reading it blocks for ever
        (tmp_path / "other" / "config.json").mkdir(parents=True)
        with pytest.raises(ConfigError, match="is no regular file"):
            load(tmp_path / "other")

    def test_what_is_not_a_checkpoint(self, tmp_path):
        with pytest.raises(ConfigError, match="No configuration at"):
            load(tmp_path / "none")
        with pytest.raises(ConfigError, match="No configuration at"):
            load(tmp_path)
        without_weights = tmp_path / "bare"
        without_weights.mkdir()
        (without_weights / "config.json").write_text(json.dumps(config_json("tiny", **SMALL)))
        with pytest.raises(CheckpointError):
            load(without_weights)

    def test_a_tokenizer_of_another_size(self, tmp_path):
        made = write_random_checkpoint(tmp_path / "a", config_json("tiny", **SMALL))
        other = write_random_checkpoint(tmp_path / "b", config_json("tiny", **{**SMALL, "vocab_size": 520}))
        for name in ("tiktoken.model", "tokenizer_config.json"):
            (made / name).write_bytes((other / name).read_bytes())
        with pytest.raises(LoadError, match="it has 520 ids, the model's vocabulary has 1024"):
            load(made)
