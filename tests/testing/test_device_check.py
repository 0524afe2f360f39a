"""The drop-in device check: its cases interpreted, its accounts of bytes, its report, and what it does when a kernel misbehaves."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from kimi_jax.testing.device_check import clock, device, report, watch, worker
from kimi_jax.testing.device_check.__main__ import main
from kimi_jax.testing.device_check.case import EQUAL, SUMMED, Case, Inputs
from kimi_jax.testing.device_check.catalogue import MODEL, catalogue, names
from kimi_jax.testing.device_check.compare import compare, difference
from kimi_jax.testing.device_check.model import compare_model
from kimi_jax.testing.device_check.sizes import SIZES
from kimi_jax.testing.device_check.worker import Task
from tests.parity.light import light_compilation as light_compilation

pytestmark = pytest.mark.usefixtures("light_compilation")

ROOT = Path(__file__).parents[2]
TINY, K3 = catalogue("tiny"), catalogue("k3-tp8")

QUICK = (
    "attn_res.mix_norm/decode-batch",
    "indexer.scores/verify-long-fp8",
    "indexer.top_k/decode-batch-long",
    "kda.attend/verify",
    "linear.project_many/kda-verify",
    "mla.attend/verify-long-fp8",
    "mla.attend_selected/decode-batch-long-fp8",
    "mla.write/decode-batch",
    "moe.experts/verify",
    "moe.route/decode-batch",
    "sample.greedy/decode-batch",
)
"""A case of every kernel that a step launches; the others take a minute and are slow tests."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in TINY])
def test_a_case_holds_interpreted(name):
    # Red when a case hands kernel and reference different inputs, or a tolerance names an array that is not there.
    case = TINY[name]
    assert all(found.passed for found in compare(case, "interpret"))


