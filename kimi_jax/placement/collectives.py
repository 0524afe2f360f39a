"""Collectives by named axis, for code that runs inside one `jax.shard_map` over all mesh axes (check_vma=False).

A layer says what it sums over ("heads", "ffn"), never which mesh axis that is. Everything is the identity for an axis
that the layout keeps whole, so one source serves one device and every layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from kimi_jax.placement.axes import AXES
from kimi_jax.placement.layout import Layout
from kimi_jax.problems import nearest


@dataclass(frozen=True)
class Parallel:
    """Which mesh axes cut each named axis: static and hashable, so it may be an attribute of a module.

    Attributes:
      mesh: (mesh axis, size) of the axes larger than 1, in mesh order.
      axes: (named axis, its mesh axes larger than 1, most significant first) of the axes that are cut.
      interleave: consecutive positions of a cut sequence that lie on one device.
    """

    mesh: tuple[tuple[str, int], ...] = ()
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    interleave: int = 1

    @classmethod
    def single(cls) -> Parallel:
        """Nothing is cut: every collective is the identity, and no mesh is needed."""
        return cls()

    @classmethod
    def of(cls, layout: Layout) -> Parallel:
        """The collectives of a layout."""
        mesh = {axis: size for axis, size in layout.mesh.items() if size > 1}
        cut = {axis: tuple(m for m in layout.mesh_axes(axis) if m in mesh) for axis in AXES}
        found = tuple((axis, mesh_axes) for axis, mesh_axes in cut.items() if mesh_axes)
        return cls(tuple(mesh.items()), found, layout.interleave)

    def mesh_axes(self, *names: str) -> tuple[str, ...]:
        """Mesh axes that cut any of the named axes: in the order of the layout for one name, of the mesh for several.

        Raises:
          KeyError: there is no such named axis.
        """
        for name in names:
            if name not in AXES:
                raise KeyError(f'"{name}" is no named axis{nearest(name, AXES)}')
        cut = dict(self.axes)
        if len(names) == 1:
            return cut.get(names[0], ())
        wanted = {mesh_axis for name in names for mesh_axis in cut.get(name, ())}
        return tuple(mesh_axis for mesh_axis, _ in self.mesh if mesh_axis in wanted)

    def size(self, *names: str) -> int:
        """How many devices share the named axes."""
        sizes = dict(self.mesh)
        return math.prod(sizes[mesh_axis] for mesh_axis in self.mesh_axes(*names))

    def common(self, name: str, other: str) -> int:
        """How many of the devices that share one named axis hold different shares of the other."""
        sizes = dict(self.mesh)
        return math.prod(sizes[mesh_axis] for mesh_axis in self._both(name, other))

    def index(self, name: str) -> int | Array:
        """Which share of the named axis this device holds, in the order of a PartitionSpec; 0 when it is whole."""
        mesh_axes = self.mesh_axes(name)
        return lax.axis_index(mesh_axes) if mesh_axes else 0

    def psum(self, tree: Any, *names: str) -> Any:
        """Sum every leaf over the devices that share the named axes, over the union of their mesh axes."""
        wanted = self.mesh_axes(*names)
        # Mesh order whatever the layout says: XLA only joins reductions whose device groups are written alike.
        mesh_axes = tuple(mesh_axis for mesh_axis, _ in self.mesh if mesh_axis in wanted)
        return lax.psum(tree, mesh_axes) if mesh_axes else tree

    def psum_each(self, parts: Sequence[tuple[Any, str | tuple[str, ...]]]) -> list[Any]:
        """Sum several values, each over its own named axes, in one reduction where the mesh axes agree.

        JAX writes one all_reduce per leaf, also for a tuple; XLA's combiner joins those of equal device groups and
        dtype that do not need one another into one instruction. Values given here together never need one another.

        Args:
          parts: (value or pytree, named axis or axes) pairs.

        Returns:
          The sums, in order.
        """
        return [self.psum(value, *((names,) if isinstance(names, str) else names)) for value, names in parts]

    def all_gather(self, x: Shaped[Array, "..."], name: str, axis: int) -> Shaped[Array, "..."]:
        """Join the shares of a named axis along dim `axis`, in the order of a PartitionSpec."""
        mesh_axes = self.mesh_axes(name)
        return lax.all_gather(x, mesh_axes, axis=axis % x.ndim, tiled=True) if mesh_axes else x

    def stacked(self, x: Shaped[Array, "..."], name: str) -> Shaped[Array, "parts ..."]:
        """What every share of a named axis holds, along a new first dim in the order of `index`."""
        mesh_axes = self.mesh_axes(name)
        return lax.all_gather(x, mesh_axes, axis=0, tiled=False) if mesh_axes else x[None]

    def shifted(self, x: Shaped[Array, "..."], name: str, by: int) -> Shaped[Array, "..."]:
        """What the share `by` places before holds; zeros where there is none."""
        mesh_axes = self.mesh_axes(name)
        if not mesh_axes:
            return jnp.zeros_like(x)
        # the order of the mesh, which ppermute asks for: counted there, share `s` is `place[s]`
        shape = [size for axis, size in self.mesh if axis in mesh_axes]
        inside = [axis for axis, _ in self.mesh if axis in mesh_axes]
        place = np.arange(math.prod(shape)).reshape(shape).transpose([inside.index(axis) for axis in mesh_axes]).ravel()
        pairs = [(int(place[share]), int(place[share + by])) for share in range(len(place) - by)]
        return lax.ppermute(x, tuple(inside), pairs)

    def gather_among(self, x: Shaped[Array, "..."], name: str, among: str, axis: int) -> Shaped[Array, "..."]:
        """Join along dim `axis`, which `among` cuts, what the shares of `name` hold of it: all that those devices hold.

        The identity over mesh axes that do not cut `among`: their devices hold the same.
        """
        mesh_axes = self._both(name, among)
        return lax.all_gather(x, mesh_axes, axis=axis % x.ndim, tiled=True) if mesh_axes else x

    def scatter_among(self, x: Shaped[Array, "..."], name: str, among: str, axis: int) -> Shaped[Array, "..."]:
        """Sum over the shares of `name`, each of which ends with its own part of dim `axis`: back from `gather_among`."""
        mesh_axes = self._both(name, among)
        rest = tuple(mesh_axis for mesh_axis in self.mesh_axes(name) if mesh_axis not in mesh_axes)
        if mesh_axes:
            x = lax.psum_scatter(x, mesh_axes, scatter_dimension=axis % x.ndim, tiled=True)
        return lax.psum(x, rest) if rest else x

    def _both(self, name: str, among: str) -> tuple[str, ...]:
        """Mesh axes that cut both, in the order of `name`."""
        cut = self.mesh_axes(among)
        return tuple(mesh_axis for mesh_axis in self.mesh_axes(name) if mesh_axis in cut)

    def all_gather_together(self, parts: Sequence[tuple[Shaped[Array, "..."], str]]) -> list[Shaped[Array, "..."]]:
        """Join the last dims of several arrays, each over its named axis, in one collective where their mesh axes agree.

        Gathers have no variadic form: the arrays travel as one buffer of bytes beside each other.

        Args:
          parts: (array, named axis of its last dim) pairs; the leading dims agree.

        Returns:
          The whole arrays, in order.
        """
        cut = [(x, name) for x, name in parts if self.size(name) > 1]
        if len(cut) < 2 or len({self.mesh_axes(name) for _, name in cut}) > 1:
            return [self.all_gather(x, name, -1) for x, name in parts]
        bits = [_as_bytes(x) for x, _ in cut]
        sending = jnp.concatenate(bits, axis=-1)
        joined = lax.all_gather(sending, self.mesh_axes(cut[0][1]), axis=sending.ndim - 1, tiled=False)
        whole, start = [], 0
        for (x, _), sent in zip(cut, bits, strict=True):
            piece = joined[..., start : start + sent.shape[-1]]
            start += sent.shape[-1]
            whole.append(_from_bytes(piece, x.dtype).reshape(*x.shape[:-1], -1))
        waiting = iter(whole)
        return [next(waiting) if self.size(name) > 1 else x for x, name in parts]

    def local_slice(self, x: Shaped[Array, "..."], name: str, axis: int) -> Shaped[Array, "..."]:
        """This device's share of a whole array along dim `axis`: the inverse of `all_gather`.

        Raises:
          ValueError: the dim cannot be cut into equal shares.
        """
        size = self.size(name)
        if size == 1:
            return x
        if x.shape[axis] % size:
            raise ValueError(f"dim {axis} of {x.shape} cannot be cut into {size} equal shares of {name}")
        share = x.shape[axis] // size
        return lax.dynamic_slice_in_dim(x, self.index(name) * share, share, axis)

    def argmax_pair(
        self, value: Float[Array, "..."], index: Int[Array, "..."], *names: str
    ) -> tuple[Float[Array, "..."], Int[Array, "..."]]:
        """Merge the (maximum, global index) of each share into the global one, with one all_gather of packed pairs.

        Ties go to the lower index and a NaN counts as the largest, like `jnp.argmax` over the whole array; the result
        is the same on every device.

        Args:
          value: local maximum, any shape; at most 32 bits wide.
          index: its index in the whole array, same shape.
          names: named axes that the array is cut by.

        Returns:
          (value in its dtype, index int32).
        """
        index = index.astype(jnp.int32)
        mesh_axes = self.mesh_axes(*names)
        if not mesh_axes:
            return value, index
        bits = lax.bitcast_convert_type(value.astype(jnp.float32), jnp.int32)
        pairs = lax.all_gather(jnp.stack([bits, index]), mesh_axes, axis=0, tiled=False)
        values, indices = lax.bitcast_convert_type(pairs[:, 0], jnp.float32), pairs[:, 1]
        best = jnp.max(values, axis=0)
        wins = (values == best) | (jnp.isnan(values) & jnp.isnan(best))
        return best.astype(value.dtype), jnp.min(jnp.where(wins, indices, jnp.iinfo(jnp.int32).max), axis=0)


def _as_bytes(x: Shaped[Array, "*rows width"]) -> Shaped[Array, "*rows bytes"]:
    """The same memory as uint8, an element's bytes side by side."""
    split = lax.bitcast_convert_type(x, jnp.uint8)
    return split.reshape(*x.shape[:-1], -1) if split.ndim > x.ndim else split


def _from_bytes(x: Shaped[Array, "*rows bytes"], dtype: Any) -> Shaped[Array, "*rows width"]:
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, size) if size > 1 else x, dtype)
