"""The tower's programs as a server uses them: any pictures in, rows of each out, nothing compiled twice."""

import dataclasses

import jax
import numpy as np
import pytest

from kimi_jax.layers.image_rows import merge
from kimi_jax.media.picture import Picture
from kimi_jax.placement.layout import Layout, LayoutError
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.vision_steps import BUCKETS, VisionSteps
from tests.layers.vision_tiny import EXACT, layout, params, steps, vision

RANDOM = np.random.default_rng(0)


def picture(*grid: int) -> Picture:
    patches = RANDOM.integers(0, 256, (int(np.prod(grid)), 3, 14, 14), np.uint8)
    return Picture(grid[2] * 14, grid[1] * 14, (grid[0], grid[1], grid[2]), patches)


def test_rows_do_not_depend_on_the_company():
    # red when rows go to the wrong picture, a mixture changes them, or a mixture compiles a program of its own
    placed = layout(2, images="tensor")
    made = VisionSteps(dataclasses.replace(vision(), layers=1), placed, make_mesh(placed), EXACT, (16, 64), 16)
    weights = {name: params(placed)[name] for name in made.parameters}
    made.warm(weights)
    programs = made.encode._cache_size()
    assert programs == 2
    pictures = [
        picture(1, 2, 2),
        picture(1, 6, 8),
        picture(2, 4, 2),
        picture(1, 2, 6),
        picture(1, 8, 8),
        picture(1, 2, 2),
    ]
    alone = [made.embed(weights, [one])[0] for one in pictures]
    assert [rows.shape for rows in alone] == [(one.tokens, 80) for one in pictures]
    for chosen in ([0, 1, 2, 3, 4, 5], [5, 3, 1], [2, 2, 0], []):
        together = made.embed(weights, [pictures[number] for number in chosen])
        for number, rows in zip(chosen, together, strict=True):
            np.testing.assert_allclose(rows, alone[number], rtol=0, atol=2e-5)
    assert made.encode._cache_size() == programs
    assert len({rows.tobytes() for rows in alone}) == 6
    assert all(rows.base is None for rows in alone)  # a view would keep its whole call in memory


@pytest.mark.parametrize(
    "grid, message",
    [
        ((5, 2, 2), "5 frames; 1 to 4 work"),
        ((1, 3, 2), "grid of 3 x 2; even numbers from 2 to 512 work"),
        ((1, 2, 514), "2 x 514"),
        ((1, 18, 18), "324 patches; 160 at most work"),
    ],
)
def test_grids_that_are_refused(grid, message):
    # red when the tower runs on what it was not made for
    with pytest.raises(ValueError, match=rf"picture 1 .*{message}"):
        steps(layout()).embed({}, [picture(1, 2, 2), picture(*grid)])


def test_patches_of_another_size():
    # red when patches are read in another shape than they come in
    wrong = Picture(28, 28, (1, 2, 2), np.zeros((4, 14, 14, 3), np.uint8))
    with pytest.raises(ValueError, match=r"patches \(4, 14, 14, 3\)"):
        steps(layout()).embed({}, [wrong])


def test_layouts_that_do_not_fit():
    # red when heads are cut unevenly, or pictures that differ are summed together
    with pytest.raises(LayoutError, match=r"vision_heads = 3 over tensor = 2.*sizes that work: 1, 3"):
        VisionSteps(vision(), layout(2, vision_heads="tensor"), make_mesh(layout(2)), EXACT)
    with pytest.raises(LayoutError, match=r'vision_heads and images both lie on mesh axis "tensor".*different images'):
        layout(2, images="tensor", vision_heads="tensor")
    shared = {"heads": "tensor", "batch": "data", "images": ["data", "tensor"]}
    Layout("fine", mesh={"data": 2, "tensor": 4}, axes=shared)  # the text model's axes are another program's


@pytest.mark.parametrize("buckets, block", [((), 16), ((64, 16), 16), ((16, 40), 16), ((6,), 16)])
def test_buckets_that_do_not_fit(buckets, block):
    # red when a block of queries hangs over the end of a pack
    with pytest.raises(ValueError, match="must ascend"):
        VisionSteps(vision(), layout(), make_mesh(layout()), EXACT, buckets, block)


def test_the_largest_picture_has_a_bucket():
    # red when buckets end at the 65,536 patches of the settings; 1861 x 7041 pixels make 67,268
    assert BUCKETS[-1] >= 67_268
    VisionSteps(vision(), layout(), make_mesh(layout()), EXACT)


def test_merge():
    # red when a text row is overwritten, an image row is scaled, or what lies at other places gets through
    text, images = RANDOM.standard_normal((2, 2, 3, 4)).astype(np.float32)
    here = np.array([[True, False, True], [False, False, True]])
    found = np.asarray(jax.jit(merge)(text, np.where(here[..., None], images, np.nan), here))
    np.testing.assert_array_equal(found, np.where(here[..., None], images, text))
    assert jax.eval_shape(merge, text.astype(np.float16), images, here).dtype == np.float16