class TestBytes:
    @pytest.mark.parametrize("name", TINY)
    def test_they_are_those_of_the_arrays(self, name):
        # Red when an array is forgotten, counted twice or in another dtype.
        case = TINY[name]
        inputs = case.inputs()
        shared = case.share()
        results, carried = jax.eval_shape(lambda given: case.call("reference", given), inputs._replace(shared=shared))
        moved = count(inputs.own) + count(results)
        if name == "mla.write/decode-batch":  # the cache is written at the new rows only
            moved += count(inputs.own[0])
        else:
            moved += count(inputs.carried) + count(carried)
        if name.startswith("mla.attend_selected/"):  # one byte a channel, or two
            chosen, row = inputs.own[2], shared.shape[2] * shared.dtype.itemsize
            moved += min(chosen[0].size, shared.shape[1]) * len(chosen) * row
        elif shared is not None:
            moved += count(shared) // SIZES["tiny"].experts * len(np.unique(inputs.own[1]))
        assert case.bytes == moved

    @pytest.mark.parametrize(
        ("name", "moved"),
        [
            # K3 on one of eight devices, by hand
            ("linear.project_many/kda-decode-1", 2 * (7168 + 7168 * (4 * 1536 + 128 + 12) + 4 * 1536 + 128 + 12)),
            ("attn_res.mix_norm/decode-1", 2 * 7168 * (8 + 2 + 2 + 3)),
            ("moe.experts/decode-1", 16 * 3 * 3584 * 384 * 17 // 32 + 3584 * (2 + 4) + 16 * (4 + 4)),
            (
                "moe.experts/prefill",
                896 * 3 * 3584 * 384 * 17 // 32 + 2048 * 3584 * (2 + 4) + 2048 * 16 * (4 + 4),
            ),
            (
                "mla.attend/decode-1-long-fp8",
                131072 * 576 + 12 * 256 * 512 * 2 + 12 * (192 + 128 + 128) * 2 + 4 + 4,
            ),
            ("indexer.scores/decode-1-long-fp8", 131072 * (128 + 4 + 4) + 32 * (128 * 2 + 4) + 4),
            (
                "mla.attend_selected/decode-1-long-fp8",
                2048 * (576 + 4) + 12 * 256 * 512 * 2 + 12 * (192 + 128 + 128) * 2,
            ),
            ("sample.greedy/decode-batch", 8 * 20480 * 4 + 20480 + 8 * (4 + 4 + 1)),
        ],
    )
    def test_they_are_those_of_k3(self, name, moved):
        assert K3[name].bytes == moved  # red when a size of the cut model moves

    def test_operations_of_k3(self):
        expert, row = 3 * 3584 * 384, 512 + 64
        assert K3["moe.experts/decode-batch"].flops == 2 * 8 * 16 * expert
        assert K3["linear.project_many/kda-verify"].flops == 2 * 2 * 7168 * (4 * 1536 + 128 + 12)
        absorbed = 2 * 12 * 131072 * (row + 512) + 2 * 12 * 512 * 256
        assert K3["mla.attend/decode-1-long-bf16"].flops == absorbed
        assert K3["indexer.scores/decode-1-long-fp8"].flops == 2 * 32 * 128 * 131072
        seen = sum(range(2049, 4097))
        assert K3["mla.attend/prefill-short-bf16"].flops == 2 * 12 * (seen * (192 + 128) + 4096 * 512 * 256)


def count(tree) -> int:
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_inputs_are_the_same_every_time_and_other_ones_in_every_copy():
    for case in (TINY["moe.experts/decode-batch"], TINY["kda.attend/decode-1"]):
        once, again, other = (jax.tree.leaves(case.inputs(copy)) for copy in (0, 0, 1))
        assert all(map(np.array_equal, once, again))
        assert not np.array_equal(
            once[0], other[0]
        )  # red when copies have one seed: caches would then hold the experts


def test_few_tokens_share_no_expert():
    ids = TINY["moe.experts/decode-batch"].inputs().own[1]
    assert len(np.unique(ids)) == ids.size  # red when they are drawn: the bytes would depend on the draw


class TestDifference:
    def test_of_numbers(self):
        found = difference("x", np.float32([1, -4]), np.float32([1.5, -4]), SUMMED)
        assert (found.max_abs, found.max_rel, found.passed) == (0.5, 0.125, False)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_of_what_is_not_finite(self, value):
        wrong = difference("x", np.float32([value, 0]), np.float32([1, 0]), SUMMED)
        assert (wrong.max_abs, wrong.passed) == (None, False)  # red when NaN compares as small
        assert difference("x", np.float32([value, 0]), np.float32([value, 0]), EQUAL).passed

    def test_another_shape_or_dtype_is_no_difference_but_an_error(self):
        with pytest.raises(ValueError, match=r"x is float32\[2\], the reference's float64\[3\]"):
            difference("x", np.zeros(2, np.float32), np.zeros(3), EQUAL)


class TestClock:
    def test_copies_leave_the_cache(self):
        small, large = K3["kda.attend/decode-1"], K3["linear.project_many/kda-decode-1"]
        assert clock.copies_of(large, 256 << 20) == (6, True)  # 90 MB each
        assert clock.copies_of(small, 256 << 20) == (clock.MOST_COPIES, False)  # red when a cached time is called cold
        assert clock.copies_of(K3["moe.experts/prefill"], 256 << 20) == (1, True)
        assert clock.copies_of(K3["mla.attend/prefill-short-bf16"], 256 << 20) == (1, False)  # bound by arithmetic

    def test_what_is_carried_goes_from_turn_to_turn(self, monkeypatch):
        # Red when a turn starts from the first state, or one copy's state reaches another.
        monkeypatch.setattr(clock, "TARGET", 20 * clock.SHORTEST)

        def call(impl, inputs):
            held = inputs.carried["n"] + inputs.own
            return {"twice": 2 * held}, {"n": held}

        case = Case("a.b/c", lambda random: Inputs(np.float32(1), {"n": np.float32(0)}), call, {}, 50, 1, "fp32")
        timing = clock.time_case(case, "reference", "cpu", 100, repeats=3)
        assert (timing.copies, timing.calls, timing.cold, len(timing.runs)) == (4, 20, True, 3)
        held, results = clock._turns(case, "reference", 5, None, [1.0, 3.0], [{"n": 0.0}, {"n": 1.0}])
        assert [float(each["n"]) for each in held] == [5, 16]
        assert [float(each["twice"]) for each in results] == [10, 32]

    def test_a_worker_times_what_it_has_compared(self, monkeypatch):
        monkeypatch.setattr(clock, "MOST_COPIES", 2)
        monkeypatch.setattr(clock, "TARGET", clock.SHORTEST)
        task = Task(impl="interpret", size="tiny", timed=True)
        found = json.loads(json.dumps(worker.check(TINY["moe.route/decode-batch"], task, device.find())))
        assert found["passed"] and [each["array"] for each in found["arrays"]] == ["ids", "weights"]
        timing = found["timing"]  # red when what the report reads is not there
        assert timing["seconds"] == sorted(timing["runs"])[3] > 0 and timing["spread"] >= 0
        assert (timing["copies"], timing["calls"], timing["cold"]) == (2, 4, False)

    def test_a_bandwidth_is_of_bytes_read_and_written(self, monkeypatch):
        ticks = iter(range(100))
        monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(ticks)))
        assert clock.copy_bandwidth(repeats=2, size=1 << 16, turns=3) == 2 * 3 * (1 << 16)


