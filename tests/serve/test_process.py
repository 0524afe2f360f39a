"""A server as a process of its own: how it starts, and how it ends by a signal, by death, and again."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.serve.loopback import wait_for
from tests.serve.model import folder, tokenizer

ROOT = Path(__file__).parents[2]
FAKE = """
import sys
import threading
from kimi_jax.serve.limits import Limits
from kimi_jax.serve.run import Server, bind, serve
from tests.serve.fake import FakeEngine
from tests.serve.model import CAPACITY, served
engine = FakeEngine(served().vocab, [5] * 200, capacity=CAPACITY)
engine.pause = 0.01
if "compiling" in sys.argv:
    engine.warm_gate = threading.Event()
listener = bind("127.0.0.1", int(sys.argv[1]))
print(f"at http://127.0.0.1:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
sys.exit(0 if serve(Server(served(), engine, Limits()), listener) else 1)
"""


@contextmanager
def process(*words, status=200):
    """A running server process, its address once it is ready (or as ready as it will be), and what it has logged."""
    made = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = []
    reading = threading.Thread(target=lambda: lines.extend(iter(made.stderr.readline, "")))
    reading.start()

    def address():
        assert made.poll() is None, lines
        found = re.search(r"at (http://\S+)", "".join(lines))
        return found and found.group(1)

    def ready():
        assert made.poll() is None, lines
        try:
            return httpx.get(f"{address()}/ready").status_code == status
        except httpx.TransportError:
            return False

    try:
        wait_for(address, 60)
        wait_for(ready, 300, every=0.2)
        yield made, address(), lines
    finally:
        made.kill()
        made.wait()
        reading.join()
        made.stderr.close()


def test_a_signal_lets_answers_end():
    with process("-c", FAKE, "0") as (made, address, lines), httpx.Client(base_url=address, timeout=60) as client:
        body = {"prompt": "x", "stream": True, "max_tokens": 200}
        with client.stream("POST", "/v1/completions", json=body) as got:
            events = got.iter_lines()
            next(events)
            made.send_signal(signal.SIGTERM)
            rest = [line for line in events if line]
        assert rest[-1] == "data: [DONE]"  # red when the process leaves at once
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert made.wait(30) == 0, lines  # red (-15) when the signal is raised again at the end
        assert not any("Traceback" in line for line in lines)
    assert any("Ready" in line for line in lines)


def test_a_signal_while_compiling():
    with process("-c", FAKE, "0", "compiling", status=503) as (made, _, lines):
        made.send_signal(signal.SIGTERM)
        assert made.wait(20) == 0, lines  # red (timeout) when it waits for the compiler


BODY = {"prompt": "One two", "max_tokens": 8, "temperature": 0}


def answer(address):
    return httpx.post(f"{address}/v1/completions", json=BODY, timeout=60).json()["choices"][0]["text"]


def test_killed_and_started_again():
    with process("-c", FAKE, "0") as (made, address, _):
        before = answer(address)
        long = {**BODY, "max_tokens": 900, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=long, timeout=60) as got:
            next(got.iter_lines())
            made.kill()
    with process("-c", FAKE, address.rpartition(":")[2]) as (_, again, _):  # red when the address is still taken
        assert again == address
        assert answer(again) == before


@pytest.mark.slow
def test_the_command():
    words = ["-m", "kimi_jax.cli.main", "serve", str(folder()), "--dtype", "float32", "--served-model-name", "quick"]
    words += ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--port", "0"]
    with process(*words) as (made, address, lines):
        first = answer(address)
        assert first == answer(address)
        assert len(tokenizer().encode(first)) > 0
        made.send_signal(signal.SIGTERM)
        assert made.wait(60) == 0, lines
