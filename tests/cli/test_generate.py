"""``kimi-jax generate`` in this process, on a small random checkpoint that is loaded and compiled once."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from kimi_jax import api
from kimi_jax.cli import generate
from kimi_jax.cli.main import main
from kimi_jax.testing import configs
from kimi_jax.testing.checkpoints import write_random_checkpoint
from kimi_jax.testing.shipped import shipped_model
from kimi_jax.text.render import render

SMALL = {
    **configs.TINY,
    "num_hidden_layers": 2,
    "full_attention": (2,),
    "hidden_size": 64,
    "kda_heads": 2,
    "kda_head_dim": 16,
    "num_attention_heads": 2,
    "num_experts": 4,
    "num_experts_per_token": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("model"), configs.config_json("tiny", **SMALL), seed=3)


@pytest.fixture(scope="module")
def loads() -> dict:
    """Loaded models by what was asked for."""
    jax.devices()  # the verb must find JAX started: it sets the number of devices otherwise
    return {}


@pytest.fixture(autouse=True)
def load_once(monkeypatch, loads):
    real = api.load

    def load(path, progress, **options):
        key = f"{path} {options}"
        if key not in loads:
            loads[key] = real(path, progress=progress, **options)
        return loads[key]

    monkeypatch.setattr(api, "load", load)


@pytest.fixture
def run(folder, capsys):
    """Runs the verb on the small model: (status, stdout, stderr)."""

    def run(*words):
        # short chunks: prompts of all lengths then share two compiled programs
        status = main(["generate", "--model", str(folder), "--prefill-chunk", "16", *map(str, words)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def answer(run):
    """The JSON object of a run that must succeed."""

    def answer(*words):
        status, out, err = run("--max-tokens", "5", "--json", *words)
        assert status == 0, err
        assert out.count("\n") == 1  # red when anything else is printed to stdout
        return json.loads(out)

    return answer


@pytest.fixture
def file(tmp_path):
    def file(content) -> Path:
        path = tmp_path / "prompt.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content, ensure_ascii=False).encode())
        return path

    return file


@pytest.fixture
def model(answer, loads, folder):
    """The model behind the verb, once it has run."""
    answer("--prompt", "Hi")
    return next(model for key, model in loads.items() if key.startswith(str(folder)))


class TestOutput:
    def test_json_is_one_object(self, answer, model):
        done = answer("--prompt", "Hi")
        assert set(done) == {
            *("text", "token_ids", "finish_reason", "reasoning", "tool_calls", "logprobs", "usage", "seconds"),
        }
        assert (len(done["token_ids"]), len(done["logprobs"]), done["finish_reason"]) == (5, 5, "length")
        prompt = model.tokenizer.encode_segments(render([{"role": "user", "content": "Hi"}]))
        assert done["usage"]["prompt_tokens"] == len(prompt)
        assert model.generate("Hi", 5).token_ids == tuple(done["token_ids"])

    def test_text_is_streamed_to_stdout_and_the_rest_to_stderr(self, run, answer):
        done = answer("--prompt", "Hi", "--raw")
        status, out, err = run("--prompt", "Hi", "--raw", "--max-tokens", 5)
        assert (status, out) == (0, done["text"] + "\n")
        assert err.startswith("[length: 5 tokens in ")  # red when the note on random weights comes for any model

    def test_ids_are_printed_where_there_is_no_text(self, run, model, file, monkeypatch):
        monkeypatch.setattr(api, "load", lambda *_, **__: api.Kimi(model.config, model.layout, None, model.runner))
        status, out, _ = run("--ids", file([5, 6, 7]), "--max-tokens", 5)
        assert (status, out) == (0, " ".join(map(str, model.generate([5, 6, 7], 5).token_ids)) + " \n")
        for words in (["--prompt", "Hi"], ["--prompt", "Hi", "--raw"], ["--ids", file([5]), "--stop", "a"]):
            status, out, err = run(*words)
            assert (status, out) == (2, "")
            assert "no tokenizer files" in err

    def test_a_broken_answer_is_a_failure(self, run, model, monkeypatch):
        done = replace(model.generate("Hi", 2), finish_reason="error")
        monkeypatch.setattr(api.Kimi, "generate", lambda *_, **__: done)
        monkeypatch.setattr(api.Kimi, "stream", lambda *_, **__: iter([api.Piece(finish_reason="error")]))
        assert run("--prompt", "Hi", "--json")[0] == 1
        assert run("--prompt", "Hi")[0] == 1

    @pytest.mark.slow
    def test_the_default_model_is_made_once(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setitem(configs.SIZES, "tiny", SMALL)  # compiles faster; nothing else differs
        words = ["generate", "--prompt", "Hi", "--max-tokens", "2", "--raw", "--json"]
        assert main(words) == 0
        first = capsys.readouterr()
        assert "random-tiny has random weights: its text is noise" in first.err
        (made,) = (tmp_path / "cache" / "kimi_jax").iterdir()  # red when a half-made folder is left
        assert made.name.startswith("random-tiny")
        assert len(json.loads(first.out)["token_ids"]) == 2
        before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
        assert shipped_model("random-tiny") == made
        assert before == {path: path.stat().st_mtime_ns for path in made.iterdir()}  # red when it is made again


class TestPrompts:
    def test_raw_text_is_continued_as_its_ids(self, answer, model, file):
        raw = answer("--prompt", "The harbour", "--raw")
        numbers = model.tokenizer.encode("The harbour")
        assert raw["usage"]["prompt_tokens"] == len(numbers)
        assert answer("--ids", file(numbers))["token_ids"] == raw["token_ids"]

    def test_messages(self, answer, model, file):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Salut, 你好"}]
        tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
        plain = answer("--messages", file(messages))
        with_tools = answer("--messages", file({"messages": messages, "tools": [tool]}))
        for done, tools in ((plain, None), (with_tools, [tool])):
            prompt = model.tokenizer.encode_segments(render(messages, tools=tools))
            assert done["usage"]["prompt_tokens"] == len(prompt)  # red when the tools are left out

    def test_thinking_and_effort(self, answer):
        lengths = {answer("--prompt", "Hi", *words)["usage"]["prompt_tokens"] for words in ([], ["--no-thinking"])}
        assert len(lengths) == 2
        assert answer("--prompt", "Hi", "--no-thinking")["reasoning"] is None
        low, high = (answer("--prompt", "Hi", "--effort", effort)["token_ids"] for effort in ("low", "high"))
        assert low != high

    @pytest.mark.parametrize(
        ("flag", "content", "said"),
        [
            ("--ids", None, "No such file"),
            ("--ids", b"", "It must hold JSON"),
            ("--ids", b"[1, 2", "It must hold JSON"),
            ("--ids", b"\xff", "It must hold JSON"),
            ("--ids", b"[" * 100_000, "cannot be read"),
            ("--ids", {"ids": [1]}, "expected a JSON list of integers"),
            ("--ids", [1, 2.0], "expected a JSON list of integers"),
            ("--ids", [1, True], "expected a JSON list of integers"),
            ("--ids", [], "the prompt is empty"),
            ("--ids", [1, 1024], "outside the vocabulary 0..1023"),
            ("--ids", [-1], "outside the vocabulary 0..1023"),
            ("--ids", [1 << 70], "flat list of integer token ids"),
            ("--ids", [1] * 8192, "has 8,192 tokens and a sequence holds 8,192 with its answer"),
            ("--messages", None, "No such file"),
            ("--messages", b'[{"role": "user", "content": NaN}]', "NaN is not a JSON number"),
            ("--messages", [], "expected a JSON list of messages"),
            ("--messages", ["Hi"], "expected a JSON list of messages"),
            ("--messages", {"messages": {}}, "expected a JSON list of messages"),
            (
                "--messages",
                {"messages": [{"role": "user", "content": "Hi"}], "temperature": 1},
                "temperature is not known",
            ),
            ("--messages", {"messages": [{"role": "user", "content": "Hi"}], "tools": 5}, "tools"),
            ("--messages", [{"role": "king", "content": "Hi"}], "king"),
        ],
    )
    def test_files_that_cannot_be_used(self, run, file, tmp_path, flag, content, said):
        path = tmp_path / "nothing.json" if content is None else file(content)
        status, out, err = run(flag, path)
        assert (status, out) == (2, ""), err  # 1 would be a fault of ours
        assert said in err

    def test_a_file_that_is_too_large(self, run, file, monkeypatch):
        monkeypatch.setattr(generate, "LONGEST_FILE", 1 << 20)
        assert "larger than 1 MB" in run("--ids", file(b" " * (1 << 20) + b"[1]"))[2]

    @pytest.mark.parametrize("flag", ["--ids", "--messages"])
    def test_a_name_that_is_no_file(self, run, tmp_path, flag):
        for name in ("", tmp_path, "a\0b"):
            status, out, err = run(flag, name)
            assert (status, out) == (2, ""), err

    def test_bytes_that_are_no_text(self, run):
        status, out, err = run("--prompt", "a\udcff", "--raw")
        assert (status, out) == (2, "")
        assert "half a surrogate pair" in err


class TestArguments:
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ([], "one of the arguments --prompt --messages --ids is required"),
            (["--prompt", "a", "--ids", "b"], "not allowed with"),
            (["--ids", "b", "--raw"], "--raw continues"),
            (["--prompt", ""], "at least one character"),
            (["--prompt", "a", "--max-tokens", "0"], "max_tokens = 0; it must be an integer from 1"),
            (["--prompt", "a", "--max-tokens", "many"], "invalid int value"),
            (["--prompt", "a", "--temperature", "-1"], "temperature = -1.0"),
            (["--prompt", "a", "--temp", "nan"], "temperature = nan"),
            (["--prompt", "a", "--top-p", "0"], "top_p = 0.0"),
            (["--prompt", "a", "--top-k", "-1"], "top_k = -1"),
            (["--prompt", "a", "--seed", "-1"], "seed = -1"),
            (["--prompt", "a", "--stop", ""], "a stop string has at least one character"),
            (["--prompt", "a", "--effort", "middling"], "middling"),
            (["--prompt", "a", "--dtype", "float16"], "'float16' is not built"),
            (["--prompt", "a", "--kv-dtype", "int8"], "'int8' is not built"),
            (["--prompt", "a", "--dtype", "float32", "--kv-cache-dtype", "fp8"], "exact mode"),
            (["--prompt", "a", "--experts", "dense"], "'dense' is not built"),
            (["--prompt", "a", "--draft", "x"], "No draft can be read from x"),
            (["--prompt", "a", "--max-seq-len", "0"], "max_seq_len = 0; it must be an integer from 2 to 8,192"),
            (["--prompt", "a", "--max-model-len", "9000"], "max_seq_len = 9000; it must be an integer"),
            (["--prompt", "a", "--prefill-chunk", "0"], "prefill_chunk = 0"),
            (["--prompt", "a", "--layout", "tp99"], "tp99"),
            (["--prompt", "a", "--layout", "tp8", "-tp", "8"], "Two placements"),
            (["--prompt", "a", "-tp", "0"], "it must be an integer from 1 to 512"),
            (["--prompt", "a", "-tp", "3"], "heads"),
            (["--prompt", "a", "-tp", "16"], "it needs 16 devices, there are 8"),
        ],
    )
    def test_what_is_refused(self, run, words, said):
        status, out, err = run(*words)
        assert (status, out) == (2, ""), err
        assert said in err

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--prompt", "a", "--temperature", "1e400", "--max-tokens", "0"], "2 problems"),
            (["--prompt", "a", "--stop", "b", "--stop", ""], "--stop: a stop string"),
            (["--prompt", "a", "--effort", "huge"], "--effort huge; choose low, high, max"),
            (["--prompt", "a", "--raw", "--effort", "low"], "--effort is for conversations; --raw continues"),
            (["--prompt", "a", "--raw", "--no-thinking"], "--no-thinking is for conversations"),
            (["--ids", "a.json", "--effort", "max"], "--effort is for conversations; --ids are used as they are"),
        ],
    )
    def test_options_are_refused_before_anything_is_loaded(self, run, monkeypatch, words, said):
        monkeypatch.setattr(api, "load", None)  # red (TypeError) when the model is loaded first
        status, out, err = run(*words)
        assert (status, out) == (2, ""), err
        assert said in err

    def test_a_model_that_is_not_there(self, run, tmp_path):
        status, out, err = run("--prompt", "a", "--model", tmp_path / "none")
        assert (status, out) == (2, "")
        assert "No configuration at" in err

    def test_stop_strings(self, answer):
        text = answer("--prompt", "a", "--raw", "--max-tokens", "8")["text"]
        cut = text[len(text) // 2 :][:2]
        done = answer("--prompt", "a", "--raw", "--max-tokens", "8", "--stop", "never", "--stop", cut)
        assert (done["text"], done["finish_reason"]) == (text[: text.index(cut)], "stop")

    def test_stop_ids_and_ignore_eos(self, answer, monkeypatch):  # PF-52
        numbers = answer("--prompt", "a", "--raw")["token_ids"]
        end = next(number for number in numbers if numbers.index(number) == 2)
        monkeypatch.setattr(api.Kimi, "stop_ids", (end,))
        stopped = answer("--prompt", "a", "--raw")
        assert (stopped["token_ids"], stopped["finish_reason"]) == (numbers[:3], "stop")
        assert answer("--prompt", "a", "--raw", "--ignore-eos")["token_ids"] == numbers

    @pytest.mark.slow
    def test_seeds(self, answer):
        hot = ["--prompt", "a", "--raw", "--temperature", "2", "--top-p", "0.99", "--top-k", "500"]
        first, again, other = (answer(*hot, "--seed", seed)["token_ids"] for seed in (1, 1, 2))
        assert first == again != other
        # chosen by the operating system: 3 of 2^32
        drawn = {tuple(answer(*hot)["token_ids"]) for _ in range(3)}
        assert len(drawn) == 3  # red when a missing seed is 0
        assert np.isfinite(answer(*hot)["logprobs"]).all()