def test_a_worker_ends_after_an_error(monkeypatch):
    # Red when it goes on: a device that has seen an illegal access fails everything else in that process.
    def check(case, task, found):
        raise FloatingPointError("bad\ncase")

    monkeypatch.setattr(worker, "check", check)
    lines = io.StringIO()
    worker.work(Task(tuple(TINY)[:2], impl="interpret", size="tiny"), lines)
    described, started, finished = map(json.loads, lines.getvalue().splitlines())
    assert described["device"]["platform"] == "cpu" and started == {"started": next(iter(TINY))}
    assert finished == {"finished": next(iter(TINY)), "error": "FloatingPointError: bad\ncase"}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("AMD Instinct MI355X", "mi355x"),
        ("gfx950", "mi355x"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", None),
        ("AMD Instinct MI325X", None),
        ("cpu", None),
    ],
)
def test_device_files_by_kind(kind, name):
    found = device.known_device(kind)
    assert (found and found.name) == name  # red when a part of a name is enough


FAKE = """
import json, os, signal, sys, time
task, lines = json.loads(sys.argv[1]), open(int(sys.argv[2]), "w", buffering=1)
say = lambda **event: print(json.dumps(event), file=lines, flush=True)
say(device=DEVICE)
if task["copy"]:
    say(copy_bandwidth=4e12)
for name in task["cases"]:
    say(started=name)
    what = PLAN.get(name, "ok")
    if what == "hang":
        time.sleep(60)
    if what == "crash":
        print("Memory access fault by GPU", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "leave":
        sys.exit(0)
    if what == "raise":
        say(finished=name, error="ValueError: no such tile\\nand more")
        break
    wrong = [dict(array="out", max_abs=2.0, max_rel=1.0, tolerance=0.5, reason="because", passed=False)]
    timing = dict(seconds=1e-5, spread=0.1, runs=[1e-5], copies=6, cold=True, calls=9) if task["timed"] else None
    say(finished=name, error="", passed=what == "ok", arrays=wrong if what == "wrong" else [], timing=timing)
"""
H200 = {
    "kind": "NVIDIA H200",
    "platform": "cuda",
    "runtime": "PJRT C API\ncuda 12",
    "driver": "570",
    "count": 1,
    "memory_bytes": 9,
    "versions": {"python": "3", "jax": "0"},
}


def fake(plan=(), found=H200) -> tuple[str, ...]:
    return sys.executable, "-c", FAKE.replace("DEVICE", repr(found)).replace("PLAN", repr(dict(plan)))


class TestWatch:
    def test_a_case_costs_at_most_itself(self):
        # Red when a crash, a silence or an error ends the check, or is booked on another case.
        plan = {"a": "crash", "c": "hang", "d": "raise", "f": "leave"}
        told = []
        found = watch.run(
            Task(tuple("abcdefg")), 1.5, command=fake(plan), tell=lambda name, result: told.append((name, result))
        )
        errors = {name: result["error"] for name, result in found.cases.items()}
        assert list(errors) == list("abcdefg") == [name for name, _ in told]
        assert errors["a"] == "the process was killed by SIGSEGV: Memory access fault by GPU"
        assert errors["c"] == "no word within 1.5 s: stopped"
        assert errors["d"].startswith("ValueError: no such tile")
        assert errors["f"] == "the process ended without a word"
        assert errors["b"] == errors["e"] == errors["g"] == ""

    @pytest.mark.parametrize(
        ("script", "message"),
        [
            ("raise SystemExit('no driver')", "the process ended with status 1: no driver"),
            ("import time; time.sleep(60)", "no word within 0.5 s: stopped"),
            ("", "the process ended without a word"),
        ],
    )
    def test_workers_that_do_not_start_are_not_tried_for_ever(self, script, message):
        found = watch.run(Task(("a", "b")), 0.5, command=(sys.executable, "-c", script))
        assert {name: result["error"] for name, result in found.cases.items()} == {"a": message, "b": message}

    def test_the_probe_says_why(self):
        found = watch.run(Task(), 5, command=(sys.executable, "-c", "raise SystemExit('no driver')"))
        assert found.problem == "the process ended with status 1: no driver"


