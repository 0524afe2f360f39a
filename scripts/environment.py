"""Makes the virtual environment that scripts/run and scripts/test use, once, and keeps it in step with pyproject.toml.

    python environment.py [--check] VENV [EXTRAS]

Run by the interpreter that the environment shall have. With --check it makes nothing and exits 1 unless all is in
place. Two first runs at once wait for each other; one that was killed is started over. Standard library only.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ADVICE = """kimi_jax: {python} cannot make a virtual environment here. Any one of these is enough:
  Debian, Ubuntu:  apt install python3-venv    (or: apt install virtualenv)
  elsewhere:       install the virtualenv package, or name another interpreter: PYTHON=/path/to/python3"""
NOT_OURS = """kimi_jax: {folder} exists, has no working pip and was not made by scripts/run.
  Remove it, or add pip to it: {folder}/bin/python -m ensurepip"""


class Environment:
    """A virtual environment with this checkout in it.

    `installed(EXTRAS)` holds the checksum of what was installed. The lock file beside the folder is empty, except while
    the environment is being changed: text that is still there when the lock is free was left by a run that was killed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.lock = folder.with_name(folder.name + ".lock")

    def installed(self, extras: str) -> Path:
        return self.folder / f"kimi-jax-installed-{extras or 'base'}"

    def is_ready(self, extras: str) -> bool:
        stamp = self.installed(extras)
        return self.python.exists() and stamp.exists() and stamp.read_text() == _checksum()

    def prepare(self, extras: str) -> None:
        """Makes and installs what is missing, while no other process does."""
        lock = os.open(self.lock, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another run is preparing {self.folder.name}, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel frees it with its last holder
        if self.is_ready(extras):
            return
        unfinished = os.fstat(lock).st_size > 0
        ours = unfinished or not self.folder.exists() or any(self.folder.glob(self.installed("*").name))
        remake = unfinished or not self.has_pip()
        if remake and not ours:
            sys.exit(NOT_OURS.format(folder=self.folder))

        os.write(lock, b"unfinished\n")
        if remake:
            _say(f"making {self.folder.name} with Python {sys.version.split()[0]}")
            self.make()
        _say(f"installing into {self.folder.name} (a minute or two the first time)")
        installed = self.install(extras, lock)
        os.ftruncate(lock, 0)
        if not installed:
            sys.exit(f"kimi_jax: installing into {self.folder.name} failed (pip's message is above)")

    def has_pip(self) -> bool:
        command = [self.python, "-m", "pip", "--version"]
        return self.python.exists() and subprocess.run(command, capture_output=True).returncode == 0

    def make(self) -> None:
        failed = []
        for way in self._ways():
            for command in way:
                done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                if done.returncode != 0:
                    failed += [f"{' '.join(map(str, command))}\n{done.stdout.rstrip()}"]
                    break
            if self.has_pip():
                return
        sys.exit("\n".join([ADVICE.format(python=sys.executable), "What was tried:", *failed]))

    def _ways(self) -> list[list[list[str | Path]]]:
        """Each way is a list of commands; the last way needs no more than a pip outside."""
        python, folder = sys.executable, self.folder
        ways: list[list[list[str | Path]]] = [[[python, "-m", "venv", "--clear", folder]]]
        if importlib.util.find_spec("virtualenv"):
            ways.append([[python, "-m", "virtualenv", "--clear", folder]])
        elif virtualenv := shutil.which("virtualenv"):
            ways.append([[virtualenv, "--clear", "--python", python, folder]])
        if importlib.util.find_spec("pip"):
            pip: list[str | Path] = [python, "-m", "pip", "--python", self.python, "install", "--quiet", "pip"]
            ways.append([[python, "-m", "venv", "--clear", "--without-pip", folder], pip])
        return ways

    def install(self, extras: str, lock: int) -> bool:
        checksum = _checksum()
        what = f"{ROOT}[{extras}]" if extras else str(ROOT)
        command = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--editable", what]
        # pip holds the lock too: where only this process is killed, the next run still waits for pip to end.
        # Its output goes to stderr: stdout belongs to the command that is about to run.
        if subprocess.run(command, stdout=sys.stderr.fileno(), pass_fds=[lock]).returncode != 0:
            return False
        for stamp in {self.installed(extras), self.installed("")}:
            stamp.write_text(checksum)
        return True


def _checksum() -> str:
    """What an installation depends on: the requirements, and where the checkout lies."""
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + str(ROOT).encode()).hexdigest()


def _say(message: str) -> None:
    print(f"kimi_jax: {message}", file=sys.stderr, flush=True)


def main() -> int:
    """Prepares the environment; with --check, says by the exit status whether it is ready."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("venv", type=Path)
    parser.add_argument("extras", nargs="?", default="")
    args = parser.parse_args()
    environment = Environment(args.venv.absolute())
    if args.check:
        return 0 if environment.is_ready(args.extras) else 1
    environment.prepare(args.extras)
    return 0


if __name__ == "__main__":
    sys.exit(main())
