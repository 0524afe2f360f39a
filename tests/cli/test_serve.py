"""The command line of the server: spellings, and what is refused before a model is loaded."""

import socket
import sys

import pytest

import kimi_jax.serve
from kimi_jax.cli import main as cli
from kimi_jax.cli import serve
from kimi_jax.serve.limits import ImageLimits


class Asked(Exception):
    """Stands for the loading of a model."""


@pytest.fixture
def parsed(monkeypatch):
    """The arguments with which a model would be loaded."""

    def load(args):
        raise Asked(args)

    monkeypatch.setattr(serve, "load_model", load)

    def parse(*words):
        words = (*words, "--port", "0")
        args = cli._parser("serve").parse_args(["serve", *words])
        with pytest.raises(Asked) as caught:
            serve.run(args)
        return caught.value.args[0]

    return parse


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("-tp 8", "tensor_parallel_size", 8),
        ("--tensor-parallel-size 8", "tensor_parallel_size", 8),
        ("--kv_cache_dtype fp8", "kv_dtype", "fp8"),
        ("--kv-cache-dtype fp8", "kv_dtype", "fp8"),
        ("--kv-cache-dtype auto", "kv_dtype", None),
        ("--max-model-len 4096", "max_seq_len", 4096),
        ("--max-num-seqs 16", "max_num_seqs", 16),
        ("--max_num_seqs 16", "max_num_seqs", 16),
        ("--max-num-batched-tokens 1024", "max_num_batched_tokens", 1024),
        ("--gpu-memory-utilization 0.8", "gpu_memory_utilization", 0.8),
        ("--gpu_memory_utilization 0.8", "gpu_memory_utilization", 0.8),
        ("--block-size 128", "block_size", 128),
        ("--max_images 4", "max_images", 4),
        ("--fetch-images", "fetch_images", True),
        ("--no-vision", "vision", False),
        ("--enable-prefix-caching", "enable_prefix_caching", True),
        ("--enable_prefix_caching", "enable_prefix_caching", True),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--no-enable_prefix_caching", "enable_prefix_caching", False),
        ("--served-model-name a b", "served_model_name", ["a", "b"]),
        ("somewhere", "model", "somewhere"),
        ("--model somewhere", "model", "somewhere"),
    ],
)
def test_spellings(parsed, words, name, value):
    assert getattr(parsed(*words.split()), name) == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--port 70000", "--port 70000; it must be from 0 to 65,535"),
        ("--max-num-seqs 0", "--max-num-seqs 0"),
        ("--gpu-memory-utilization 1.5", "--gpu-memory-utilization 1.5"),
        ("--gpu-memory-utilization nan", "--gpu-memory-utilization nan"),
        ("--request-timeout 0", "--request-timeout 0"),
        ("--max-body-bytes 5", "--max-body-bytes 5"),
        ("--max-images 0", "--max-images 0; it must be from 1 to 1,024"),
        ("--max-image-bytes 5", "--max-image-bytes 5"),
        ("--max-image-pixels 100000000", "--max-image-pixels 100000000; it must be from 1 to 89,478,485"),
        ("--image-timeout 0", "--image-timeout 0"),
        ("--image-threads 0", "--image-threads 0"),
        ("--image-memory 1000", "--image-memory 1000"),
        ("one --model two", "MODEL is one and --model is two"),
        ("--api-key-file /nowhere", "/nowhere"),
    ],
)
def test_what_is_refused(words, said, monkeypatch, capsys):
    monkeypatch.setattr(serve, "load_model", None)  # red (TypeError) when a model is loaded first
    assert cli.main(["serve", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken(monkeypatch, capsys):
    monkeypatch.setattr(serve, "load_model", None)  # red (TypeError) when it is found out after minutes of loading
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    said = capsys.readouterr().err
    assert "Address already in use" in said and "--port 0" in said


def test_every_problem_at_once(capsys):
    assert cli.main(["serve", "--port", "-1", "--block-size", "0", "--max-images", "0"]) == 2
    assert "3 problems" in capsys.readouterr().err


def test_keys(tmp_path, capsys):
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    args = cli._parser("serve").parse_args(["serve", "--api-key", "zero", "--api_key_file", str(file)])
    assert serve._keys(args) == ("zero", "one", "two")
    file.write_text("\n")
    assert cli.main(["serve", "--api-key-file", str(file)]) == 2  # red: a server that asks for no key
    assert "no key in it" in capsys.readouterr().err
    assert cli.main(["serve", "--api-key", ""]) == 2
    assert "everybody would have it" in capsys.readouterr().err


def test_without_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(serve, "load_model", None)
    monkeypatch.delitem(sys.modules, "kimi_jax.serve.run", raising=False)
    monkeypatch.delattr(kimi_jax.serve, "run", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as if it were not installed
    assert cli.main(["serve"]) == 2
    said = capsys.readouterr().err
    assert "uvicorn is not installed" in said and "pip install 'kimi-jax[serve]'" in said


def test_limits_of_images():
    # red when a limit that an operator chose is not the server's
    words = "--max-images 3 --max-image-bytes 5000 --max-image-pixels 6000 --image-timeout 7 --image-threads 8"
    args = cli._parser("serve").parse_args(["serve", *words.split(), "--image-memory", "9000000"])
    found = serve._image_limits(args)
    assert (found.images, found.threads, found.memory_bytes) == (3, 8, 9_000_000)
    assert (found.picture.bytes, found.picture.pixels, found.picture.seconds) == (5000, 6000, 7)
    assert serve._image_limits(cli._parser("serve").parse_args(["serve"])) == ImageLimits()
