"""Checkpoints of a training run: each is whole or not there, whenever the process is killed.

    step-00000500/arrays      orbax: every array of the state by its dotted path, bit for bit
    step-00000500/run.json    what the run was asked for; a resume that asks for something else is refused

A checkpoint is written under a name that no reader looks at and appears by one rename. Older ones go only after that.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from kimi_jax.train.state import TrainingError, TrainState, named_leaves

ARRAYS, RUN = "arrays", "run.json"
FORMAT = 1
"""Raised whenever an older reader would misread a checkpoint."""

_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often a run is saved.

    Attributes:
      folder: made where missing; belongs to one run.
      keep: newest checkpoints that stay.
      every: steps between two.
      run: what the weights depend on (data, sizes, rates, seed), as JSON values. It is saved with them, and compared on restore.
    """

    folder: Path
    keep: int = 2
    every: int = 500
    run: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        low = {"keep": self.keep, "every": self.every}
        problems = [f"{name} = {value}; it must be 1 or more" for name, value in low.items() if value < 1]
        if problems:
            raise TrainingError(f"Checkpoints in {self.folder} cannot be kept", problems)

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, ascending."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))

    def save(self, state: TrainState) -> Path:
        """Writes the state; a checkpoint of the same step stays as it is.

        Raises:
          CheckpointError: it cannot be written.
        """
        from kimi_jax.checkpoint import parts

        target = self.folder / f"step-{int(state.step):08d}"
        if not target.exists():
            partial = self.folder / f".{target.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
            partial.mkdir(parents=True)
            parts.save(partial / ARRAYS, named_leaves(state))
            _write(partial / RUN, {"format": FORMAT, "step": int(state.step), "run": dict(self.run)})
            _sync(partial)
            os.rename(partial, target)
            _sync(self.folder)
        self._drop_old()
        return target

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest state, None where there is none.

        Args:
          like: arrays or ``ShapeDtypeStruct`` of the same structure; they say where each array goes.

        Raises:
          TrainingError: the checkpoint is of another run: every difference in what was asked and in the arrays.
          CheckpointError: orbax cannot read it.
        """
        from kimi_jax.checkpoint import parts

        steps = self.steps()
        if not steps:
            return None
        folder = self.folder / f"step-{steps[-1]:08d}"
        wanted = named_leaves(like)
        problems = self._run_problems(folder) + _array_problems(parts.described(folder / ARRAYS), wanted)
        if problems:
            hint = "Resume with the same options, or choose another folder."
            raise TrainingError(f"{folder} cannot be resumed", problems, hint)
        arrays = parts.restore(folder / ARRAYS, {name: _target(leaf) for name, leaf in wanted.items()})
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])

    def _run_problems(self, folder: Path) -> list[str]:
        try:
            saved = json.loads((folder / RUN).read_text(encoding="utf-8"))
            version, run = saved["format"], dict(saved["run"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            return [f"{RUN} cannot be read: {error}"]
        if version != FORMAT:
            return [f"{RUN} has format {version}; this version reads {FORMAT}"]
        asked = json.loads(json.dumps(dict(self.run)))  # tuples as lists, as they are saved
        return [
            f"{key} was {json.dumps(run.get(key))}, now {json.dumps(asked.get(key))}"
            for key in dict.fromkeys((*run, *asked))
            if run.get(key) != asked.get(key)
        ]

    def _drop_old(self) -> None:
        for step in self.steps()[: -self.keep]:
            gone = self.folder / f".step-{step:08d}.old"
            # renamed first: a checkpoint that is half deleted must not look whole
            os.rename(self.folder / f"step-{step:08d}", gone)
        for left in (*self.folder.glob(".step-*.old"), *self.folder.glob(".step-*.partial")):
            shutil.rmtree(left, ignore_errors=True)


def _target(leaf: Any) -> Any:
    from kimi_jax.checkpoint.parts import Target

    return Target(tuple(leaf.shape), leaf.dtype, getattr(leaf, "sharding", None))


def _array_problems(saved: Mapping[str, tuple[tuple[int, ...], Any]], wanted: Mapping[str, Any]) -> list[str]:
    asked = {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in wanted.items()}
    problems = []
    for name in dict.fromkeys((*asked, *saved)):
        mine, theirs = asked.get(name), saved.get(name)
        if mine is None or theirs is None:
            problems.append(f"{name} is {'not saved' if theirs is None else 'saved, but not asked for'}")
        elif mine != theirs:
            problems.append(f"{name} is saved as {theirs[1]} {list(theirs[0])}, asked for as {mine[1]} {list(mine[0])}")
    return problems if len(problems) <= 20 else [*problems[:20], f"and {len(problems) - 20} more arrays"]


def _write(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as out:
        json.dump(value, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def _sync(folder: Path) -> None:
    """Puts the names in a folder on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
