"""The dispatcher: verbs are found and imported alone, and every way to end has its own exit status."""

import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

from kimi_jax.cli import main as cli
from kimi_jax.problems import ProblemsError


@pytest.fixture
def verb(monkeypatch):
    """Installs a verb named "probe" whose work is the given function."""

    def install(work):
        module = ModuleType("kimi_jax.cli.probe")

        def add_parser(subparsers):
            parser = subparsers.add_parser("probe", help="a verb of the tests")
            parser.add_argument("--size", type=int, default=1)

        module.add_parser, module.run = add_parser, work
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.VERBS, "probe", "a verb of the tests")

    return install


def raiser(error):
    def work(args):
        raise error

    return work


def test_the_verbs_status_is_the_status(verb):
    verb(lambda args: args.size)
    assert cli.main(["probe", "--size", "0"]) == 0
    assert cli.main(["probe", "--size", "7"]) == 7  # red when run's result is dropped


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ProblemsError("no", ["one", "two"]), 2),
        (ValueError("broken"), 1),  # red when every ValueError counts as a refusal
        (FileNotFoundError("gone"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_have_their_status_and_leave_stdout_alone(verb, capsys, error, status):
    verb(raiser(error))
    assert cli.main(["probe"]) == status
    out, err = capsys.readouterr()
    assert out == ""  # red when a message is printed to stdout
    assert err.startswith("kimi-jax probe")
    assert str(error) in err
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [["--debug", "probe"], ["probe", "--debug"]])
def test_debug_shows_the_traceback_on_either_side_of_the_verb(verb, capsys, words):
    seen = []
    verb(lambda args: seen.append(args.debug) or raiser(ValueError("broken"))(args))
    assert cli.main(words) == 1
    assert "Traceback" in capsys.readouterr().err
    assert seen == [True]  # red when the verb's own --debug default is False


@pytest.mark.parametrize(
    "words", [[], ["fly"], ["probe", "--size", "large"], ["probe", "--unknown"], ["--unknown", "probe"]]
)
def test_a_wrong_command_line_is_refused(verb, capsys, words):
    verb(lambda args: 0)
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: kimi-jax" in err  # red when argparse's message is swallowed


def test_help_lists_every_verb(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"    {name} " in out for name in cli.VERBS)  # red when a verb has no line


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kimi-jax 0.")


@pytest.mark.parametrize("name", cli.VERBS)
def test_every_listed_verb_is_there(capsys, name):
    assert callable(import_module(f"kimi_jax.cli.{name}").run)
    assert cli.main([name, "--help"]) == 0
    assert f"usage: kimi-jax {name}" in capsys.readouterr().out  # red when a module names its sub-parser otherwise


def test_no_verb_and_no_jax_is_imported_for_the_overview():
    probe = (
        "import sys; from kimi_jax.cli.main import main; main(['--help']); "
        "print([name for name in sys.modules if name in {'jax', 'flax', 'kimi_jax.cli.generate'}])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"  # red when main.py imports the verbs at its top
