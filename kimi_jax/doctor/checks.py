"""Judges a machine: each check is a pure function of the facts and of what is asked of them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kimi_jax.doctor.machine import Machine
from kimi_jax.doctor.need import Need
from kimi_jax.doctor.pins import Project
from kimi_jax.placement.bytes import amount

State = Literal["ok", "missing", "wrong"]
Platform = Literal["cpu", "rocm"]

FRACTION = 0.93
"""Share of a GPU's memory that the planner lets arrays take; JAX takes 0.75 where it is not told."""

JAX_FRACTION = 0.75

DOCKER_SHARED = 64 << 20
"""/dev/shm of a container that does not ask for more; the ROCm plugin warns that RCCL may not find room there."""

ROCM = {"0.10.2": SpecifierSet(">=7.0,!=7.2.0,<8"), "0.12.0": SpecifierSet(">=7.14,<8")}
"""jax-rocm7-pjrt -> ROCm that it starts on. gfx950 needs 7.0 (github.com/ROCm/rocm-jax/pull/37); 7.2.0 crashes
(github.com/openxla/xla/pull/40405); 0.12.0 is built for 7.14 and links libraries that came with it (its wheel)."""

COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="


@dataclass(frozen=True)
class Finding:
    """One line of the answer.

    Attributes:
      name: what was looked at.
      state: ``ok``, ``missing`` or ``wrong``.
      found: what is there.
      todo: what to do about it, empty where it is ok.
      needed: whether the platform needs it; what it does not need never fails the whole.
    """

    name: str
    state: State
    found: str
    todo: str = ""
    needed: bool = True


@dataclass(frozen=True)
class Asked:
    """What the machine is held against.

    Attributes:
      platform: what shall run the model.
      project: the declared versions.
      need: of the model on its layout.
      disk: whether a folder for the weights was named.
    """

    platform: Platform
    project: Project
    need: Need
    disk: bool = False


def examine(machine: Machine, asked: Asked) -> tuple[Finding, ...]:
    """Every finding, in the order in which things must be put right."""
    found = [*_versions(machine, asked), _compiler(machine)]
    if asked.platform == "rocm":
        found += [_driver(machine), _render_nodes(machine, asked), _rocm(machine), *_variables(machine, asked)]
        found += [_shared(machine)]
    found += [_platform(machine, asked), _devices(machine, asked)]
    if asked.platform == "rocm":
        found.append(_device_memory(machine, asked))
    found.append(_host_memory(machine, asked))
    if asked.disk:
        found.append(_disk(machine, asked))
    return tuple(found)


def ready(findings: tuple[Finding, ...]) -> bool:
    """Whether the platform can be used as asked."""
    return all(finding.state == "ok" for finding in findings if finding.needed)


def what_works(machine: Machine, findings: tuple[Finding, ...]) -> tuple[str, ...]:
    """Commands that this machine can run as it is, whatever it lacks for the rest."""
    states = {finding.name: finding.state for finding in findings}
    if any(states[name] != "ok" for name in ("Python", "jax", "jaxlib", "flax")):
        return ()
    lines = [
        "kimi-jax plan k3: bytes, bounds and fit, no weights and no devices",
        "kimi-jax generate, bench: random-tiny and other small models, on fake devices of any layout",
        "kimi-jax compile random-tiny --target cpu",
    ]
    elsewhere = (machine.system, machine.architecture) == ("linux", "x86_64")
    if elsewhere and machine.compiler and not machine.driver:
        lines.append("kimi-jax compile k3 --target mi355x: the full-size step, without a GPU (fetches 150 MB once)")
    return tuple(lines)


def _versions(machine: Machine, asked: Asked) -> Iterator[Finding]:
    if _allowed(machine.python, SpecifierSet(asked.project.python)):
        yield Finding("Python", "ok", machine.python)
    else:
        yield Finding("Python", "wrong", machine.python, f"install Python {asked.project.python}")
    minor = ".".join(machine.python.split(".")[:2])
    for name, wanted in asked.project.pins(minor, ("rocm",) if asked.platform == "rocm" else ()).items():
        there, todo = machine.packages.get(name), f"pip install {name}=={wanted}"
        if there is None:
            yield Finding(name, "missing", "not installed", todo)
        elif there == wanted:
            yield Finding(name, "ok", there)
        else:
            yield Finding(name, "wrong", there, f"{todo}: it goes with Python {minor} and the other packages")


def _compiler(machine: Machine) -> Finding:
    name = "gcc"
    if machine.compiler:
        return Finding(name, "ok", machine.compiler, needed=False)
    todo = "apt install gcc, if `kimi-jax compile` shall build for a GPU that is not here"
    return Finding(name, "missing", "not installed", todo, needed=False)


