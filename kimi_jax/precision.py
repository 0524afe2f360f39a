"""How numbers are held: one record decides the dtype of activations, resident weights, dot operands and caches."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

import ml_dtypes
import numpy as np

from kimi_jax.problems import ProblemsError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)

ACTIVATIONS = {"bfloat16": BFLOAT16, "float32": FLOAT32}
LATENTS = {"bfloat16": BFLOAT16, "float32": FLOAT32, "fp8": FLOAT8}

ExpertForm = Literal["packed", "codes", "masters"]
SERVED_FORMS: tuple[ExpertForm, ...] = ("packed", "codes")
"""Forms that a checkpoint is loaded as."""

IndexForm = Literal["bfloat16", "float32", "fp8", "mxfp4"]


class PrecisionError(ProblemsError):
    """A dtype that is not built."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of one running model (text-model section 6).

    Attributes:
      activation: what travels between layers, and the short convolution's tail.
      operand: tensors stored as bfloat16, projections apart, stay in this dtype in memory: bfloat16 on the target, float32 on CPU,
        where XLA widens a narrow array whole before it reads any of it. Every bfloat16 is a float32: nothing changes.
      projection: matrices of projections. bfloat16 on the target and on a CPU with a matrix unit for it, else float32; in float32
        mode too, where an activation meets them as three bfloat16 terms (``ops.product``).
      latent: rows of the latent-attention cache. On CPU a bfloat16 cache is held as float32, the same values: writing into a narrow
        float array there converts the whole of it. ``fp8`` is e4m3fn with scale 1: the released checkpoint carries no cache
        scales and the rows are normalised, so values saturate at 448 and are otherwise rounded to 4 significant bits.
      experts: routed experts as the checkpoint's MXFP4 bytes, or as one int8 code a value beside the same scale bytes: twice the
        memory and the same values, which a CPU reads about twice as fast.
        ``masters`` are float32 values, for training and to compare with: no checkpoint holds them.
      index: keys of the sparse indexer's cache (K3.1 Pro): a float dtype, ``fp8`` (e4m3fn, one float32 scale a key) or
        ``mxfp4`` (codes, one scale byte per 32 channels). On CPU bfloat16 keys are held as float32, as latent rows are.
      fp8: which projections hold FP8 weights with a scale per output channel, by the name of their treatment
        (``quant/fp8_policy``); ``projection`` is the dtype of the others.
    """

    activation: np.dtype[Any] = BFLOAT16
    operand: np.dtype[Any] = BFLOAT16
    projection: np.dtype[Any] = BFLOAT16
    latent: np.dtype[Any] = BFLOAT16
    experts: ExpertForm = "packed"
    index: IndexForm = "bfloat16"
    fp8: str = "none"

    @property
    def exact(self) -> bool:
        """Whether this is the float32 mode that is compared with references."""
        return self.activation == FLOAT32


def choose_precision(
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    platform: str = "cpu",
    experts: ExpertForm | None = None,
    index_dtype: str | None = None,
) -> Precision:
    """The record for a dtype, the dtypes of the two caches, and the platform that will run it.

    Where ``experts`` is None they are kept as codes on CPU and packed elsewhere.

    Raises:
      PrecisionError: a name that is not built; float32 mode with a narrower cache.
    """
    problems = []
    if dtype not in tuple(ACTIVATIONS):  # a tuple compares; a dict would want to hash whatever was given
        problems.append(f"dtype {dtype!r} is not built; choose {' or '.join(ACTIVATIONS)}")
    if kv_dtype is not None and kv_dtype not in tuple(LATENTS):
        problems.append(f"kv_dtype {kv_dtype!r} is not built; choose {', '.join(LATENTS)}")
    experts = experts or ("codes" if platform == "cpu" else "packed")
    if experts not in SERVED_FORMS:
        problems.append(f"experts {experts!r} is not built; choose {' or '.join(SERVED_FORMS)}")
    if index_dtype is not None and index_dtype not in get_args(IndexForm):
        problems.append(f"index_dtype {index_dtype!r} is not built; choose {', '.join(get_args(IndexForm))}")
    for name, chosen in (("kv_dtype", kv_dtype), ("index_dtype", index_dtype)):
        if dtype == "float32" and chosen not in (None, "float32"):
            problems.append(f"{name} {chosen!r} with dtype float32: the exact mode stores every cache in float32")
    if problems:
        raise PrecisionError("This precision cannot be used", problems)
    activation, on_cpu = ACTIVATIONS[dtype], platform == "cpu"
    latent, index = LATENTS[kv_dtype or dtype], cast(IndexForm, index_dtype or dtype)
    return Precision(
        activation=activation,
        operand=FLOAT32 if on_cpu else activation,
        projection=cpu_projection() if on_cpu else activation,
        latent=FLOAT32 if on_cpu and latent == BFLOAT16 else latent,
        experts=experts,
        index="float32" if on_cpu and index == "bfloat16" else index,
    )


@cache
def cpu_projection() -> np.dtype[Any]:
    """bfloat16 where this CPU multiplies it in a matrix unit (AMX), four times as fast as float32; else float32."""
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return FLOAT32
    return BFLOAT16 if "amx_bf16" in described.split() else FLOAT32
