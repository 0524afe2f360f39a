"""Formats, colour modes and orientation; what is too large, too slow or broken is one clear error."""

import io
import itertools
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from PIL import Image

from kimi_jax.media.decode import decode
from kimi_jax.media.errors import MediaError
from kimi_jax.media.limits import Deadline, Limits
from kimi_jax.media.prepare import prepare
from kimi_jax.media.settings import Settings
from kimi_jax.media.source import FORMATS

LIMITS = Limits()
RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (16, 24, 3), np.uint8)
RAMP = np.add.outer(np.arange(16) * 4, np.arange(24) * 6).astype(np.uint8)[..., None].repeat(3, axis=2)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def read(data: bytes, limits: Limits = LIMITS, claimed: str | None = None) -> Image.Image:
    return decode(data, limits, limits.deadline(), claimed)


def pixels(data: bytes) -> np.ndarray:
    """The unpadded pixels that reach the patches; for pictures of one patch height or less than 14 wide."""
    picture = prepare(data, Settings(), LIMITS)
    _, rows, columns = picture.grid
    whole = (
        picture.patches.reshape(rows, columns, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(rows * 14, columns * 14, 3)
    )
    return whole[: picture.height, : picture.width]


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "JPEG"])
def test_every_format_reads_back(kind):
    # red when a format is left out
    image = Image.fromarray(RAMP)
    image = image.convert("P", palette=Image.Palette.ADAPTIVE) if kind == "GIF" else image
    exact = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(kind, {})
    found = pixels(saved(image, kind, **exact))
    assert found.shape == (16, 24, 3)
    assert np.abs(found - np.asarray(image.convert("RGB")).astype(int)).max() <= (3 if kind == "JPEG" else 0)


def test_only_the_first_frame_of_an_animation():
    # red when a later frame, or the last one, is read
    frames = [Image.new("P", (8, 8), index) for index in range(3)]
    for frame in frames:
        frame.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(pixels(data), np.broadcast_to([10, 20, 30], (8, 8, 3)))
    data = saved(Image.fromarray(COLOURS), "PNG", save_all=True, append_images=[Image.fromarray(255 - COLOURS)])
    np.testing.assert_array_equal(pixels(data), COLOURS)


