"""Blocks read from a checkpoint: a padded expert on all ranks computes what the whole expert computes."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.blocks import read_block
from kimi_jax.placement.groups import PAD_SCALE, divides
from kimi_jax.placement.layout import Layout, load_layout
from kimi_jax.placement.mesh import make_mesh

LATENT = 64
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decode(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float64 values of MXFP4 bytes [..., K/2], low nibble first, and scales [..., K/32] (OCP MX v1.0), by hand."""
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    factors = np.where(scale == 255, np.nan, 2.0 ** (scale.astype(int) - 127))
    return E2M1[nibbles] * np.repeat(factors, 32, axis=-1)


def test_decode_of_hand_written_bytes():
    # Red when the nibbles are swapped or the bias is not 127.
    packed = np.zeros(16, np.uint8)
    packed[0] = 0x21
    assert decode(packed, np.array([127], np.uint8))[:3].tolist() == [0.5, 1.0, 0.0]
    assert decode(packed | 0x70, np.array([130], np.uint8))[1] == 48.0


def expert_specs(width: int) -> dict[str, ArraySpec]:
    """One routed expert as stored: w1 and w3 [width, LATENT], w2 [LATENT, width], packed along the last dim."""
    rows, columns = ("expert_ffn", "expert_latent"), ("expert_latent", "expert_ffn")
    up, down = (width, LATENT), (LATENT, width)
    specs = {}
    for name, axes, (out, inner) in (("w1", rows, up), ("w3", rows, up), ("w2", columns, down)):
        specs[name] = ArraySpec((out, inner // 2), np.uint8, axes, (out, inner))
        specs[f"{name}_scale"] = ArraySpec((out, inner // 32), np.uint8, axes, (out, inner))
    return specs


def run(weights: dict[str, np.ndarray], z: np.ndarray) -> np.ndarray:
    """w2 (gate * up) with a gate that is 0 at 0, like SiTU."""
    w1, w2, w3 = (decode(weights[name], weights[f"{name}_scale"]) for name in ("w1", "w2", "w3"))
    gate = np.tanh(w1 @ z / 50) * (w3 @ z)
    return w2 @ gate


def blocks(
    layout: Layout, specs: dict[str, ArraySpec], whole: dict[str, np.ndarray], rank: int
) -> dict[str, np.ndarray]:
    """What the loader builds for one rank."""
    local = {}
    for name, spec in specs.items():
        shape = layout.local_shape(spec)
        ranks = [rank if axis == "expert_ffn" else 0 for axis in spec.axes]
        index = tuple(slice(at * size, (at + 1) * size) for at, size in zip(ranks, shape, strict=True))
        fill = PAD_SCALE if name.endswith("_scale") else 0
        local[name] = read_block(layout, spec, index, whole[name].__getitem__, fill)
        assert local[name].shape == shape
    return local


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int]:
    parts = draw(st.integers(1, 12))
    return draw(st.integers(1, 12).map(lambda groups: 32 * groups).filter(lambda width: divides(width, parts))), parts


@given(cuts(), st.integers(0, 2**32 - 1))
def test_padded_shares_sum_to_the_whole_expert(cut: tuple[int, int], seed: int):
    # Red when a share's offset inside its group is dropped (wrong scale for w2), when padding bytes are not zero,
    # when a cut group's scale is replaced by the padding scale, or when that is 255, a NaN.
    width, parts = cut
    layout = Layout("cut", mesh={"tensor": parts}, axes={"expert_ffn": "tensor"})
    specs, random = expert_specs(width), np.random.default_rng(seed)
    whole = {
        name: random.integers(*((120, 134) if name.endswith("_scale") else (0, 256)), spec.shape, np.uint8)
        for name, spec in specs.items()
    }
    z = random.normal(size=LATENT)
    want = run(whole, z)
    got = sum(run(blocks(layout, specs, whole, rank), z) for rank in range(parts))
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-9 * np.abs(want).max())


@pytest.mark.parametrize("name", ["tp8", "tp4-ep2", "dp2-tp4"])
def test_blocks_placed_by_jax_are_the_array(name: str):
    # Red when the share is taken from the unplaced position, or when two mesh axes are joined in the wrong order.
    layout = load_layout(name)
    array = ArraySpec((64, 24), np.int32, ("heads", "embed"))
    whole = np.arange(64 * 24, dtype=np.int32).reshape(64, 24)
    sharding = NamedSharding(make_mesh(layout), layout.spec(array))
    reads = []

    def read(index):
        reads.append(whole[index].size)
        return whole[index]

    placed = jax.make_array_from_callback(
        layout.placed_shape(array), sharding, lambda index: read_block(layout, array, index, read, 0)
    )
    np.testing.assert_array_equal(placed, whole)
    assert max(reads) == whole.size // layout.parts("heads")  # never more than the share


def test_padded_blocks_placed_by_jax():
    # Red when placed_shape and read_block disagree on the padded width, or a rank writes at local 0.
    layout = Layout("cut", mesh={"tensor": 2}, axes={"expert_ffn": "tensor"})
    array = ArraySpec((96,), np.int32, ("expert_ffn",))
    sharding = NamedSharding(make_mesh(layout), layout.spec(array))
    whole = np.arange(1, 97, dtype=np.int32)
    placed = jax.make_array_from_callback(
        layout.placed_shape(array), sharding, lambda index: read_block(layout, array, index, whole.__getitem__, 0)
    )
    want = np.zeros(128, np.int32)
    want[:48], want[64 + 16 :] = whole[:48], whole[48:]
    np.testing.assert_array_equal(placed, want)
