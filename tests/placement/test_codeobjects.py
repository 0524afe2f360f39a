"""Registers and spills read out of a code object made by hand."""

import struct
from dataclasses import replace

import msgpack
import pytest

from kimi_jax.placement.codeobjects import Kernel, kernels_of, of_program, read_kernels

METADATA = {
    "amdhsa.target": "amdgcn-amd-amdhsa--gfx950",
    "amdhsa.kernels": [
        {
            ".name": "step",
            ".vgpr_count": 126,
            ".agpr_count": 4,
            ".vgpr_spill_count": 3,
            ".group_segment_fixed_size": 512,
        },
        {".name": "mix", ".vgpr_count": 40, ".private_segment_fixed_size": 64},
    ],
}
FOUND = [
    Kernel("step", "amdgcn-amd-amdhsa--gfx950", 126, 4, 3, 0, 512),
    Kernel("mix", "amdgcn-amd-amdhsa--gfx950", 40, 0, 0, 64, 0),
]


def code_object() -> bytes:
    """A 64-bit ELF file with one section of two notes: another tool's, then the metadata."""
    payload = msgpack.packb(METADATA)
    assert payload is not None
    other = struct.pack("<III", 5, 3, 1) + b"Tool\0\0\0\0" + b"abc\0"
    note = struct.pack("<III", 7, len(payload), 32) + b"AMDGPU\0\0" + payload + b"\0" * (-len(payload) % 4)
    notes = other + note
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", header, 0x28, 64 + len(notes))
    struct.pack_into("<HH", header, 0x3A, 64, 1)
    section = bytearray(64)
    struct.pack_into("<I", section, 4, 7)
    struct.pack_into("<QQ", section, 0x18, 64, len(notes))
    return bytes(header) + notes + bytes(section)


def test_every_kernel_of_a_code_object():
    # Red when a note's name or payload is not padded to four bytes, or registers and spills change places.
    assert list(kernels_of(code_object())) == FOUND


def test_those_of_several_files(tmp_path):
    # Red when their order depends on a set's.
    for name in ("b.hsaco", "a.hsaco"):
        (tmp_path / name).write_bytes(code_object())
    assert read_kernels(set(tmp_path.iterdir())) == [*FOUND, *FOUND]


def test_a_program_has_what_was_built_for_it_and_what_it_starts_of_earlier_ones():
    # Red when another program's kernel of the same name hides this one's, or one that is never started counts.
    step, mix = FOUND
    here, better = replace(step, spills=0), replace(mix, vgprs=8)
    assert of_program([here], [step, mix], {"step"}) == (here,)
    assert of_program([here], [mix, better, step], {"step", "mix"}) == (here, mix)


def test_something_else_is_refused():
    # Red when the first bytes are not looked at.
    with pytest.raises(ValueError, match="not a 64-bit ELF file"):
        list(kernels_of(b"\x7fELF\x01" + bytes(64)))
