"""Each check, on an invented machine: all is well on a good one, and one thing broken is one finding that says what to do."""

from dataclasses import replace

import pytest

from kimi_jax.doctor.checks import examine, ready, what_works
from kimi_jax.doctor.machine import Machine, Started
from kimi_jax.placement.layout import load_layout
from tests.doctor.machines import CPU, GIB, GOOD, LAPTOP, NEED, PACKAGES, PROJECT, ROCM, VRAM


def without(name: str) -> Machine:
    return with_variables(**{name: None})


def with_variables(**changes) -> Machine:
    merged = {**GOOD.environment, **changes}
    return replace(GOOD, environment={name: value for name, value in merged.items() if value is not None})


def test_all_is_well_on_a_good_machine():
    found = examine(GOOD, ROCM)
    assert {finding.state for finding in found} == {"ok"} and ready(found)
    assert all(not finding.todo for finding in found)


BROKEN = {
    "old Python": (replace(GOOD, python="3.10.1"), "Python", "wrong", "install Python >=3.11"),
    "no jaxlib": (
        replace(GOOD, packages={**GOOD.packages, "jaxlib": None}),
        "jaxlib",
        "missing",
        "pip install jaxlib==0.10.2",
    ),
    "plugin": (
        replace(GOOD, packages={**GOOD.packages, "jax-rocm7-plugin": "0.12.0"}),
        *("jax-rocm7-plugin", "wrong", "pip install jax-rocm7-plugin==0.10.2"),
    ),
    "no driver": (replace(GOOD, driver=False), "/dev/kfd", "missing", "--device /dev/kfd"),
    "groups": (replace(GOOD, driver_opens=False), "/dev/kfd", "wrong", "groups render and video"),
    "no nodes": (replace(GOOD, render_nodes=()), "/dev/dri", "missing", "--device /dev/dri"),
    "few nodes": (replace(GOOD, render_nodes=("renderD128",)), "/dev/dri", "wrong", "tp8 needs 8"),
    "no ROCm": (replace(GOOD, rocm=None), "ROCm libraries", "missing", "plugin 0.10.2 needs ROCm"),
    "ROCm that crashes": (replace(GOOD, rocm="7.2.0"), "ROCm libraries", "wrong", "!=7.2.0"),
    "nightly ROCm": (replace(GOOD, rocm="8.0.0a20260901"), "ROCm libraries", "wrong", "<8"),
    "old ROCm": (replace(GOOD, rocm="6.4.1"), "ROCm libraries", "wrong", ">=7.0"),
    "hang": (without("AMD_COMGR_NAMESPACE"), "AMD_COMGR_NAMESPACE", "missing", "export AMD_COMGR_NAMESPACE=1"),
    "hang too": (
        with_variables(AMD_COMGR_NAMESPACE="0"),
        "AMD_COMGR_NAMESPACE",
        "wrong",
        "export AMD_COMGR_NAMESPACE=1",
    ),
    "no flags": (without("XLA_FLAGS"), "XLA_FLAGS", "missing", 'XLA_FLAGS="--xla_gpu_enable_command_buffer="'),
    "other flags": (
        with_variables(XLA_FLAGS="--xla_dump_to=/tmp/x"),
        *("XLA_FLAGS", "missing", 'XLA_FLAGS="--xla_dump_to=/tmp/x --xla_gpu_enable_command_buffer="'),
    ),
    "buffers on": (
        with_variables(XLA_FLAGS="--xla_gpu_enable_command_buffer= --xla_gpu_enable_command_buffer=FUSION"),
        *("XLA_FLAGS", "wrong", 'XLA_FLAGS="--xla_gpu_enable_command_buffer="'),  # the last one counts
    ),
    "odd quotes": (
        with_variables(XLA_FLAGS="--xla_dump_to='x"),
        *(
            "XLA_FLAGS",
            "missing",
            "--xla_dump_to='x --xla_gpu_enable_command_buffer=",
        ),  # red (ValueError) as shell words
    ),
    "both fractions": (
        with_variables(XLA_PYTHON_CLIENT_MEM_FRACTION="0.93"),
        *("XLA_CLIENT_MEM_FRACTION", "wrong", "unset XLA_PYTHON_CLIENT_MEM_FRACTION"),
    ),
    "low fraction": (
        with_variables(XLA_CLIENT_MEM_FRACTION="0.5"),
        *(
            "XLA_CLIENT_MEM_FRACTION",
            "wrong",
            "export XLA_CLIENT_MEM_FRACTION=0.93: k3 on tp8 needs 206.0 GB of 309.2 GB",
        ),
    ),
    "no fraction": (
        with_variables(XLA_CLIENT_MEM_FRACTION="most"),
        *("XLA_CLIENT_MEM_FRACTION", "wrong", "export XLA_CLIENT_MEM_FRACTION=0.93"),
    ),
    "docker": (replace(GOOD, shared_bytes=64 << 20), "/dev/shm", "wrong", "--shm-size=64g"),
    "no shm": (replace(GOOD, shared_bytes=None), "/dev/shm", "missing", "--shm-size=64g"),
    "small pool": (
        replace(GOOD, started=replace(GOOD.started, limits=(200 * 10**9,) * 8)),
        *("device memory", "wrong", "kimi-jax plan k3 --context 8192 --layout tp8"),
    ),
    "host": (replace(GOOD, memory_bytes=8 * GIB), "host memory", "wrong", "more memory"),
    "download": (
        replace(GOOD, model_files=560 * 10**9, free_bytes=2 * 10**12),
        *("disk", "missing", "download the other 1.00 TB; there is room"),
    ),
    "full disk": (replace(GOOD, model_files=0), "disk", "wrong", "make room for 1.56 TB"),
}


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN)
def test_one_broken_thing_is_one_finding(case):
    # Red when a check looks at another fact, has no advice, or two checks report the same fault.
    machine, name, state, piece = case
    packages = {package: version for package, version in machine.packages.items() if version}
    found = examine(replace(machine, packages=packages), ROCM)
    bad = [finding for finding in found if finding.state != "ok"]
    assert [(finding.name, finding.state) for finding in bad] == [(name, state)]
    assert piece in bad[0].todo
    assert not ready(found)


