"""A draft beside a loaded target: read, checked against it, and joined into one set of programs and parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import jax
from jax.sharding import Mesh

from kimi_jax.checkpoint.load import Progress, silent
from kimi_jax.draft.accept import Rule
from kimi_jax.draft.config import DraftError
from kimi_jax.draft.config_read import DraftSpec, Stream, load_spec
from kimi_jax.draft.dspark import draft_parameters
from kimi_jax.draft.load import load_draft
from kimi_jax.draft.steps import PREFIX, DraftedSteps, with_draft_axes
from kimi_jax.loop import Steps
from kimi_jax.placement.layout import validate


@dataclass(frozen=True)
class DraftOptions:
    """A draft and how it is used.

    Attributes:
      path: folder of its checkpoint.
      stream: the tapped stream, where its config.json does not say: ``attn_res`` or ``prefix``. A wrong one costs acceptance only.
      rule: ``block`` or ``token``, of acceptance where there is a temperature.
    """

    path: str | Path
    stream: Stream | None = None
    rule: Rule = "block"


def read_draft(steps: Steps, options: DraftOptions) -> DraftSpec:
    """What the draft's checkpoint says, checked against target and layout; no weights are read.

    Raises:
      DraftError: a draft that cannot be read, does not fit the target, or a layout it cannot run on; all reasons at once.
      LayoutError: the layout cannot cut it.
    """
    spec = load_spec(options.path, options.stream)
    problems = _problems(steps, spec)
    if options.rule not in get_args(Rule):
        problems.append(f"rule = {options.rule!r}; choose {' or '.join(get_args(Rule))}")
    if problems:
        raise DraftError(f"The draft {options.path} cannot serve {steps.config.name}", problems)
    layout = with_draft_axes(steps.layout, spec)
    validate(layout, draft_parameters(spec.sizes, steps.precision), f"the draft {options.path}")
    return spec


def attach(
    steps: Steps, params: Mapping[str, jax.Array], options: DraftOptions, progress: Progress = silent
) -> tuple[DraftedSteps, dict[str, jax.Array]]:
    """Programs that speculate, and the parameters of both models.

    Raises:
      DraftError, LayoutError: as :func:`read_draft`, and a checkpoint that does not match its config.json.
      CheckpointError: it cannot be read.
    """
    spec = read_draft(steps, options)
    layout, mesh = with_draft_axes(steps.layout, spec), steps.mesh
    assert isinstance(mesh, Mesh)  # arrays lie on devices
    loaded = load_draft(options.path, spec, layout, mesh, steps.precision, progress)
    same: dict[str, Any] = {field.name: getattr(steps, field.name) for field in fields(Steps)} | {"layout": layout}
    joined = DraftedSteps(**same, drafter=loaded.spec, rule=options.rule)
    return joined, {**params, **{PREFIX + name: array for name, array in loaded.params.items()}}


def _problems(steps: Steps, spec: DraftSpec) -> list[str]:
    config, problems = steps.config, []
    for name, mine, theirs in (
        ("hidden_size", spec.sizes.hidden, config.hidden),
        ("vocab_size", spec.sizes.vocab, config.vocab),
    ):
        if mine != theirs:
            problems.append(f"{name} = {mine:,}, but the target has {theirs:,}")
    outside = [layer for layer in spec.taps if layer >= config.layers]
    if outside:
        problems.append(f"taps layers {outside}; the target has layers 0 to {config.layers - 1}")
    if steps.layout.parts("sequence") > 1:
        problems.append(f"layout {steps.layout.name} cuts the sequence, which no draft follows yet; try tp8")
    return problems
