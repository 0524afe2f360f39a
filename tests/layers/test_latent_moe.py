"""The mixture under a layout that also cuts the latent and the router: kernels and XLA are one layer on two devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from kimi_jax.config import parse
from kimi_jax.layers.latent_moe import LatentMoe
from kimi_jax.layers.param import declared
from kimi_jax.ops.implementation import Implementations
from kimi_jax.placement.collectives import Parallel
from kimi_jax.placement.layout import Layout, load_layout
from kimi_jax.placement.mesh import make_mesh
from kimi_jax.precision import choose_precision
from kimi_jax.testing.configs import config_json

CONFIG = parse(
    config_json(
        "tiny",
        hidden_size=48,
        num_experts=6,
        num_experts_per_token=2,
        routed_expert_hidden_size=64,
        moe_intermediate_size=64,
    )
)
LEAN = load_layout("tp8-lean")
PAIR = Layout("pair", mesh={"data": 1, "tensor": 2}, axes=LEAN.axes)


def run(impl: str, x: jax.Array, real: np.ndarray) -> np.ndarray:
    parallel, precision = Parallel.of(PAIR), choose_precision("bfloat16", platform="rocm")
    layer = LatentMoe(CONFIG, precision, parallel, Implementations.all(impl))
    graph, random = nnx.split(layer)[0], np.random.default_rng(0)
    specs, values = declared(layer), {}
    for name, spec in specs.items():
        shape = spec.shape
        if spec.dtype == np.uint8:
            values[name] = (
                random.integers(118, 124, shape) if name.endswith("scale") else random.integers(0, 256, shape)
            )
        else:
            values[name] = random.normal(size=shape) * shape[-1] ** -0.5
        values[name] = jnp.asarray(values[name], spec.dtype)

    def call(weights, x, real):
        flat = [(tuple(name.split(".")), nnx.Param(array)) for name, array in weights.items()]
        return nnx.merge(graph, nnx.from_flat_state(flat))(x, real)

    placed = {name: PAIR.spec(spec) for name, spec in specs.items()}
    whole = PartitionSpec()
    mapped = partial(jax.shard_map, mesh=make_mesh(PAIR), check_vma=False)
    return np.float32(jax.jit(mapped(call, in_specs=(placed, whole, whole), out_specs=whole))(values, x, real))


def test_kernels_and_xla_are_one_layer_where_the_latent_is_cut():
    # red when a device sends its parts in another order, the norm is of a part, or the shared experts are added on one device
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 3, CONFIG.hidden)), jnp.bfloat16)
    real = np.array([[True, True, False]])
    expected = run("reference", x, real)[real]
    got = run("interpret", x, real)[real]
    np.testing.assert_allclose(got, expected, rtol=0, atol=2.0**-6 * np.abs(expected).max())