class TestCheck:
    def run(self, tmp_path, *arguments, worker):
        out = tmp_path / "found.json"
        status = main([*arguments, "--out", str(out)], worker)
        return status, json.loads(out.read_text()) if out.exists() else None

    def test_what_a_gpu_says_is_in_the_report(self, tmp_path, capsys):
        name = "linear.project_many/kda-decode-1"
        status, told = self.run(tmp_path, "--only", "linear*", worker=fake())
        assert status == 0 and told["summary"]["passed"] and told["summary"]["checked"] == 3
        (case,) = [each for each in told["cases"] if each["name"] == name]
        assert case["bytes"] == K3[name].bytes
        assert case["timing"]["bandwidth_share"] == pytest.approx(K3[name].bytes / 1e-5 / 4.8e12)
        assert case["timing"]["peak_share"] == pytest.approx(K3[name].flops / 1e-5 / 989.5e12)
        assert told["device"]["copy_bandwidth"] == 4e12 and told["device"]["share_of"] == "file"
        shown = capsys.readouterr().out
        assert "memory 4800 GB/s by h200.toml, what % is of; measured copy 4000 GB/s" in shown
        assert re.search(rf"^{name} +ok .* 10\.0 ", shown, re.MULTILINE)
        assert shown.splitlines()[-1] == f"written to {tmp_path / 'found.json'}"

    def test_every_key_is_documented(self, tmp_path):
        # Red when a key is added without a word, or renamed.
        _, told = self.run(tmp_path, "--only", "*mix_norm*", worker=fake({"attn_res.mix_norm/prefill": "wrong"}))

        def keys(value):
            if isinstance(value, list):
                return {key for each in value for key in keys(each)}
            return set(value) | {k for each in value.values() for k in keys(each)} if isinstance(value, dict) else set()

        values = {"sizes", "peaks", "versions"}
        told = {**told, **{key: None for key in values & set(told)}}
        told["device"] = {key: None if key in values else value for key, value in told["device"].items()}
        missing = {key for key in keys(told) if f"``{key}``" not in report.__doc__}
        assert missing == set()

    def test_shares_of_an_unknown_device_are_of_its_copy(self, tmp_path, capsys):
        _, told = self.run(tmp_path, "--only", "sample*", worker=fake(found={**H200, "kind": "NVIDIA B300"}))
        timing = told["cases"][0]["timing"]
        assert timing["bandwidth_share"] == pytest.approx(timing["bytes_per_s"] / 4e12)
        assert timing["peak_share"] is None and told["device"]["file"] is None
        assert "no device file for this kind: bandwidth % is of the measured copy 4000 GB/s" in capsys.readouterr().out

    def test_quick_times_nothing(self, tmp_path):
        status, told = self.run(tmp_path, "--only", "sample*", "--quick", worker=fake())
        assert (status, told["device"]["copy_bandwidth"]) == (0, None)
        assert {case["timing"] for case in told["cases"]} == {None}

    @pytest.mark.parametrize(
        ("what", "note"),
        [
            ("wrong", "out differs by 1.0 of its largest entry, 0.5 allowed (because)"),
            ("raise", "ValueError: no such tile"),
            ("crash", "the process was killed by SIGSEGV: Memory access fault by GPU"),
            ("hang", "no word within 1 s: stopped"),
        ],
    )
    def test_a_failure_is_named(self, tmp_path, capsys, what, note):
        name = "sample.greedy/decode-1"
        status, told = self.run(tmp_path, "--only", "sample*", "--limit", "1", worker=fake({name: what}))
        assert status == 1  # red when a failure is only printed
        assert told["summary"]["failed"] == [name] and told["summary"]["checked"] == 2
        assert f"{name}: {note}\n" in capsys.readouterr().out

    def test_a_wrong_and_a_raising_kernel(self, tmp_path, capsys):
        # The real worker with planted faults; red when an error of the kernel ends it, or a wrong result passes.
        plant = (
            "import kimi_jax.ops.attn_res.pallas as mix, kimi_jax.ops.sample.pallas as draw\n"
            "from kimi_jax.testing.device_check.worker import main\n"
            "right = mix.mix_norm\n"
            "mix.mix_norm = lambda *a, **o: [x * 1.001 for x in right(*a, **o)]\n"
            "draw.look = lambda *a, **o: 1 // 0\n"
            "main()"
        )
        worker = (sys.executable, "-c", plant)
        status, told = self.run(tmp_path, "--interpret", "--only", "[as]*/decode-1", worker=worker)
        wrong, raised = told["cases"]
        assert status == 1 and told["summary"]["failed"] == ["attn_res.mix_norm/decode-1", "sample.greedy/decode-1"]
        assert [array["passed"] for array in wrong["arrays"]] == [False, False]
        assert raised["error"].startswith("ZeroDivisionError") and told["mode"] == "interpret"
        assert told["device"]["platform"] == "cpu" and told["device"]["versions"]["jax"] == jax.__version__

    def test_without_a_gpu_nothing_is_claimed(self, tmp_path, capsys):
        cpu = fake(found={**H200, "kind": "cpu", "platform": "cpu"})
        assert self.run(tmp_path, worker=cpu) == (2, None)  # red when the reference is measured in its place
        said = capsys.readouterr().err
        assert "no GPU that kernels run on. JAX 0 sees cpu (cpu) only" in said and "--interpret" in said
        assert self.run(tmp_path, worker=(sys.executable, "-c", "raise SystemExit('no driver')")) == (2, None)
        assert "JAX does not start: the process ended with status 1: no driver" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--only", "mlp*"], f"--only mlp*: no such case. Cases: {', '.join(names())}"),
            (["--limit", "0"], "--limit 0: it must be above 0"),
            (["--out", "nowhere/x.json"], "there is no folder"),
            (["--fast"], "unrecognized arguments: --fast"),
        ],
    )
    def test_wrong_requests(self, capsys, arguments, message):
        with pytest.raises(SystemExit) as stopped:
            main(arguments, worker=("false",))
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


