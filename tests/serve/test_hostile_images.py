"""Files and URLs that mean harm, through the server: always a clear 400, memory bounded, and the next request is answered."""

import io
import itertools
import random
import resource
import struct
import zlib

import pytest
from PIL import Image

from kimi_jax.media import fetch as fetch_module
from kimi_jax.media.fetch import FetchRules
from kimi_jax.media.limits import Limits
from tests.media.test_fetch import INNER, answer, server
from tests.serve.client import ask, run
from tests.serve.eyes import engine, file, make_eyes, part, seeing, url, user
from tests.serve.test_images import ANSWER, CHAT, body, looks, reply

KINDS = {"PNG": "png", "JPEG": "jpeg", "WEBP": "webp", "GIF": "gif"}


def send(*messages, images=None):
    """Answers; a good request behind them must be answered too, and nothing may be left."""
    images, made = images or make_eyes(), engine(answer=reply(ANSWER))

    async def scenario(app):
        got = [await ask(app, CHAT, body(one)) for one in messages]
        last = await ask(app, CHAT, body(user(file(colour=77))))
        assert last.status == 200 and looks(made.seen[-1]) == [(77, 2)]
        return got

    got = run(made, scenario, seeing(), images=images)
    assert images.room.bytes == images.kept.bytes
    return got


def refusal(got):
    assert got.status == 400, got.body
    assert got.error["code"] == "invalid_image"
    return got.error["problems"]


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files(kind):
    # red when what a decoder raises, or does, reaches the client as a failure of the server
    dice = random.Random(zlib.crc32(kind.encode()))
    whole = file((40, 24), 90, kind)
    hurt = []
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 8)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        hurt.append(bytes(data[: dice.randrange(len(data))] if dice.random() < 0.3 else data))
    urls = [url(data, KINDS[kind]) for data in hurt]
    urls += [url(whole, KINDS[kind])[:cut] for cut in range(23, 60, 5)]
    for got in send(*[user(part(one)) for one in urls]):
        assert got.status == 200 or refusal(got)[0].startswith("messages[0].content[0]")


def bomb(width: int, height: int) -> bytes:
    """A PNG file of a few kilobytes that says it is large, and is."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width // 8 + 1) * min(height, 4000)), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_sizes_at_the_edges():
    # red when a picture without a middle divides by nothing, or a bomb is decoded before its size is looked at
    before = peak()
    messages = [user(file(size)) for size in ((1, 1), (1, 20_000), (20_000, 1))]
    bombs = [user(bomb(side, side)) for side in (9000, 200_000, 8000)]
    *fine, large, huge, wide = send(*messages, *bombs)
    one, tall, flat = (got.json["usage"]["prompt_tokens"] for got in fine)
    assert min(tall - one, flat - one) >= 255
    assert "it has 9,000 x 9,000 = 81,000,000 pixels, the limit is 67,108,864" in refusal(large)[0]
    assert "more than the limit of 67,108,864 pixels" in refusal(huge)[0]
    assert "take 39,405,888 bytes of the host as patches and rows; up to 33,554,432 work" in refusal(wide)[0]
    assert peak() - before < 400 << 20  # 64 million pixels of a byte, turned to three


def test_frames_that_never_end():
    # red when every frame of a film is decoded: only the first is looked at
    out = io.BytesIO()
    frames = [Image.new("P", (500, 500), colour) for colour in range(200)]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    (got,) = send(user(part(url(out.getvalue(), "gif"))))
    assert got.status == 200


def test_bytes_and_time():
    # red when a limit of one picture is not that of the server
    images = make_eyes(Limits(bytes=100, seconds=30))
    assert "the file has 101 bytes" in refusal(send(user(bytes(101)), images=images)[0])[0]
    images = make_eyes(Limits(seconds=1e-6))
    (got,) = [*send_late(images)]
    assert "it is not ready after 1e-06 seconds, which is the limit" in refusal(got)[0]


def send_late(images):
    async def scenario(app):
        return [await ask(app, CHAT, body(user(file())))]

    return run(engine(), scenario, seeing(), images=images)


@pytest.fixture
def connected(monkeypatch):
    """Machines that were asked; those of the public Internet do not answer."""
    made, real = [], fetch_module.socket.create_connection

    def connect(address, **options):
        made.append(address[0])
        if address[0] != "127.0.0.1":
            raise ConnectionRefusedError("nobody is there")
        return real(address, **options)

    monkeypatch.setattr(fetch_module.socket, "create_connection", connect)
    return made


def hosts() -> list[str]:
    tricks = [
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0",
        "127.0.0.01",
        "①②⑦.0.0.1",
        "[::1",
        "localhost.127",
    ]
    return [
        *(f"[{one}]" if ":" in one else one for one in INNER),
        *tricks,
        "inner.example",
        "user@127.0.0.1",
        "8.8.8.8:22",
    ]


def test_machines_that_must_not_be_asked(connected):
    # red when one of them is, whether it is written plainly, as a number, inside IPv6, or behind a name
    images = make_eyes(most=99, rules=FetchRules(resolve=lambda host, port: ["8.8.8.8", "169.254.169.254"]))
    every = [
        f"{scheme}://{host}/a.png" for host, scheme in zip(hosts(), itertools.cycle(("http", "https")), strict=False)
    ]
    every.append("https://inner.example/")
    told = [
        problem
        for got in send(*(user(*map(part, every[at : at + 18])) for at in range(0, len(every), 18)), images=images)
        for problem in refusal(got)
    ]
    assert len(told) == len(every)
    assert not connected


def test_a_name_that_turns(connected):
    # red when the name is asked for again once its address was found to be public
    answers = iter([["8.8.8.8"], ["127.0.0.1"]])
    images = make_eyes(rules=FetchRules(resolve=lambda host, port: next(answers)))
    (got,) = send(user(part("http://turning.example/")), images=images)
    assert "nobody is there" in refusal(got)[0]
    assert connected == ["8.8.8.8"]


def test_answers_of_other_machines(connected):
    # red when a redirect is followed, a page is decoded, or a picture behind a URL is not read at all
    sent = [
        answer(b"", "Location: http://169.254.169.254/latest/meta-data", status="302 Found"),
        answer(b"<html>", "Content-Type: text/html"),
        answer(file(colour=9), "Content-Type: image/png"),
    ]
    with server(*sent) as (rules, asked, port):
        images = make_eyes(rules=rules)
        link = user(part(f"http://pictures.example:{port}/a.png"))
        away, page, good = send(link, link, link, images=images)
        assert len(asked) == 3
    assert "redirects (status 302), which is not followed" in refusal(away)[0]
    assert "declared as 'text/html'" in refusal(page)[0]
    assert good.status == 200 and images.tower.looked == [9, 77]
    assert connected == ["127.0.0.1"] * 3
