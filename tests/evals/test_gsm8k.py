"""``kimi-jax eval gsm8k``: lm-evaluation-harness itself, against our server, on a data set of six questions."""

import importlib.util
import json
import re
from dataclasses import replace

import pytest

from kimi_jax.cli.main import main
from kimi_jax.evals import harness
from tests.evals.fake_server import FakeServer
from tests.serve.fake import FakeEngine
from tests.serve.loopback import serving
from tests.serve.model import reply, served, tokenizer

QUESTIONS = {
    split: [(f"What is {n} times {factor}?", n * factor) for n in range(1, 7)]
    for split, factor in (("train", 3), ("test", 7))
}

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm-evaluation-harness is not installed: pip install 'kimi-jax[eval]'",
)


@pytest.fixture
def data(tmp_path):
    for split, questions in QUESTIONS.items():
        lines = [json.dumps({"question": q, "answer": f"It is {a}.\n#### {a}"}) for q, a in questions]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def reply_to(text):
    """Right, but for the second question, which it answers in another form, and the third, which it does not know."""
    n, factor = map(int, re.findall(r"What is (\d+) times (\d+)\?", text)[-1])
    return {2: f"I say {n * factor}", 3: "#### 1,000"}.get(n, f"So.\n#### {n * factor}")


def drawn(request):
    """The ids with which a model answers a prompt."""
    prompt = tokenizer().decode(request.ids)
    chat = prompt.endswith("<|open|>think<|sep|>")
    before, after = (
        ("Hm.<|close|>think<|sep|><|open|>response<|sep|>", "<|close|>response<|sep|>") if chat else ("", "")
    )
    return reply(f"{before} {reply_to(prompt)}{after}<|end_of_msg|>")


@pytest.fixture(scope="module")  # so that it begins before a test's capfd, whose stderr absl would take for its own
def server():
    """Our own server; only the model behind it is a script: (its URL, the engine)."""
    engine = FakeEngine(served().vocab, drawn, capacity=1 << 16)
    with serving(engine, keys=("secret",), model=replace(served(), capacity=1 << 16)) as running:
        yield running.url, engine


@needs_harness
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_harness_asks_and_counts(server, data, capfd, endpoint):
    url, engine = server
    before = len(engine.seen)
    words = ["--url", url, "--api-key", "secret", "--data", str(data), "--endpoint", endpoint]
    words += ["--concurrency", "2", "--samples", str(data / "kept"), "--json"]
    assert main(["eval", "gsm8k", *words]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["questions"], found["fewshot"], found["model"]) == (6, 5, "quick")
    assert found["strict"] == pytest.approx(4 / 6)  # red with flexible in its place
    assert found["flexible"] == pytest.approx(5 / 6)
    assert len(json.loads((data / "kept").read_text())["samples"]["gsm8k_here"]) == 12  # for two filters each
    asked = engine.seen[before:]
    assert len(asked) == 6
    request = asked[0]
    assert (request.temperature, request.max_tokens) == (0, {"completions": 512, "chat": 16384}[endpoint])
    prompt = tokenizer().decode(request.ids)
    assert prompt.count("#### ") == 5  # red without the worked examples
    assert prompt.endswith("Answer:") == (endpoint == "completions")  # red when chat goes without the chat format


@needs_harness
@pytest.mark.slow
def test_a_server_that_fails(data, capfd):
    with FakeServer(lambda path, body: (500, {"error": {"message": "no"}})).running() as server:
        assert main(["eval", "gsm8k", "--url", server.url, "--data", str(data), "--limit", "1"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "lm-evaluation-harness ended with status" in err


def test_data_that_is_not_there(data, capsys, monkeypatch):
    monkeypatch.setattr(
        harness.importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None, origin=__file__)
    )
    (data / "test.jsonl").unlink()
    with FakeServer(lambda path, body: {}).running() as server:
        assert main(["eval", "gsm8k", "--url", server.url, "--data", str(data)]) == 2
        assert "has no file named test*" in capsys.readouterr().err
        (data / "deeper").mkdir()
        (data / "deeper" / "test-00000-of-00001.parquet").write_bytes(b"")
        assert main(["eval", "gsm8k", "--url", server.url, "--data", str(data)]) == 2
        assert "mixes json and parquet" in capsys.readouterr().err


def test_without_the_harness(capsys, monkeypatch):
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    with FakeServer(lambda path, body: {}).running() as server:
        assert main(["eval", "gsm8k", "--url", server.url]) == 2
    assert "pip install 'kimi-jax[eval]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: EVALUATION"),
        (["gsm8k", "--limit", "0"], "--limit 0"),
        (["tools", "--concurrency", "0", "--max-tokens", "0"], "2 problems"),
        (["gsm8k", "--url", "nowhere"], "No server has the URL"),
        (["tools", "--url", "http://127.0.0.1:1"], "ConnectionRefusedError"),
    ],
)
def test_what_is_refused(capsys, words, said):
    assert main(["eval", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