@pytest.mark.parametrize("tag", range(1, 10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_comes_first(tag, kind):
    # red when it is ignored, turned the other way, or applied after the size is taken (PF-57); 9 is no orientation
    exif = Image.Exif()
    exif[0x0112] = tag
    ramp = RAMP
    options = {"PNG": {}, "JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}[kind]
    upright = {
        2: ramp[:, ::-1],
        3: ramp[::-1, ::-1],
        4: ramp[::-1],
        5: ramp.transpose(1, 0, 2),
        6: ramp[::-1].transpose(1, 0, 2),
        7: ramp[::-1, ::-1].transpose(1, 0, 2),
        8: ramp[:, ::-1].transpose(1, 0, 2),
    }.get(tag, ramp)
    found = pixels(saved(Image.fromarray(ramp), kind, exif=exif, **options))
    assert found.shape == upright.shape
    assert np.abs(found.astype(int) - upright).max() <= 3


def test_broken_exif_turns_nothing():
    # red when damaged EXIF makes a picture unreadable that every viewer shows
    data = saved(Image.fromarray(COLOURS), "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    np.testing.assert_array_equal(pixels(data), COLOURS)


def png(depth: int, colour: int, rows: list[bytes], width: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG file by hand, from the standard (ISO/IEC 15948): filter 0 in every row."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, len(rows), depth, colour, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def test_sixteen_bit_greys_are_not_white():
    # red when Pillow's own conversion is used, which makes every level above 255 white (PF-58)
    levels = np.array([0, 255, 256, 0x1234, 0x8000, 0xFFFF], ">u2")
    found = pixels(png(16, 0, [levels.tobytes()], 6))
    assert found[0, :, 0].tolist() == [0, 0, 1, 0x12, 0x80, 0xFF]
    hidden = pixels(png(16, 0, [levels.tobytes()], 6, (b"tRNS", b"\x12\x34")))
    assert hidden[0, :, 1].tolist() == [0, 0, 1, 255, 0x80, 0xFF]  # the board is white there


def test_sixteen_bit_colours():
    # red when they are refused or read by their low bytes
    row = np.array([[0x0102, 0x8040, 0xFFFE]], ">u2").tobytes()
    assert pixels(png(16, 2, [row], 1))[0, 0].tolist() == [1, 0x80, 0xFF]


def test_one_bit_and_grey_with_alpha():
    # red when a mode is missing, or grey with alpha loses the board behind it
    assert pixels(png(1, 0, [b"\x80"], 2))[0].tolist() == [[255] * 3, [0] * 3]
    assert pixels(png(8, 4, [bytes([77, 255, 77, 0])], 2))[0].tolist() == [[77] * 3, [255] * 3]


def test_the_board_behind_transparent_pixels():
    # red when the first square is grey, or squares have another size
    clear = np.zeros((9, 17, 4), np.uint8)
    found = pixels(saved(Image.fromarray(clear), "PNG"))[..., 0]
    assert found[0, [0, 7, 8, 15, 16]].tolist() == [255, 255, 180, 180, 255]
    assert found[8, [0, 8]].tolist() == [180, 255]


def test_cmyk():
    # red when four channels reach the patches, or are inverted
    found = pixels(saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100))
    assert np.abs(found.astype(int) - [255, 0, 0]).max() < 12


@pytest.mark.parametrize("size", [(1, 1), (1, 20_000), (20_000, 1)])
def test_thin_pictures(size):
    # red when a side becomes 0
    picture = prepare(saved(Image.new("RGB", size), "PNG"), Settings(), LIMITS)
    assert (picture.width, picture.height) == size
    assert picture.tokens in (1, 256)


def test_what_is_declared_must_be_true():
    # red when a declared type is not compared with the bytes
    data = saved(Image.fromarray(COLOURS), "PNG")
    assert read(data, claimed="image/png").size == (24, 16)
    with pytest.raises(MediaError, match=r"declared as 'image/jpeg', but its bytes are image/png"):
        read(data, claimed="image/jpeg")


def test_other_formats_are_no_pictures():
    # red when Pillow may choose among all its formats
    for data in (saved(Image.fromarray(COLOURS), "BMP"), saved(Image.fromarray(COLOURS), "TIFF"), b"%!PS", b"<svg/>"):
        with pytest.raises(MediaError, match="none of PNG, JPEG, WEBP, GIF"):
            read(data)
    with pytest.raises(MediaError, match="empty"):
        read(b"")


BOMB = {
    "PNG": png(8, 0, [b"\0"], 1).replace(struct.pack(">II", 1, 1), struct.pack(">II", 60_000, 60_000)),
    "GIF": b"GIF89a" + struct.pack("<HH", 60_000, 60_000) + b"\x80\0\0" + b"\0" * 6
    + b"\x2c" + struct.pack("<HHHH", 0, 0, 60_000, 60_000) + b"\0\x02\x02\x4c\x01\0;",
    "WEBP": b"RIFF" + struct.pack("<I", 30) + b"WEBPVP8X" + struct.pack("<I", 10) + b"\0" * 4
    + (16_000).to_bytes(3, "little") * 2 + b"VP8L\0\0\0\0",
}  # fmt: skip


@pytest.mark.parametrize("kind", BOMB)
def test_bombs_are_refused_by_their_header(kind):
    # red when the size is looked at after the pixels
    data = BOMB[kind]
    if kind == "PNG":
        data = data[:29] + struct.pack(">I", zlib.crc32(data[12:29])) + data[33:]
    tracemalloc.start()
    before = time.process_time()
    with pytest.raises(MediaError, match=r"pixels|damaged"):
        read(data)
    assert time.process_time() - before < 1
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_memory_is_bounded(tmp_path):
    # red when a picture above the limit is given memory before it is refused: here there is none to give
    for kind, data in BOMB.items():
        (tmp_path / kind).write_bytes(data)
    (tmp_path / "PNG2").write_bytes(png(8, 0, [bytes(9000)] * 8000, 9000))
    program = """
import resource, sys
from pathlib import Path
from kimi_jax.media.errors import MediaError
from kimi_jax.media.limits import Limits
from kimi_jax.media.prepare import prepare
from kimi_jax.media.settings import Settings
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20),) * 2)
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        prepare(path.read_bytes(), Settings(), Limits())
    except MediaError:
        print(path.name, "refused")
"""
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.stdout.split() == [word for name in sorted([*BOMB, "PNG2"]) for word in (name, "refused")], ran.stderr


def test_limits_name_themselves():
    # red when a limit is applied after decoding, or its number is missing from the message
    data = saved(Image.fromarray(COLOURS), "PNG")
    with pytest.raises(MediaError, match=rf"{len(data):,} bytes, the limit is {len(data) - 1:,}"):
        read(data, Limits(bytes=len(data) - 1))
    with pytest.raises(MediaError, match=r"24 x 16 = 384 pixels, the limit is 383"):
        read(data, Limits(pixels=383))
    read(data, Limits(bytes=len(data), pixels=384))
    with pytest.raises(ValueError, match="pixels from 1 to 89,478,485"):
        Limits(pixels=1 << 30)


def test_the_time_is_up():
    # red when the clock is looked at only when all is done
    data = saved(Image.fromarray(RNG.integers(0, 256, (400, 400, 3), np.uint8)), "PNG")
    with pytest.raises(MediaError, match=r"after 5 seconds.*before decoding"):
        decode(data, LIMITS, Deadline(time.monotonic() - 1, 5))

    class Stopping(Deadline):
        """Runs out at the third look."""

        @property
        def left(self) -> float:
            return next(looks)

    looks = itertools.chain([2.0, 1.0], itertools.repeat(0.0))
    with pytest.raises(MediaError, match="while decoding"):
        decode(data, LIMITS, Stopping(0.0, 5))


def test_a_jpeg_of_very_many_scans():
    # red when a small file may make the decoder pass over a large picture a thousand times
    data = saved(Image.fromarray(COLOURS), "JPEG", progressive=True)
    scan = data[data.index(b"\xff\xda") : data.index(b"\xff\xc4", data.index(b"\xff\xda"))]
    end = data.rindex(b"\xff\xd9")
    assert read(data).size == (24, 16)
    with pytest.raises(MediaError, match="more than 100 scans"):
        read(data[:end] + scan * 100 + data[end:])
    thumbnail = b"\xff\xed" + struct.pack(">H", 2 + 600) + scan[:2] * 300  # inside another segment they are data
    assert read(data[:2] + thumbnail + data[2:]).size == (24, 16)
    assert read(data + scan * 200).size == (24, 16)  # so are those behind the end


FILES = {
    kind: saved(
        Image.fromarray(COLOURS).convert("P") if kind == "GIF" else Image.fromarray(COLOURS),
        kind,
        **({"progressive": True} if kind == "JPEG" else {}),
    )
    for kind in FORMATS
}


@pytest.mark.parametrize("kind", FILES)
@settings(max_examples=60)
@given(data=st.data())
def test_damage_is_an_error_or_a_picture(kind, data):
    # red when anything but MediaError gets out, or a damaged header takes the limits along
    file = bytearray(FILES[kind])
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(file) - 1))
        file[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(file)))
    small = Limits(pixels=1 << 16)
    for damaged in (bytes(file), bytes(file[:cut])):
        try:
            picture = prepare(damaged, Settings(), small)
        except MediaError as error:
            assert len(str(error)) < 500
        else:
            assert picture.width * picture.height <= small.pixels


def test_errors_of_the_resize(monkeypatch):
    # red when a picture that decodes but cannot be converted ends the request with another error
    monkeypatch.setattr(Image.Image, "resize", lambda *_: 1 / 0)
    with pytest.raises(MediaError, match="damaged: ZeroDivisionError"):
        prepare(FILES["PNG"], Settings(), LIMITS)


@pytest.mark.parametrize("kind", FILES)
def test_cut_off_files_are_errors(kind):
    # red when missing parts are filled with grey
    for kept in (0.1, 0.5, 0.8):
        with pytest.raises(MediaError):
            read(FILES[kind][: int(len(FILES[kind]) * kept)])