class TestModel:
    def command(self, script):
        return sys.executable, "-c", f"import json, sys, time; impl = sys.argv[sys.argv.index('--impl') + 1]; {script}"

    def test_ids_that_differ_fail(self):
        script = "print(json.dumps({'token_ids': [1, 2] if impl == 'pallas' or OTHER else [1, 3]}))"
        assert compare_model("pallas", 9, self.command(script.replace("OTHER", "True")))["passed"]
        found = compare_model("pallas", 9, self.command(script.replace("OTHER", "False")))
        assert (found["passed"], found["ids"], found["reference_ids"]) == (False, [1, 2], [1, 3])

    @pytest.mark.parametrize(
        ("script", "message"),
        [
            ("sys.exit('no such tile')", "kimi-jax generate ended with status 1: no such tile"),
            ("time.sleep(60)", "no answer within 1 s"),
            ("print('{}')", "KeyError: 'token_ids'"),
        ],
    )
    def test_no_answer_is_a_failure(self, script, message):
        found = compare_model("pallas", 1, self.command(script))
        assert (found["passed"], found["error"]) == (False, message)


class TestScript:
    def run(self, *arguments, **environment):
        command = ["sh", str(ROOT / "scripts" / "device_check"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **environment})

    def test_a_named_python_is_used_as_it_is(self):
        for named in ({"KIMI_PYTHON": sys.executable}, {}):
            options = ["--only", "a b"] + ([] if named else ["--python", sys.executable])
            done = self.run(*options, **named)
            assert done.returncode == 2  # red when an argument is split, or the option reaches the module
            assert "--only a b: no such case" in done.stderr

    def test_a_python_that_does_not_run(self):
        done = self.run("--python=/no/such/python")
        assert done.returncode == 2 and "/no/such/python does not run" in done.stderr
        assert "--python needs the path" in self.run("--quick", "--python").stderr


@pytest.mark.slow
def test_the_model_through_the_command(tmp_path):
    # Red when the model's answer through kernels is another, or the report loses it.
    out = tmp_path / "found.json"
    assert main(["--interpret", "--limit", "600", "--only", MODEL, "--out", str(out)]) == 0
    told = json.loads(out.read_text())
    assert told["cases"] == [] and told["model"]["name"] == MODEL and len(told["model"]["ids"]) == 16
