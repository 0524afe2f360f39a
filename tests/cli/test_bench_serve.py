"""``kimi-jax bench serve`` against a server from a script, and its sums on times written by hand."""

import json
import threading

import pytest

from kimi_jax.cli.bench_serve import Answer, summary
from kimi_jax.cli.main import main
from kimi_jax.evals.client import ask_each
from tests.evals.fake_server import FakeServer, chunks


@pytest.fixture
def bench(capsys):
    """Runs the verb against a server that answers so: (status, stdout, stderr, the server)."""

    def bench(answer, *words, key=None):
        with FakeServer(answer, key).running() as server:
            status = main(["bench", "serve", "--url", server.url, *map(str, words)])
        return status, *capsys.readouterr(), server

    return bench


def echo(path, body):
    return chunks(*["x"] * body["max_tokens"], prompt_tokens=len(body["prompt"]))


def test_every_request_is_asked_once_by_as_many_clients(bench):
    together = threading.Barrier(4, timeout=10)
    warmed = threading.Event()

    def answer(path, body):
        if warmed.is_set():
            together.wait()  # red (broken barrier) when fewer than four are under way together
        elif len(asked) == 1:
            warmed.set()
        asked.append(path)
        return echo(path, body)

    asked = []
    words = ["--concurrency", 4, "--requests", 12, "--input-len", 10, "--output-len", 3, "--json"]
    status, out, err, server = bench(answer, *words)
    assert status == 0, err
    assert out.count("\n") == 1
    (row,) = json.loads(out)["rows"]
    assert (row["completed"], row["failed"], row["errors"]) == (12, 0, {})
    assert (row["prompt_tokens"], row["output_tokens"]) == (120, 36)
    assert server.most == 4
    measured = [body for _, body in server.asked[2:]]
    assert len(measured) == 12  # red when the requests for warming are counted
    assert len({tuple(body["prompt"]) for body in measured}) == 12
    assert all(body["stream"] and body["ignore_eos"] and body["model"] == "fake" for body in measured)
    assert all(row[name]["p99"] >= row[name]["median"] > 0 for name in ("ttft_ms", "e2el_ms"))


def test_prompts_share_what_they_are_asked_to(bench):
    words = ["--concurrency", 2, "--requests", 6, "--input-len", 8, "--shared-len", 5, "--output-len", 1]
    status, _, _, server = bench(echo, *words)
    prompts = [body["prompt"] for _, body in server.asked[2:]]
    assert status == 0
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 1  # red with other ids in each
    assert len({tuple(prompt[5:]) for prompt in prompts}) == 6
    assert all(0 <= number < 256 for prompt in prompts for number in prompt)
    again = [body["prompt"] for _, body in bench(echo, *words)[3].asked[2:]]
    assert sorted(again) == sorted(prompts)  # red when the seed does not fix them


def test_a_table_with_a_line_for_each_number_of_clients(bench):
    status, out, _, _ = bench(echo, "--concurrency", "1,3", "--requests", 3, "--output-len", 2)
    assert status == 0
    head, _, first, second = out.splitlines()
    assert [line.split()[:2] for line in (first, second)] == [["1", "3"], ["3", "3"]]
    assert [word for word in head.split() if word.isupper()] == ["TTFT", "TPOT", "ITL", "E2EL"]


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ((429, {"error": {"message": "too busy"}}), "HTTP 429: too busy"),
        ((500, {"detail": "no"}), "HTTP 500"),
        ([{"error": {"message": "the step failed"}}], "the step failed"),
        ([{"choices": [{"text": "a"}]}, None], "the answer broke off"),
        ([{"choices": []}], "an answer without text"),
    ],
)
def test_failures_are_counted_and_told(bench, failure, said):
    seen = []

    def answer(path, body):
        seen.append(body)
        return failure if len(seen) in (4, 5) else echo(path, body)

    words = ["--concurrency", 1, "--requests", 5, "--output-len", 2, "--json"]
    status, out, _, _ = bench(answer, *words)
    (row,) = json.loads(out)["rows"]
    assert status == 1
    assert (row["completed"], row["failed"], row["output_tokens"]) == (
        3,
        2,
        6,
    )  # red when a failure ends the measurement
    assert said in str(row["errors"])


def test_times_written_by_hand():
    answers = [
        Answer(10.0, [11.0, 11.5, 13.0], 7, 3),
        Answer(10.0, [12.0], 7, 1),  # no token after the first: no TPOT
        Answer(10.0, [10.5, 11.0], 7, 5),  # two tokens a chunk: TPOT by tokens, ITL by chunks
        Answer(10.0, [], 0, 0, "gone"),
    ]
    row = summary(2, answers, 4.0)
    assert (row["completed"], row["failed"], row["errors"]) == (3, 1, {"gone": 1})
    assert (row["requests_per_s"], row["output_tokens_per_s"], row["prompt_tokens"]) == (0.75, 2.25, 21)
    assert row["ttft_ms"] == {"mean": 1166.667, "median": 1000.0, "p99": 1980.0}
    assert row["tpot_ms"] == {"mean": 562.5, "median": 562.5, "p99": 991.25}
    assert row["itl_ms"] == {"mean": 833.333, "median": 500.0, "p99": 1480.0}
    assert row["e2el_ms"] == {"mean": 2000.0, "median": 2000.0, "p99": 2980.0}
    assert summary(1, [Answer(0.0, [], 0, 0, "gone")], 1.0)["ttft_ms"] is None


def test_an_interruption_begins_nothing_more():
    def ask(client, number):
        if number == 2:
            raise KeyboardInterrupt
        return client.post("/v1/completions", {"number": number})

    begun = []
    with FakeServer(lambda path, body: begun.append(body) or {}).running() as server, pytest.raises(KeyboardInterrupt):
        ask_each(range(500), 1, server.url, None, ask)
    assert 2 <= len(begun) < 500  # red when the rest is worked off first


def test_keys(bench):
    status, out, err, _ = bench(echo, "--output-len", 1, "--requests", 1, key="secret")
    assert (status, out) == (2, "")
    assert "HTTP 401: wrong key" in err
    assert "secret" not in err
    assert bench(echo, "--output-len", 1, "--requests", 1, "--api-key", "secret", key="secret")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--concurrency", "0"], "--concurrency 0"),
        (["--concurrency", "1,x"], "--concurrency 1,x"),
        (["--concurrency", "5000"], "numbers from 1 to 1,024"),
        (["--output-len", "0", "--input-len", "0"], "2 problems"),
        (["--shared-len", "200"], "more than --input-len 128"),
        (["--requests", "0"], "--requests 0"),
        (["--url", "127.0.0.1:8000"], "No server has the URL"),
        (["--url", "http://127.0.0.1:1"], "ConnectionRefusedError"),
    ],
)
def test_what_is_refused(capsys, words, said):
    assert main(["bench", "serve", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_debug_goes_behind_the_verb_too(capsys):
    assert main(["bench", "serve", "--debug", "--url", "http://127.0.0.1:1"]) == 2
    assert "Traceback" in capsys.readouterr().err
