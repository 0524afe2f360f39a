"""The tower and the projector against what the released code computed, in every placement."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.layers.vision import merge_squares
from kimi_jax.layers.vision_positions import frame_row, resample, rotary_angles
from kimi_jax.media.limits import Limits
from kimi_jax.media.packing import Packed, normalise, pack, stack
from kimi_jax.media.prepare import prepare
from kimi_jax.media.settings import Settings
from kimi_jax.model import bind
from kimi_jax.ops.packed_attention import attend
from kimi_jax.placement.layout import Layout
from kimi_jax.precision import Precision
from tests.layers.vision_tiny import FOLDER, TOLERANCE, config, golden, layout, params, steps, vision

ITEMS = ("g0", "g1", "g2", "g3")
WIDTH = 3 * 14 * 14


def item(name: str) -> tuple[tuple[int, int, int], np.ndarray]:
    frames, rows, columns = map(int, golden()[f"{name}.grid"][0])
    return (frames, rows, columns), golden()[f"{name}.pixel_values"]


def packed(*names: str, bucket: int = 160) -> Packed:
    return pack([item(name) for name in names], bucket, WIDTH)


def order(name: str) -> np.ndarray:
    """Where each patch of a pack stands in the golden data."""
    grid, _ = item(name)
    one = packed(name)
    count = int(np.prod(grid))
    return np.ravel_multi_index((one.frame[:count], one.row[:count], one.column[:count]), grid)


def close(found, wanted, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=tolerance)


HEADS = Layout("test", mesh={"a": 3, "b": 2}, axes={"vision_heads": "a", "vision_ffn": "b"})
PLACEMENTS = {
    "one device": (layout(),),
    "heads over 3, ffn over 2": (HEADS, (160,), 8),
    "ffn over 8": (layout(8, vision_ffn="tensor"), (160,), 16),
    "replicated over 8": (layout(8), (160,), 160),
}


@pytest.mark.parametrize(
    "placement", [*list(PLACEMENTS)[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in list(PLACEMENTS)[2:])]
)
def test_golden_projections(placement):
    # red when an epsilon is 1e-5, the two GELUs are swapped, positions are rescaled, a partial sum is not added up, any of
    # the pictures of a pack sees another, or attention leaves out a block of keys or counts one twice
    placed, *sizes = PLACEMENTS[placement]
    made = steps(placed, *sizes)
    found = made.encode(params(placed), stack([packed(*ITEMS)] * made.packs))[0]
    close(found[:32], golden()["batch.projected"])
    wanted = np.concatenate([golden()[f"{name}.projected"] for name in ITEMS])
    close(found[:32], wanted)


@pytest.mark.parametrize("names", [("g0",), ("g3", "g2"), ("g1", "g0", "g3")])
def test_golden_in_other_company(names):
    # red when a picture's place in its pack matters, or the mean over frames takes rows of a neighbour
    found = steps(layout()).encode(params(layout()), stack([packed(*names)]))[0]
    wanted = np.concatenate([golden()[f"{name}.projected"] for name in names])
    close(found[: len(wanted)], wanted)


def test_golden_over_devices_by_picture():
    # red when a device's pictures come back in the place of another's
    placed = layout(8, images="tensor")
    made = steps(placed)
    assert made.packs == 8
    names = [("g0",), ("g1",), ("g2",), ("g3",), ("g3", "g0"), (), ("g2", "g1"), ()]
    found = made.encode(params(placed), stack([packed(*some) for some in names]))
    assert found.sharding.spec == jax.sharding.PartitionSpec(("tensor",))
    for some, rows in zip(names, np.asarray(found), strict=True):
        wanted = np.concatenate([np.zeros((0, 80)), *(golden()[f"{name}.projected"] for name in some)])
        close(rows[: len(wanted)], wanted)


@cache
def traced():
    """Each part by itself, given what the release gave it."""

    def parts(values, one: Packed, x, final):
        tower = bind(steps(layout())._abstract[0], values).vision_tower
        angles = rotary_angles(one.row, one.column, 24)
        return {
            "patch_proj": tower.patch_embed.proj.project(one.patches, WIDTH),
            "patch_pos": tower.patch_embed(one, jnp.float32),
            "rope_cos": jnp.cos(angles),
            "rope_sin": jnp.sin(angles),
            "block0": tower.encoder.blocks[0](x, angles, one.first, one.end, 32),
            "merged": merge_squares(final, one.token),
        }

    return jax.jit(parts)


@pytest.mark.parametrize("name", ITEMS)
def test_golden_parts(name):
    # red when the part of the same name is wrong: row and column swapped, half-split rotary, an antialiased table, a frame row
    # for pictures, the four patches of a token in another order
    one, places = packed(name), order(name)
    wanted = {key: golden()[f"{name}.{key}"] for key in ("patch_proj", "patch_pos", "rope_cos", "rope_sin", "block0")}
    wanted = {key: array[places] for key, array in wanted.items()}
    wanted["merged"] = golden()[f"{name}.merged"].reshape(-1, 4 * 48)
    inputs = (wanted["patch_pos"], golden()[f"{name}.final_norm"][places])
    found = traced()(params(layout()), one, *(np.pad(x, ((0, 160 - len(places)), (0, 0))) for x in inputs))
    for key, array in wanted.items():
        close(found[key][: len(array)], array, 1e-6 if key in ("rope_cos", "rope_sin", "merged") else TOLERANCE)


def test_a_file_through_everything():
    # red when the picture's patches reach the tower in another order or normalised otherwise
    picture = prepare((FOLDER / "png" / "rgb.png").read_bytes(), Settings(), Limits())
    (found,) = steps(layout()).embed(params(layout()), [picture])
    close(found, golden()["e2e.projected"])


@pytest.mark.slow
def test_bfloat16_is_as_near_as_the_release_is():
    # red when something is kept in bfloat16 that the release keeps in float32
    precision = Precision()
    made = steps(layout(), precision=precision)
    found = np.asarray(made.encode(params(layout(), precision), stack([packed("g0")]))[0][:6], np.float64)
    exact, theirs = golden()["g0.projected"], golden()["g0.projected_bf16"]
    assert found.dtype == np.float64 and made.parameters["mm_projector.proj.0.weight"].dtype == jnp.bfloat16
    assert np.abs(found - exact).max() < 1.5 * np.abs(theirs - exact).max()
    assert np.abs(found - exact).mean() < 1.3 * np.abs(theirs - exact).mean()


def test_padding_reaches_nothing():
    # red when padding is seen by a picture or adds to a token (PF-03)
    one = packed("g0", "g2")
    empty = one.end == 0
    loud = one._replace(patches=np.where(empty[:, None], 1e4, one.patches).astype(np.float32))
    run = partial(steps(layout()).encode, params(layout()))
    assert np.asarray(run(stack([loud]))[0][:12]).tobytes() == np.asarray(run(stack([one]))[0][:12]).tobytes()
    assert np.isfinite(np.asarray(run(stack([packed()])))).all()


def plain_attention(query, key, value, first, end):
    """Every query with every key of its own, in float64."""
    out = np.zeros_like(query, np.float64)
    for at in range(len(query)):
        own = slice(first[at], end[at])
        if end[at] > first[at]:
            scores = np.einsum("hd,khd->hk", query[at], key[own]) / np.sqrt(query.shape[-1])
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[at] = np.einsum("hk,khd->hd", weights / weights.sum(axis=-1, keepdims=True), value[own])
    return out


def test_attention_with_scores_like_a_trained_model():
    # red when the running maximum is not carried on: exp of scores of hundreds is infinite
    random = np.random.default_rng(0)
    bounds = [(0, 12), (12, 13), (13, 40), (40, 57)]
    first, end = np.zeros((2, 64), np.int32)
    for begin, stop in bounds:
        first[begin:stop], end[begin:stop] = begin, stop
    query, key, value = random.standard_normal((3, 64, 2, 6)) * np.array([30, 30, 1])[:, None, None, None]
    found = jax.jit(partial(attend, block=16))(*map(jnp.float32, (query, key, value)), first, end)
    close(found, plain_attention(query, key, value, first, end), 1e-4)
    assert not np.asarray(found[57:]).any()


def test_the_table_is_resampled_without_antialiasing():
    # red when shrinking blends more than two entries, corners are aligned, or the edge is extrapolated
    table = np.random.default_rng(1).standard_normal((8, 6, 3))

    def line(size: int, entries: int) -> np.ndarray:
        weights = np.zeros((size, entries))
        for place in range(size):
            source = max(0.0, (place + 0.5) * entries / size - 0.5)
            near = int(source)
            weights[place, near] += 1 - (source - near)
            weights[place, min(near + 1, entries - 1)] += source - near
        return weights

    wanted, places = [], []
    for rows, columns in ((8, 6), (2, 22), (30, 2)):  # its own size, smaller and larger
        wanted.append(np.einsum("ra,cb,abh->rch", line(rows, 8), line(columns, 6), table).reshape(-1, 3))
        row, column = np.divmod(np.arange(rows * columns), columns)
        places.append((row, np.full_like(row, rows), column, np.full_like(row, columns)))
    together = (np.concatenate(part).astype(np.int32) for part in zip(*places, strict=True))
    close(jax.jit(resample)(np.float32(table), *together), np.concatenate(wanted), 5e-6)


def test_rows_of_frames():
    # red when sines and cosines alternate, or row 0 counts as zero
    found = np.asarray(jax.jit(frame_row, static_argnums=1)(np.arange(3, dtype=np.int32), 8))
    angles = np.arange(3)[:, None] * 10_000.0 ** (-np.arange(4) / 4)
    close(found, np.concatenate([np.sin(angles), np.cos(angles)], axis=1), 1e-6)
    assert found[0].tolist() == [0] * 4 + [1] * 4


def test_names_and_sizes_of_the_tiny_tower():
    # red when a parameter is renamed or reshaped: the file would no longer load
    assert len(params(layout())) == 2 + 6 * 3 + 1 + 3
    assert params(layout())["vision_tower.encoder.blocks.2.wqkv.weight"].shape == (3, 72, 48)
    assert config().vision == vision()
    assert normalise(np.uint8([[0, 255]])).tolist() == [[-1, 1]]