def test_a_nightly_counts_as_its_release():
    assert ready(
        examine(replace(GOOD, rocm="7.3.0a20260401"), ROCM)
    )  # red when prereleases are left out, as by default


def test_what_is_not_needed_does_not_fail_the_whole():
    found = examine(replace(without("HIP_FORCE_DEV_KERNARG"), compiler=None), ROCM)
    assert {finding.name for finding in found if finding.state == "missing"} == {"gcc", "HIP_FORCE_DEV_KERNARG"}
    assert ready(found)  # red when `needed` is ignored


def test_jax_takes_three_quarters_where_nothing_is_set():
    found = {finding.name: finding for finding in examine(without("XLA_CLIENT_MEM_FRACTION"), ROCM)}
    assert found["XLA_CLIENT_MEM_FRACTION"].state == "ok"  # 206 of 231.9 GB
    more = replace(ROCM, need=replace(NEED, device_bytes=240 * 10**9))
    found = {finding.name: finding for finding in examine(without("XLA_CLIENT_MEM_FRACTION"), more)}
    assert found["XLA_CLIENT_MEM_FRACTION"].state == "missing"  # red when 0.93 is taken for granted


def test_a_jax_that_does_not_start_says_why_and_the_devices_are_missing():
    found = {f.name: f for f in examine(replace(GOOD, started=Started(error="JAX did not start within 120 s")), ROCM)}
    assert found["JAX platform"].found == "JAX did not start within 120 s"
    assert found["devices for the layout"].state == "missing"
    # The driver still says how much memory there is.
    assert found["device memory"].state == "ok" and "each has 309.2 GB" in found["device memory"].found


def test_hidden_devices_are_named():
    started = Started("rocm", ("AMD Instinct MI355X",) * 4, (int(0.93 * VRAM),) * 4)
    machine = replace(with_variables(HIP_VISIBLE_DEVICES="0,1,2,3"), started=started)
    (bad,) = [finding for finding in examine(machine, ROCM) if finding.state != "ok"]
    assert bad.found == "tp8 needs 8, there are 4" and bad.todo.startswith("unset HIP_VISIBLE_DEVICES")


def test_another_platform_than_asked():
    machine = replace(with_variables(JAX_PLATFORMS="cpu"), started=LAPTOP.started)
    found = {finding.name: finding for finding in examine(machine, ROCM)}
    assert found["JAX platform"].todo == "unset JAX_PLATFORMS (it is cpu)"
    found = {finding.name: finding for finding in examine(GOOD, CPU)}
    assert found["JAX platform"].todo == "export JAX_PLATFORMS=cpu"


class TestLaptop:
    def test_it_is_ready_for_a_small_model_and_asks_nothing_about_gpus(self):
        found = examine(LAPTOP, CPU)
        assert ready(found)
        assert not {finding.name for finding in found} & {"/dev/kfd", "ROCm libraries", "XLA_FLAGS", "jax-rocm7-pjrt"}

    def test_a_layout_of_eight_gets_fake_devices(self):
        found = examine(LAPTOP, replace(CPU, need=replace(CPU.need, layout=load_layout("tp8"))))
        (devices,) = [finding for finding in found if finding.name == "devices for the layout"]
        assert devices.state == "ok" and 'jax.config.update("jax_num_cpu_devices", 8)' in devices.found

    def test_a_large_model_is_too_large_and_the_way_out_is_named(self):
        found = examine(LAPTOP, replace(CPU, need=replace(NEED, host=3 * 10**12)))
        (bad,) = [finding for finding in found if finding.state != "ok"]
        assert (bad.name, bad.state) == ("host memory", "wrong") and "--model random-tiny" in bad.todo

    def test_what_works_there(self):
        lines = what_works(LAPTOP, examine(LAPTOP, CPU))
        assert [line.split()[1] for line in lines] == ["plan", "generate,", "compile", "compile"]

    @pytest.mark.parametrize("change", [{"compiler": None}, {"architecture": "arm64"}, {"driver": True}])
    def test_the_real_compiler_needs_gcc_linux_and_no_driver(self, change):
        machine = replace(LAPTOP, **change)
        assert not any("mi355x" in line for line in what_works(machine, examine(machine, CPU)))

    def test_nothing_works_with_another_jax(self):
        machine = replace(LAPTOP, packages={**PACKAGES, "jax": "0.9.0"})
        assert what_works(machine, examine(machine, CPU)) == ()


def test_the_pins_follow_the_python():
    # Red when the marker is not read.
    for python, wanted in (("3.11", "0.10.2"), ("3.12", "0.12.0.1")):
        assert PROJECT.pins(python)["jax"] == wanted
    assert "numpy" not in PROJECT.pins("3.11") and "jax-rocm7-pjrt" not in PROJECT.pins("3.11")
    assert PROJECT.pins("3.11", ("rocm",))["jax-rocm7-pjrt"] == "0.10.2"
