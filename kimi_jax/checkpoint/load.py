"""From stored entries to arrays on a mesh: every device's slice is made on its own, one parameter at a time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from kimi_jax.checkpoint.header import CheckpointError
from kimi_jax.checkpoint.names import Source
from kimi_jax.checkpoint.reader import CheckpointFolder
from kimi_jax.checkpoint.strict_json import limited
from kimi_jax.placement.axes import ArraySpec
from kimi_jax.placement.blocks import Slices, read_block
from kimi_jax.placement.groups import PAD_SCALE
from kimi_jax.placement.layout import Layout
from kimi_jax.quant.mxfp4 import NAN_SCALE

Progress = Callable[[str, int, int], None]
"""Called with a parameter's name once it is in place, the bytes in place so far, and the bytes in all."""

Finish = Callable[[str, jax.Array], dict[str, jax.Array]]
"""What becomes of a parameter as soon as it is in place: itself, or the arrays that are kept instead, each under its name."""

_ALIGNMENT = 64
"""A CPU device keeps a host array as it is, without a copy, where its first byte lies at a multiple of this."""


def silent(name: str, done: int, total: int) -> None:
    """The progress of somebody who does not want to know."""


def keep(name: str, array: jax.Array) -> dict[str, jax.Array]:
    """The finish of parameters that stay as they land."""
    return {name: array}


class Reader(Protocol):
    """Anything that gives stored entries of a parameter at slices of its whole shape, with explicit bounds.

    A read-only result may be a view of something that changes or goes away; a writeable one is the caller's to keep.
    """

    def __call__(self, parameter: str, index: Slices) -> np.ndarray: ...


@dataclass(frozen=True)
class FolderReader:
    """Reads parameters out of a safetensors folder; stacks experts one by one into a block of the final size."""

    folder: CheckpointFolder
    sources: Mapping[str, Source]

    def __call__(self, parameter: str, index: Slices) -> np.ndarray:
        """Entries of ``parameter`` at ``index``, in the stored dtype.

        Raises:
          CheckpointError: a scale byte is 255, the NaN of its format; names all tensors that hold one.
        """
        source = self.sources[parameter]
        if source.parts > 1:
            return source.part(self.folder.read(source.names[0]), index)
        if not source.stacked:
            return self.folder.read(source.names[0], index)
        experts = source.names[index[0]]
        parts = (self._checked(name, index[1:]) for name in experts)
        head = next(parts)
        block = _aligned((len(experts), *head.shape), head.dtype)
        block[0] = head
        for row, part in enumerate(parts, start=1):
            block[row] = part
        return block

    def _checked(self, name: str, index: Slices) -> np.ndarray:
        part = self.folder.read(name, index)
        if _is_scale(name) and np.any(part == NAN_SCALE):
            raise self._nan_error()
        return part

    def _nan_error(self) -> CheckpointError:
        scales = filter(_is_scale, (name for source in self.sources.values() for name in source.names))
        bad = [name for name in scales if np.any(self.folder.read(name) == NAN_SCALE)]
        return CheckpointError(
            f"Checkpoint {self.folder.path} holds NaN weights",
            limited([f"{name} has a scale byte {NAN_SCALE}, which is NaN in its format" for name in bad]),
            "A released checkpoint holds none: fetch the file again.",
        )


def local_blocks(
    layout: Layout, mesh: Mesh, specs: Mapping[str, ArraySpec], read: Reader, device: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """The block of every parameter that one device holds; what a process that owns only that device reads."""
    for name, spec in specs.items():
        sharding = NamedSharding(mesh, layout.spec(spec))
        index = sharding.addressable_devices_indices_map(layout.placed_shape(spec))[device]
        assert index is not None
        yield name, _block(layout, spec, name, index, read)


def place(
    layout: Layout,
    mesh: Mesh,
    specs: Mapping[str, ArraySpec],
    read: Reader,
    progress: Progress = silent,
    finish: Finish = keep,
) -> dict[str, jax.Array]:
    """Every parameter as an array on the mesh, created with its final sharding.

    One parameter is in flight at a time, so the host never holds more than the result and that parameter's slices.

    Args:
      specs: parameters by dotted path with the dtypes they are kept in; stored values are converted slice by slice.
      read: gives stored entries.
      finish: called with each parameter before the next is read.

    Raises:
      CheckpointError: from ``read`` or ``finish``; arrays placed before are freed.
    """
    params: dict[str, jax.Array] = {}
    done, total = 0, sum(spec.nbytes for spec in specs.values())
    try:
        for name, spec in specs.items():
            params |= finish(name, _placed(layout, mesh, name, spec, read))
            done += spec.nbytes
            progress(name, done, total)
    except BaseException:
        free(params)
        raise
    return params


def free(arrays: Mapping[str, jax.Array]) -> None:
    """Gives device memory back at once: the traceback of an error would keep it for as long as somebody holds that."""
    for array in arrays.values():
        array.delete()


def _placed(layout: Layout, mesh: Mesh, name: str, spec: ArraySpec, read: Reader) -> jax.Array:
    seen: dict[tuple[tuple[int | None, int | None], ...], np.ndarray] = {}

    def block(index: Slices | None) -> np.ndarray:
        assert index is not None
        key = tuple((part.start, part.stop) for part in index)
        if key not in seen:  # replicas of a slice are read once
            seen[key] = _block(layout, spec, name, index, read)
        return seen[key]

    sharding = NamedSharding(mesh, layout.spec(spec))
    return jax.block_until_ready(jax.make_array_from_callback(layout.placed_shape(spec), sharding, block))


def _block(layout: Layout, spec: ArraySpec, name: str, index: Slices, read: Reader) -> np.ndarray:
    fill = PAD_SCALE if _is_scale(name) else 0
    block = read_block(layout, spec, index, lambda wanted: read(name, wanted), fill)
    if block.flags.writeable and block.flags.c_contiguous and block.dtype == spec.dtype:
        return block
    # a view of the mapped file would follow later changes of the file
    copy = _aligned(block.shape, spec.dtype)
    copy[...] = block
    return copy


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array with undefined contents that a CPU device takes without a copy."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _is_scale(name: str) -> bool:
    return name.endswith("scale")
