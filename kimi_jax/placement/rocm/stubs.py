"""Stand-ins for the ROCm libraries that the plugin links, so that the loader accepts it on a machine without ROCm.

Compiling needs none of them: every function of a stand-in answers that there is no device. They are loaded by path, by
this process alone, and never on a machine with an AMD GPU.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from kimi_jax.placement.rocm.problem import TargetError

TOOLS = ("gcc", "readelf", "nm")
DRIVER = Path("/dev/kfd")
"""The AMD GPU driver: where it is, the real libraries are."""

SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|z)\.so|ld-linux")

OWNERS = (
    ("hipblaslt", "libhipblaslt"),
    ("hipfft", "libhipfft"),
    ("miopen", "libMIOpen"),
    ("rocblas", "librocblas"),
    ("amdsmi", "libamd_smi"),
    ("rsmi", "librocm_smi64"),
    ("nccl", "librccl"),
    ("rocprofiler", "librocprofiler-sdk"),
    ("hsa_", "libhsa-runtime64"),
    ("amdgpu_", "librocm_sysdeps_drm_amdgpu"),
    ("drm", "librocm_sysdeps_drm"),
    ("numa", "librocm_sysdeps_numa"),
    ("mbind", "librocm_sysdeps_numa"),
    ("hip", "libamdhip64"),
)
"""What a function's name holds -> the library that has it; the first match counts."""

NO_DEVICE = 100
"""hipErrorNoDevice."""

NAMES = ("hipGetErrorString", "hipGetErrorName", "hsa_status_string", "amdsmi_status_code_to_string")
VERSIONS = ("hipRuntimeGetVersion", "hipDriverGetVersion")


def load_stand_ins(plugin: Path, folder: Path) -> None:
    """Loads the stand-ins of a plugin, built into ``folder`` the first time.

    Raises:
      TargetError: the machine has an AMD GPU, a tool is missing, or the compiler refused; names each.
    """
    if DRIVER.exists():
        raise TargetError(
            "No compile-only ROCm target here",
            [f"{DRIVER} is present: this machine has the real driver, which stand-in libraries would break"],
        )
    if not folder.exists():
        _build(plugin, folder)
    for library in sorted(folder.glob("lib*.so.*[0-9]")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _build(plugin: Path, folder: Path) -> None:
    """Builds one stand-in per library, all or none."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise TargetError(
            "No compile-only ROCm target here",
            [f"{tool} is not installed" for tool in missing],
            "Install a C compiler with binutils (Debian, Ubuntu: apt install gcc).",
        )
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        built = Path(scratch) / "stubs"
        built.mkdir()
        wanted = _versions(plugin)
        for library, functions in _functions(plugin, wanted).items():
            _compile(built, library, functions)
        if not folder.exists():
            built.rename(folder)


def _versions(plugin: Path) -> dict[str, set[str]]:
    """Library that the plugin needs -> symbol versions that it wants of it."""
    needed = re.findall(r"Shared library: \[(.+?)\]", _run("readelf", "-d", str(plugin)))
    versions: dict[str, set[str]] = {name: set() for name in needed if not SYSTEM.match(name)}
    library = ""
    for line in _run("readelf", "-V", str(plugin)).splitlines():
        if of := re.search(r"File: (\S+)", line):
            library = of[1]
        elif (name := re.search(r"Name: (\S+)", line)) and library in versions:
            versions[library].add(name[1])
    return versions


def _functions(plugin: Path, versions: Mapping[str, set[str]]) -> dict[str, dict[str, list[str]]]:
    """Library -> version ("" for none) -> functions that the plugin calls."""
    found: dict[str, dict[str, list[str]]] = {name: {v: [] for v in sorted(vs)} for name, vs in versions.items()}
    for line in _run("nm", "-D", "--undefined-only", str(plugin)).splitlines():
        symbol, _, version = line.split()[-1].partition("@")
        version = version.lstrip("@")
        for part, stem in OWNERS:
            owner = next((name for name in versions if name.startswith(f"{stem}.so")), None)
            if part in symbol.lower() and owner and (not version or version in versions[owner]):
                found[owner].setdefault(version, []).append(symbol)
                break
    return found


def _compile(folder: Path, library: str, functions: Mapping[str, Sequence[str]]) -> None:
    lines, script = ["#include <stdlib.h>"], []
    by_version: dict[str, list[str]] = defaultdict(list)
    count = 0
    for version, symbols in functions.items():
        for symbol in symbols:
            name = f"stand_in_{count}"
            lines.append(f'long {name}(void *a) __asm__("{symbol}"); long {name}(void *a) {{ {_answer(symbol)} }}')
            by_version[version].append(symbol)
            count += 1
        if version:
            script.append(f"{version} {{ global: {'; '.join(by_version[version] or ['none_'])}; }};")
    source, versions, out = (folder / f"{library}{end}" for end in (".c", ".map", ""))
    source.write_text("\n".join(lines) + "\n")
    words = ["gcc", "-shared", "-fPIC", "-w", "-o", str(out), str(source), f"-Wl,-soname,{library}"]
    if script:
        versions.write_text("\n".join(script) + "\n")
        words.append(f"-Wl,--version-script={versions}")
    _run(*words)


def _answer(symbol: str) -> str:
    """The body of a stand-in."""
    if symbol == "hipGetDeviceCount":
        return f"*(int *)a = 0; return {NO_DEVICE};"
    if symbol in NAMES:
        return 'return (long)"no device (stand-in)";'
    if symbol in VERSIONS:
        return "*(int *)a = 70200000; return 0;"
    if symbol.startswith(("__hipRegister", "__hipUnregister")):
        return "return (long)calloc(1, 64);"
    if symbol.startswith("rocprofiler"):
        return "return 0;"
    return "return -1;" if symbol == "numa_available" else f"return {NO_DEVICE};"


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise TargetError("No compile-only ROCm target here", [f"{words[0]}: {said[-1]}"])
    return done.stdout
