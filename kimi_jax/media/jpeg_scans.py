"""How often a JPEG file passes over its picture: each pass costs time for all pixels, and may take a hundred bytes.

Source: ITU-T T.81, annex B (markers); progressive files by usual encoders have up to about 15 scans.
"""

import re

from kimi_jax.media.errors import MediaError

MOST_SCANS = 100

_START, _SCAN, _END = b"\xff\xd8", 0xDA, 0xD9
_STANDALONE = {0x01, *range(0xD0, 0xD9)}
_NEXT_MARKER = re.compile(rb"\xff+[^\x00\xd0-\xd7\xff]")
"""After a scan's data, in which 0xff is followed by 0x00 or by a restart marker."""


def check_scans(data: bytes) -> None:
    """Raises MediaError where a JPEG file has more than ``MOST_SCANS``; other files pass."""
    if not data.startswith(_START):
        return
    at, scans = len(_START), 0
    while (found := _NEXT_MARKER.search(data, at)) is not None:
        code, at = data[found.end() - 1], found.end()
        if code == _END:
            return
        scans += code == _SCAN
        if scans > MOST_SCANS:
            raise MediaError(f"it is a JPEG file of more than {MOST_SCANS} scans, which is the limit")
        if code not in _STANDALONE:
            at += int.from_bytes(data[at : at + 2], "big")