def _driver(machine: Machine) -> Finding:
    name = "/dev/kfd"
    if not machine.driver:
        todo = "install the amdgpu driver on the host; in a container add --device /dev/kfd"
        return Finding(name, "missing", "no AMD GPU driver", todo)
    if not machine.driver_opens:
        todo = "add the user to the groups render and video; in a container add --group-add of both"
        return Finding(name, "wrong", "this user may not open it", todo)
    return Finding(name, "ok", "can be opened")


def _render_nodes(machine: Machine, asked: Asked) -> Finding:
    name, count, wanted = "/dev/dri", len(machine.render_nodes), asked.need.layout.devices
    if not count:
        return Finding(name, "missing", "no GPU", "in a container add --device /dev/dri")
    if count < wanted:
        return Finding(
            name, "wrong", f"{count} GPUs", f"layout {asked.need.layout.name} needs {wanted}: pass all of them"
        )
    return Finding(name, "ok", f"{count} GPUs")


def _rocm(machine: Machine) -> Finding:
    name = "ROCm libraries"
    plugin = machine.packages.get("jax-rocm7-pjrt", "")
    wanted = ROCM.get(plugin)
    needs = f"plugin {plugin} needs ROCm {wanted}" if wanted else "docs/rocm.md says which ROCm each plugin needs"
    if machine.rocm is None:
        todo = f"install ROCm, or set ROCM_PATH to where it is; {needs}"
        return Finding(name, "missing", "no version under ROCM_PATH, in /opt/rocm or among Python packages", todo)
    if wanted and not _allowed(machine.rocm, wanted):
        return Finding(name, "wrong", machine.rocm, needs)
    return Finding(name, "ok", machine.rocm)


def _variables(machine: Machine, asked: Asked) -> Iterator[Finding]:
    yield _variable(machine, "AMD_COMGR_NAMESPACE", "1", "without it JAX hangs for minutes when it starts")
    yield _command_buffers(machine)
    yield _variable(machine, "HIP_FORCE_DEV_KERNARG", "1", "launches are slower without it", needed=False)
    yield _fraction(machine, asked)


def _variable(machine: Machine, name: str, wanted: str, why: str, *, needed: bool = True) -> Finding:
    value, todo = machine.environment.get(name), f"export {name}={wanted} ({why})"
    if value is None:
        return Finding(name, "missing", "not set", todo, needed)
    return Finding(name, "ok", value, needed=needed) if value == wanted else Finding(name, "wrong", value, todo, needed)


def _command_buffers(machine: Machine) -> Finding:
    """XLA's flag: an empty list of what may go into a command buffer; the last one counts."""
    flags = machine.environment.get("XLA_FLAGS", "")
    given = [word for word in flags.split() if word.startswith(COMMAND_BUFFERS)]
    others = " ".join(word for word in flags.split() if not word.startswith(COMMAND_BUFFERS))
    wanted = f'export XLA_FLAGS="{f"{others} " if others else ""}{COMMAND_BUFFERS}" (loops in command buffers crash on gfx950)'
    if not given:
        return Finding("XLA_FLAGS", "missing", flags or "not set", wanted)
    if given[-1] != COMMAND_BUFFERS:
        return Finding("XLA_FLAGS", "wrong", flags, wanted)
    return Finding("XLA_FLAGS", "ok", flags)


def _fraction(machine: Machine, asked: Asked) -> Finding:
    """Whether JAX may take as much of a GPU as the model needs there."""
    name, old = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    given = {key: machine.environment[key] for key in (name, old) if machine.environment.get(key)}
    export = f"export {name}={FRACTION:g}"
    if len(given) == 2:
        return Finding(name, "wrong", f"set together with {old}", f"JAX refuses both: unset {old}")
    text = next(iter(given.values()), None)
    if text is not None and not (re.fullmatch(r"\d*\.?\d+", text) and 0 < float(text) <= 1):
        return Finding(name, "wrong", text, export)
    fraction = JAX_FRACTION if text is None else float(text)
    said = f"JAX takes {fraction:g} of the memory" + (f" ({next(iter(given))})" if given else " where nothing is set")
    total = min(machine.vram, default=asked.need.device_memory)
    if total is not None and fraction * total < asked.need.device_bytes:
        need = f"{amount(asked.need.device_bytes)} of {amount(total)}"
        return Finding(name, "wrong" if given else "missing", said, f"{export}: {_subject(asked)} needs {need}")
    return Finding(name, "ok", said)


