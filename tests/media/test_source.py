"""Where pictures come from: data URLs and local files."""

import base64
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.media.errors import MediaError
from kimi_jax.media.limits import Limits
from kimi_jax.media.source import from_data_url, from_file, from_url, media_type

LIMITS = Limits(bytes=3000)
BODY = bytes(range(256)) * 4
URL = "data:image/png;base64," + base64.b64encode(BODY).decode()


def url(text: str):
    return from_url(text, LIMITS, LIMITS.deadline())


@pytest.mark.parametrize(
    "text, claimed",
    [
        (URL, "image/png"),
        (URL.replace("data:image/png", "DATA:IMAGE/PNG"), "image/png"),
        (URL.replace("png;", "jpg;"), "image/jpeg"),
        (URL.replace("png;base64", "webp;charset=x;name=a.webp;base64"), "image/webp"),
        (URL.replace("image/png", "application/octet-stream"), None),
    ],
)
def test_data_urls(text, claimed):
    # red when parameters, letter case or the common misspelling of JPEG are not understood
    assert url(text) == (BODY, claimed)


@pytest.mark.parametrize(
    "text, message",
    [
        (URL[:-1], "wrong or cut off"),
        (URL[:-3], "wrong or cut off"),
        (URL + "é", "wrong or cut off"),
        (URL[:40] + "\n" + URL[40:], "wrong or cut off"),
        (URL.replace("base64,", "base64"), "its data: URL begins"),
        (URL.replace(";base64", ""), "not in base64"),
        ("data:,hello", "not in base64"),
        (URL.replace("image/png", ""), "'text/plain'"),
        (URL.replace("image/png", "text/html"), "'text/html'; types that work: image/png"),
        (URL.replace("image/png", "image/svg+xml"), "svg"),
        ("data:image/png;base64," + "A" * 4004, r"3,001 bytes, the limit is 3,000"),
        ("data:" + "x" * 5000, "its data: URL begins"),
        ("file:///etc/passwd", "'file:///etc/passwd'"),
        ("/etc/passwd", "'/etc/passwd'"),
        ("ftp://example.org/a.png", "ftp"),
        ("", "begins ''"),
        ("http://example.org/a.png", "not fetched here"),
        ("HTTPS://example.org/a.png", "not fetched here"),
    ],
)
def test_what_is_no_picture(text, message):
    # red when a local file is opened for a client, a cut payload is padded, or the network is asked without being allowed to
    with pytest.raises(MediaError, match=message) as raised:
        url(text)
    assert len(str(raised.value)) < 300


def test_the_limit_comes_before_decoding(monkeypatch):
    # red when base64 is undone first
    monkeypatch.setattr(base64, "b64decode", None)
    with pytest.raises(MediaError, match="the limit"):
        from_data_url("data:image/png;base64," + "A" * 10_000, LIMITS)


@given(st.text(max_size=200))
def test_any_text_is_an_error_or_bytes(text):
    # red when anything but MediaError gets out
    for candidate in (text, "data:" + text, "data:image/png;base64," + text):
        try:
            url(candidate)
        except MediaError as error:
            assert len(str(error)) < 400


def test_local_files(tmp_path):
    # red when a pipe is opened, which waits for ever, or a file is read whole before its size is known
    path = tmp_path / "picture.png"
    path.write_bytes(BODY)
    assert from_file(path, LIMITS) == (BODY, None)
    path.write_bytes(bytes(3001))
    with pytest.raises(MediaError, match="3,001 bytes, the limit is 3,000"):
        from_file(path, LIMITS)
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("pipe", "not a regular file"), (".", "not a regular file"), ("none", "No such file")):
        with pytest.raises(MediaError, match=message):
            from_file(tmp_path / name, LIMITS)


def test_claims_that_say_nothing():
    # red when an absent or general type counts as a wrong one
    assert media_type(None) is media_type("") is media_type("application/octet-stream; x=y") is None
    assert media_type("Image/GIF; q=1") == "image/gif"
