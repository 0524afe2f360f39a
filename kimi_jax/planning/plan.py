"""The plan of a configuration on a layout: bytes, bounds, and whether it fits; no weights and no devices needed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, get_args

from kimi_jax.config import KimiConfig, load_config
from kimi_jax.draft.config import DraftConfig
from kimi_jax.draft.published import named_draft
from kimi_jax.placement.device import Device, load_device
from kimi_jax.placement.layout import Layout, LayoutError, load_fitting, load_layout, validate
from kimi_jax.planning.ask import Ask, DraftPlace, VisionPlace, changed
from kimi_jax.planning.bounds import all_calls
from kimi_jax.planning.fit import fit
from kimi_jax.planning.record import Plan
from kimi_jax.planning.search import search
from kimi_jax.planning.sizes import count_parameters, sizes
from kimi_jax.planning.speculation import acceptance_problems, speculate
from kimi_jax.planning.trade import latent_trade
from kimi_jax.precision import ExpertForm, Precision, choose_precision
from kimi_jax.problems import ProblemsError
from kimi_jax.quant.fp8_policy import Fp8Policy, form_problems, fp8_policy

T = TypeVar("T")
MOST_SEQUENCES = 1 << 24
LONGEST_CHUNK = 1 << 20


class PlanError(ProblemsError):
    """Options that cannot be planned."""


def plan(
    config_or_name: KimiConfig | str | Path,
    layout: str | Path | Layout = "tp8",
    device: str | Path | Device = "mi355x",
    context: int | None = None,
    batch: int = 1,
    *,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    index_dtype: str | None = None,
    experts: ExpertForm | None = None,
    fp8: str | Fp8Policy = "none",
    vision: VisionPlace = "off",
    draft: str | Path | DraftConfig | None = None,
    draft_place: DraftPlace = "split",
    acceptance: Sequence[float] | None = None,
    prefill_chunk: int = 8192,
    memory_fraction: float = 0.93,
    goal: str | None = None,
) -> Plan:
    """Plans a model without weights and without devices.

    Args:
      config_or_name: ``k3``, ``k3.1-pro``, a config.json, a model folder, or a configuration.
      layout: shipped name, layout file or Layout.
      device: shipped name, device file or Device.
      context: tokens that each sequence can hold; the model's limit where omitted.
      batch: sequences held at once, over the whole mesh; rounded up to equal shares where the layout splits it.
      dtype: of activations and unquantised weights.
      kv_dtype: of latent-attention rows: ``fp8`` where omitted, the published one-byte form (``load`` defaults to
        ``dtype``).
      index_dtype: of the sparse indexer's keys (K3.1 Pro): ``fp8`` where omitted, or ``bfloat16``, ``mxfp4``.
      experts: how routed experts are kept (see ``Precision``); as ``load`` would on the device where omitted.
      fp8: projections held in FP8: ``none``, ``ptpc``, or groups such as ``ptpc+latent+router+head``
        (quant/fp8_policy.py).
      vision: ``off`` for text alone (``load(vision=False)``), ``replicated`` as ``load`` has it, or ``split`` over the devices that
        share the heads.
      draft: a published draft to count (``k3-mla``, ``k3.1-gqa``, ``k3.1-mla``), a draft's folder or config.json, or its sizes.
      draft_place: ``split`` cuts the draft's heads and MLPs, ``replicated`` keeps them whole.
      acceptance: chance of each drafted place to be kept once those before it are, or one for all: also find the best length.
      prefill_chunk: most prompt tokens of one call; decides the scratch of Attention Residuals.
      memory_fraction: share of a device's memory that weights and state may take.
      goal: also rank the shipped layouts for ``latency``, ``throughput`` or ``longest-context``.

    Raises:
      ConfigError, DeviceError: a configuration or a device that cannot be read.
      PlanError: options that are not known or contradict one another, all of them.
      LayoutError: everything that is wrong with the layout and everything that it cannot place, and what would work.
    """
    config = config_or_name if isinstance(config_or_name, KimiConfig) else load_config(config_or_name)
    chosen = load_device(device)
    context = config.max_positions if context is None else context
    problems = _number_problems(config, context, batch, prefill_chunk, memory_fraction)
    narrow = "fp8" if dtype == "bfloat16" else None
    precision = _try(
        problems,
        lambda: choose_precision(dtype, kv_dtype or narrow, chosen.platform, experts, index_dtype or narrow),
        Precision(),
    )
    policy = _try(problems, lambda: fp8_policy(fp8), Fp8Policy())
    problems += form_problems(policy, chosen.target, chosen.name)
    drafted = _try(problems, lambda: named_draft(draft).sizes if isinstance(draft, str | Path) else draft, None)
    problems += _part_problems(config, vision, drafted, draft_place)
    if acceptance is not None:
        alone = ["acceptance without a draft: name one whose acceptance it is"] if draft is None else []
        problems += alone if drafted is None else acceptance_problems(acceptance, drafted.block)
    if problems:
        raise PlanError(f"{config.name} cannot be planned as asked", problems)
    single = Layout("single", mesh={"device": 1})
    ask = Ask(
        config,
        single,
        chosen,
        context,
        batch,
        precision,
        policy,
        vision,
        drafted,
        draft_place,
        prefill_chunk,
        memory_fraction,
    )
    ask = _placed(ask, layout)
    found = sizes(ask)
    ranking = None if goal is None else search(ask, goal)
    answer = fit(ask, found)
    lengths = None if acceptance is None else speculate(ask, acceptance)
    return Plan(ask, found, count_parameters(ask), answer, all_calls(ask), latent_trade(ask), ranking, lengths)


def _placed(ask: Ask, layout: str | Path | Layout) -> Ask:
    """The ask on a layout that fits every array of it."""
    try:
        found = load_layout(layout)
    except LayoutError:
        load_fitting(layout, ask.weights, ask.config.name)  # raises with what the arrays have to say beside it
        raise
    placed = changed(ask, layout=found)
    validate(placed.placed, placed.arrays, ask.config.name)
    return placed


def _number_problems(config: KimiConfig, context: int, batch: int, chunk: int, fraction: float) -> list[str]:
    problems = []
    if not 1 <= context <= config.max_positions:
        problems.append(f"context = {context:,}; this model holds 1 to {config.max_positions:,} tokens")
    if not 1 <= batch <= MOST_SEQUENCES:
        problems.append(f"batch = {batch:,}; it must lie in 1 .. {MOST_SEQUENCES:,}")
    if not 1 <= chunk <= LONGEST_CHUNK:
        problems.append(f"prefill_chunk = {chunk:,}; it must lie in 1 .. {LONGEST_CHUNK:,}")
    if not 0 < fraction <= 1:
        problems.append(f"memory_fraction = {fraction}; it must lie above 0 and at most at 1")
    return problems


def _part_problems(config: KimiConfig, vision: str, draft: DraftConfig | None, place: str) -> list[str]:
    problems = []
    if vision not in get_args(VisionPlace):
        problems.append(f"vision {vision!r} is not known; choose {', '.join(get_args(VisionPlace))}")
    elif vision != "off" and config.vision is None:
        problems.append(f"vision {vision!r}, but {config.name} has no vision_config")
    if place not in get_args(DraftPlace):
        problems.append(f"draft_place {place!r} is not known; choose {', '.join(get_args(DraftPlace))}")
    if draft is not None and (draft.hidden, draft.vocab) != (config.hidden, config.vocab):
        problems.append(
            f"the draft reads hidden vectors of {draft.hidden} and {draft.vocab:,} ids; "
            f"{config.name} has {config.hidden} and {config.vocab:,}"
        )
    return problems


def _try(problems: list[str], make: Callable[[], T], otherwise: T) -> T:
    """What ``make`` gives; its problems join the list."""
    try:
        return make()
    except ProblemsError as error:
        problems += error.problems
        return otherwise