def _shared(machine: Machine) -> Finding:
    name, size = "/dev/shm", machine.shared_bytes
    todo = "in a container add --shm-size=64g (or --ipc=host): RCCL keeps buffers there"
    if size is None:
        return Finding(name, "missing", "not there", todo)
    state: State = "ok" if size > DOCKER_SHARED else "wrong"
    return Finding(name, state, f"{amount(size)}", "" if state == "ok" else todo)


def _platform(machine: Machine, asked: Asked) -> Finding:
    name, started = "JAX platform", machine.started
    if started.platform is None:
        advice = "put right what is above first; `python -c 'import jax; jax.devices()'` shows the whole message"
        return Finding(name, "wrong", started.error, advice)
    found = f"{len(started.kinds)} x {started.kinds[0]} ({started.platform})"
    if started.platform == asked.platform:
        return Finding(name, "ok", found)
    chosen = machine.environment.get("JAX_PLATFORMS")
    advice = f"unset JAX_PLATFORMS (it is {chosen})" if chosen else "put right what is above first"
    if asked.platform == "cpu":
        advice = "export JAX_PLATFORMS=cpu"
    return Finding(name, "wrong", found, advice)


def _devices(machine: Machine, asked: Asked) -> Finding:
    name, layout, count = "devices for the layout", asked.need.layout, len(machine.started.kinds)
    wanted = f"{layout.name} needs {layout.devices}"
    if asked.platform == "cpu":
        line = f'jax.config.update("jax_num_cpu_devices", {layout.devices})'
        made = f"; in Python first: {line}" if layout.devices > 1 else ""
        return Finding(name, "ok", f"{wanted}; commands make fake ones{made}")
    if machine.started.platform == asked.platform and count >= layout.devices:
        return Finding(name, "ok", f"{wanted}, there are {count}")
    count = count if machine.started.platform == asked.platform else 0
    hidden = [key for key in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if key in machine.environment]
    less = f"--layout with at most {count} devices" if count else "--platform cpu, which looks at what works without"
    advice = f"unset {' and '.join(hidden)}, or " if hidden else ""
    return Finding(name, "wrong" if count else "missing", f"{wanted}, there are {count}", f"{advice}try {less}")


def _device_memory(machine: Machine, asked: Asked) -> Finding:
    """What JAX may take of the smallest device, as it says itself, or what the driver says there is."""
    name, need, started = "device memory", asked.need.device_bytes, machine.started
    limits = [limit for limit in started.limits if limit] if started.platform == asked.platform else []
    have = min(limits or machine.vram, default=None)
    wants = f"{_subject(asked)} needs {amount(need)} on each device"
    if have is None:
        return Finding(name, "missing", f"{wants}; no device says how much it has", "put right what is above first")
    found = f"{wants}, JAX may take {amount(have)}" if limits else f"{wants}, each has {amount(have)}"
    if have >= need:
        return Finding(name, "ok", found)
    advice = f"raise XLA_CLIENT_MEM_FRACTION, or see what would fit: kimi-jax plan {asked.need.model} --context "
    return Finding(name, "wrong", found, f"{advice}{asked.need.context} --layout {asked.need.layout.name}")


def _host_memory(machine: Machine, asked: Asked) -> Finding:
    name, need, have = "host memory", asked.need.host, machine.memory_bytes
    what = "to hold every device" if asked.platform == "cpu" else "to load and compile"
    wants = f"{_subject(asked)} needs {amount(need)} {what}"
    if have is None:
        return Finding(name, "ok", f"{wants}; how much there is is unknown", needed=False)
    if have >= need:
        return Finding(name, "ok", f"{wants}, there are {amount(have)}")
    smaller = (
        "a smaller model (--model random-tiny); plan and compile need no weights" if asked.platform == "cpu" else ""
    )
    return Finding(name, "wrong", f"{wants}, there are {amount(have)}", smaller or "more memory, or swap while loading")


def _disk(machine: Machine, asked: Asked) -> Finding:
    name, files, there, free = "disk", asked.need.files, machine.model_files, machine.free_bytes or 0
    if there >= files:
        return Finding(name, "ok", f"{amount(there)} of weights are there")
    missing = files - there
    found = f"{amount(there)} of {amount(files)} of weights are there, {amount(free)} are free"
    if free >= missing:
        return Finding(name, "missing", found, f"download the other {amount(missing)}; there is room")
    return Finding(name, "wrong", found, f"make room for {amount(missing)}, or name another --model folder")


def _allowed(version: str, wanted: SpecifierSet) -> bool:
    return wanted.contains(Version(version), prereleases=True)


def _subject(asked: Asked) -> str:
    return f"{asked.need.model} on {asked.need.layout.name}"
