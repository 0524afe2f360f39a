"""Invented machines, and what they are held against."""

from kimi_jax.doctor.checks import Asked
from kimi_jax.doctor.machine import Machine, Started
from kimi_jax.doctor.need import Need
from kimi_jax.doctor.pins import Project
from kimi_jax.placement.layout import load_layout

GIB = 1 << 30
VRAM = 288 * GIB
PROJECT = Project(
    ">=3.11",
    (
        "jax==0.10.2; python_version < '3.12'",
        "jax==0.12.0.1; python_version >= '3.12'",
        "jaxlib==0.10.2; python_version < '3.12'",
        "flax==0.12.8",
        "numpy>=2.2,<3",
        'jax-rocm7-plugin==0.10.2; extra == "rocm"',
        'jax-rocm7-pjrt==0.10.2; extra == "rocm"',
    ),
)
NEED = Need("k3", load_layout("tp8"), 8192, 206 * 10**9, VRAM, 1_560 * 10**9, 14 * 10**9)
PACKAGES = {"jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8"}
PLUGIN = {"jax-rocm7-plugin": "0.10.2", "jax-rocm7-pjrt": "0.10.2"}
GOOD = Machine(
    python="3.11.9",
    system="linux",
    architecture="x86_64",
    packages={**PACKAGES, **PLUGIN},
    compiler="/usr/bin/gcc",
    started=Started("rocm", ("AMD Instinct MI355X",) * 8, (int(0.93 * VRAM),) * 8),
    driver=True,
    driver_opens=True,
    render_nodes=tuple(f"renderD{128 + i}" for i in range(8)),
    vram=(VRAM,) * 8,
    rocm="7.2.1",
    environment={
        "AMD_COMGR_NAMESPACE": "1",
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer=",
        "HIP_FORCE_DEV_KERNARG": "1",
        "XLA_CLIENT_MEM_FRACTION": "0.93",
    },
    shared_bytes=64 * GIB,
    memory_bytes=2048 * GIB,
    free_bytes=10**12,
    model_files=1_560 * 10**9,
)
LAPTOP = Machine(
    "3.11.9", "linux", "x86_64", PACKAGES, "/usr/bin/gcc", Started("cpu", ("cpu",), (None,)), memory_bytes=16 * GIB
)
ROCM = Asked("rocm", PROJECT, NEED, disk=True)
CPU = Asked("cpu", PROJECT, Need("random-tiny", load_layout("single"), 8192, 10**8, None, 10**7, 10**8))
