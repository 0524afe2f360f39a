"""Collectives by named axis, inside shard_map over eight fake devices."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import PartitionSpec as P

from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.layout import Layout, load_layout
from kimi_jax.placement.mesh import make_mesh

REVERSED = Layout(
    "reversed", mesh={"tensor": 4, "expert": 2}, axes={"heads": ["expert", "tensor"], "vocab": ["tensor", "expert"]}
)
LAYOUTS = [load_layout("tp8"), load_layout("tp4-ep2"), load_layout("dp2-tp4"), REVERSED]
named = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


def local(layout: Layout, step, in_specs, out_specs):
    """`step` under the one shard_map that the runtime uses."""
    return jax.jit(jax.shard_map(step, mesh=make_mesh(layout), in_specs=in_specs, out_specs=out_specs, check_vma=False))


def cut(layout: Layout, axis: str, dims: int = 1, at: int = 0) -> P:
    """Spec of an array whose dim `at` carries a named axis."""
    return P(*(layout.mesh_axes(axis) if dim == at else None for dim in range(dims)))


@named
def test_all_gather_joins_in_partition_spec_order(layout: Layout):
    # Red when the mesh axes are sorted into mesh order ("reversed"), or tiled along another dim.
    whole = jnp.arange(48.0).reshape(3, 16)
    step = partial(Parallel.of(layout).all_gather, name="heads", axis=-1)
    np.testing.assert_array_equal(local(layout, step, cut(layout, "heads", 2, 1), P())(whole), whole)


@named
def test_local_slice_is_the_inverse_of_all_gather(layout: Layout):
    # Red when index counts the mesh axes in another order than a PartitionSpec.
    whole = jnp.arange(48.0).reshape(16, 3)
    step = partial(Parallel.of(layout).local_slice, name="heads", axis=0)
    np.testing.assert_array_equal(local(layout, step, P(), cut(layout, "heads", 2))(whole), whole)


@named
def test_shifted_brings_what_the_share_before_holds(layout: Layout):
    # Red when shares are counted in the order of the mesh ("reversed"), which is not that of a PartitionSpec.
    step = partial(Parallel.of(layout).shifted, name="heads", by=3)
    count = Parallel.of(layout).size("heads")
    got = local(layout, step, cut(layout, "heads"), cut(layout, "heads"))(jnp.arange(1, count + 1))
    assert got.tolist() == ([0] * 3 + list(range(1, count - 2)))[:count]


@named
def test_index_is_the_position_of_the_share(layout: Layout):
    # Red when the index is that of the device in the mesh.
    parallel = Parallel.of(layout)
    indices = local(layout, lambda: jnp.full(1, parallel.index("heads")), (), cut(layout, "heads"))()
    assert indices.tolist() == list(range(parallel.size("heads")))


def test_psum_runs_over_the_union_of_mesh_axes():
    # Red when a mesh axis shared by two names is summed twice, or only the first name counts.
    layout = load_layout("tp4-ep2")
    parallel = Parallel.of(layout)
    sums = local(
        layout,
        lambda x: [parallel.psum(x, *names) for names in (("expert",), ("expert_ffn",), ("heads", "expert"))],
        P(),
        P(),
    )
    assert [float(total) for total in sums(jnp.float32(1))] == [2, 4, 8]
    assert parallel.size("expert", "expert_ffn") == 8
    assert parallel.mesh_axes("expert", "expert_ffn") == ("tensor", "expert")


def test_a_whole_axis_costs_nothing():
    # Red when a mesh axis of size 1 (data) makes a collective, or the identity copies.
    whole = Layout("whole", mesh={"data": 1, "tensor": 8}, axes={"batch": "data", "heads": "tensor"})
    for parallel in (Parallel.single(), Parallel.of(whole), Parallel.of(load_layout("single"))):
        x = jnp.ones(4)
        assert parallel.psum(x, "batch", "expert") is x
        assert parallel.all_gather(x, "latent", 0) is x and parallel.local_slice(x, "latent", 0) is x
        assert parallel.index("latent") == 0 and parallel.size("latent") == 1
        assert parallel.psum_each([(x, "latent"), (x, ("batch", "expert"))])[1] is x
        assert parallel.argmax_pair(x, jnp.arange(4, dtype=jnp.int32), "latent")[0] is x


def all_reduces(compiled_text: str) -> list[int]:
    """Operands of each all-reduce instruction of a compiled program."""
    shapes = re.findall(r"= (.*?) all-reduce(?:-start)?\(", compiled_text)
    return [len(re.findall(r"\w+\[[^]]*\]", shape)) for shape in shapes]


@named
def test_psum_each_is_one_instruction_with_two_operands(layout: Layout):
    # Red when one sum waits for the other, or when "reversed" writes its device groups in the order of the list.
    parallel = Parallel.of(layout)
    over_routed = ("expert", "expert_ffn") if parallel.size("expert", "expert_ffn") > 1 else ("heads",)
    over_shared = "ffn" if parallel.size("ffn") > 1 else "vocab"

    def step(routed, shared):
        return tuple(parallel.psum_each([(routed * 2, over_routed), (shared + 1, over_shared)]))

    run = local(layout, step, P(), P())
    routed, shared = jnp.ones((4, 3584)), jnp.ones((4, 7168))
    assert all_reduces(run.lower(routed, shared).compile().as_text()) == [2]
    got = run(routed, shared)
    assert float(got[0].max()) == float(got[1].max()) == 2 * parallel.size("heads")


def test_psum_each_keeps_different_mesh_axes_apart_and_the_order():
    # Red when everything is summed over the union, or the results come back grouped.
    layout = load_layout("tp4-ep2")
    parallel = Parallel.of(layout)
    parts = [("expert",), ("heads",), ("expert_ffn",), ("ffn", "expert"), ("latent",)]
    sums = local(layout, lambda x: parallel.psum_each([(x, names) for names in parts]), P(), P())(jnp.float32(1))
    assert [float(total) for total in sums] == [2, 8, 4, 8, 1]


VALUES = st.sampled_from([-np.inf, -1.5, 0.0, 2.0, 2.0, np.inf, np.nan]).map(np.float32)


@pytest.fixture(scope="module")
def vocabulary_argmax():
    """argmax of [3, 16] logits cut over the vocabulary, as a sampler calls it."""
    parallel = Parallel.of(REVERSED_VOCAB)

    def step(logits):
        share = logits.shape[-1]
        best = jnp.argmax(logits, axis=-1)
        value = jnp.take_along_axis(logits, best[:, None], axis=-1)[:, 0]
        return parallel.argmax_pair(value, best + parallel.index("vocab") * share, "vocab")

    return local(REVERSED_VOCAB, step, cut(REVERSED_VOCAB, "vocab", 2, 1), P())


REVERSED_VOCAB = Layout("vocab", mesh={"tensor": 4, "expert": 2}, axes={"vocab": ["expert", "tensor"]})


@settings(max_examples=60)
@given(logits=hnp.arrays(np.float32, (3, 16), elements=VALUES))
def test_argmax_pair_is_the_argmax_of_the_whole(vocabulary_argmax, logits: np.ndarray):
    # Red when ties go to the higher share, when a NaN loses, or when the index is rounded through float32.
    value, index = vocabulary_argmax(logits)
    want = np.asarray(jnp.argmax(logits, axis=-1))
    np.testing.assert_array_equal(index, want)
    np.testing.assert_array_equal(value, logits[np.arange(3), want])


def test_argmax_pair_is_one_collective_and_keeps_large_indices():
    # Red when value and index are gathered apart, or packed as float32 (2**24 + 1 is not one).
    layout = load_layout("tp8")
    parallel = Parallel.of(layout)
    run = local(layout, lambda value, index: parallel.argmax_pair(value, index, "vocab"), P(), P())
    value, index = jnp.zeros(2, jnp.bfloat16), jnp.full(2, 2**24 + 1, jnp.int32)
    assert run.lower(value, index).compile().as_text().count(" all-gather(") == 1
    best, where = run(value, index)
    assert where.tolist() == [2**24 + 1] * 2 and best.dtype == jnp.bfloat16


def test_local_slice_refuses_unequal_shares():
    # Red when dynamic_slice silently clamps.
    with pytest.raises(ValueError, match="cannot be cut into 8 equal shares of heads"):
        local(load_layout("tp8"), partial(Parallel.of(load_layout("tp8")).local_slice, name="heads", axis=0), P(), P())(
            jnp.ones(12)
        )


def test_a_parallel_is_static():
    # Red when a field makes it unhashable: a jit with it as a static argument would fail.
    one, two = Parallel.of(load_layout("tp8")), Parallel.of(load_layout("tp8"))
    assert one == two and hash(one) == hash(two)
    size = jax.jit(lambda parallel, x: x * parallel.size("heads"), static_argnums=0)
    assert float(size(one, 1.0)) == 8


def test_a_misspelt_axis_is_an_error():
    # Red when an unknown name means "not cut".
    with pytest.raises(KeyError, match='did you mean "heads"'):
        Parallel.single().psum(jnp.ones(1), "haeds")


@named
def test_gathers_together_are_the_gathers_in_one_collective(layout: Layout):
    # Red when the buffer is cut at the wrong byte, when shares come in another order, or when each is gathered by itself.
    parallel = Parallel.of(layout)
    wide = jnp.arange(2 * 16, dtype=jnp.float32).reshape(2, 16) - 7.25
    narrow = jnp.arange(2 * 48, dtype=jnp.bfloat16).reshape(2, 48)
    whole = jnp.ones((2, 3), jnp.float32)
    spec = cut(layout, "heads", 2, 1)
    step = local(
        layout,
        lambda a, b, c: parallel.all_gather_together([(a, "heads"), (b, "heads"), (c, "embed")]),
        (spec, spec, P()),
        P(),
    )
    for got, want in zip(step(wide, narrow, whole), (wide, narrow, whole), strict=True):
        np.testing.assert_array_equal(got, want)
    assert step.lower(wide, narrow, whole).as_text().count("stablehlo.all_gather") == 1
