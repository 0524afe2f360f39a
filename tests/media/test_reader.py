"""Pictures read in threads: bounded in number and time, each error with its own picture."""

import base64
import io
import threading

import numpy as np
import pytest
from PIL import Image

from kimi_jax.media import reader as reader_module
from kimi_jax.media.errors import BusyError, MediaError
from kimi_jax.media.fetch import FetchRules
from kimi_jax.media.limits import Limits
from kimi_jax.media.reader import PictureReader
from kimi_jax.media.room import Room
from kimi_jax.media.rows_cache import RowsCache
from kimi_jax.media.settings import Settings


def file(colour: int = 0) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (20, 30), colour).save(out, "PNG")
    return out.getvalue()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture
def reader():
    made = PictureReader(Settings(), threads=1, waiting=1)
    yield made
    made.close()


def test_two_ways_in(reader):
    # red when one of them prepares otherwise
    pictures = [reader.submit_url(url(file())).result(), reader.submit_bytes(file()).result()]
    assert {picture.digest for picture in pictures} == {pictures[0].digest}
    assert (pictures[0].width, pictures[0].height, pictures[0].grid) == (20, 30, (1, 4, 2))
    assert reader.submit_bytes(file(1)).result().digest != pictures[0].digest


def test_the_digest_is_of_what_is_seen():
    # red when it is of the file: the same picture in another file would be computed again, or of the pixels without their grid
    make = PictureReader(Settings())
    image = Image.new("RGB", (28, 56), 7)
    files = []
    for compression in (0, 9):
        out = io.BytesIO()
        image.save(out, "PNG", compress_level=compression)
        files.append(out.getvalue())
    assert files[0] != files[1]
    same = [make.submit_bytes(data).result().digest for data in files]
    out = io.BytesIO()
    image.transpose(Image.Transpose.ROTATE_90).save(out, "PNG")
    turned = make.submit_bytes(out.getvalue()).result().digest
    make.close()
    assert same[0] == same[1] != turned


def test_an_error_stays_with_its_picture(reader):
    # red when a thread dies of a bad file
    bad = reader.submit_url("data:image/png;base64,AAAA")
    with pytest.raises(MediaError, match="none of PNG"):
        bad.result()
    assert reader.submit_bytes(file()).result().width == 20


def test_no_more_than_may_wait(reader, monkeypatch):
    # red when pictures pile up in memory
    go = threading.Event()
    real = reader_module.prepare
    monkeypatch.setattr(reader_module, "prepare", lambda *args: go.wait(20) and real(*args))
    waiting = [reader.submit_bytes(file()) for _ in range(2)]
    with pytest.raises(BusyError, match="2 images are being read"):
        reader.submit_bytes(file())
    go.set()
    assert [future.result().width for future in waiting] == [20, 20]
    assert reader.submit_bytes(file()).result().width == 20


def test_waiting_counts():
    # red when the time runs only from the start of the decoding
    slow = PictureReader(Settings(), Limits(seconds=0.05), threads=1)
    go = threading.Event()
    slow._pool.submit(go.wait, 20)
    late = slow.submit_bytes(file())
    threading.Timer(0.1, go.set).start()
    with pytest.raises(MediaError, match="before its turn"):
        late.result()
    slow.close()


def test_pictures_take_room_as_long_as_they_live():
    # red when decoded pictures pile up in memory while they wait for the tower, or their room is never given back
    room = Room(2 * 8 * 588)
    small = PictureReader(Settings(), threads=1, room=room)
    first, second = small.submit_bytes(file()).result(), small.submit_bytes(file(1)).result()
    assert room.bytes == first.patches.nbytes + second.patches.nbytes == room.limit
    with pytest.raises(BusyError, match=r"images fill the 9,408 bytes"):
        small.submit_bytes(file(2)).result()
    wide = PictureReader(Settings(), threads=1, room=Room(room.limit), row_bytes=1)
    with pytest.raises(MediaError, match=r"take 4,706 bytes of the host as patches and rows; up to 4,704 work"):
        wide.submit_bytes(file(2)).result()
    wide.close()
    del first
    assert small.submit_bytes(file(2)).result().width == 20
    small.close()


def test_room_is_made_of_what_is_only_kept():
    # red when rows that nobody uses keep a picture out, or when room is given up that is used
    kept = RowsCache(1000)
    room = Room(100, kept.give_up)
    for name in (b"a", b"b"):
        rows = np.zeros(10, np.float32)
        room.hold(rows, rows.nbytes)
        kept.add(name, rows)
    room.check(60)  # forgets the first; the second is in use here
    assert room.bytes == 40
    with pytest.raises(BusyError):
        room.check(61)
    del rows
    room.check(100)


def test_a_slow_machine_keeps_no_decoder(monkeypatch):
    # red when the picture of a message waits for a machine that another message names
    go = threading.Event()
    rules = FetchRules(resolve=lambda host, port: ["8.8.8.8"] * go.wait(20))
    far = PictureReader(Settings(), Limits(seconds=1), rules, threads=1)
    slow = far.submit_url("http://slow.example/")
    assert far.submit_url(url(file())).result(10).width == 20
    assert not slow.done()
    with pytest.raises(MediaError, match=r"looking up slow.example"):
        slow.result(10)
    go.set()
    far.close()
