"""The fixed sizes of an engine."""

from dataclasses import dataclass, fields

from kimi_jax.problems import ProblemsError


class LimitsError(ProblemsError):
    """Sizes that an engine cannot be built with."""


@dataclass(frozen=True)
class EngineLimits:
    """Sizes fixed when an engine is built; nothing grows afterwards. The first four are over all groups of devices.

    Attributes:
      slots: sequences decoded together.
      pages: pages of latent rows.
      checkpoints: recurrent states kept for prefix hits; 0 turns hits off.
      queue: requests that may wait for a slot.
      page: tokens of one page.
      chunk: most prompt tokens of one prefill call in one group.
      spacing: tokens from one checkpoint of a long prompt to the next; a multiple of ``page``.
    """

    slots: int = 8
    pages: int = 1024
    checkpoints: int = 16
    queue: int = 256
    page: int = 64
    chunk: int = 512
    spacing: int = 4096


def check_limits(limits: EngineLimits, capacity: int, groups: int) -> None:
    """Refuses sizes that could not serve one full sequence in every group.

    Args:
      capacity: tokens of a full sequence.
      groups: groups of devices that hold different sequences.

    Raises:
      LimitsError: lists every problem with what would work.
    """
    given = {field.name: getattr(limits, field.name) for field in fields(limits)}
    problems = [
        f"{name} = {value!r}; it must be an integer of at least {int(name != 'checkpoints')}"
        for name, value in given.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < int(name != "checkpoints")
    ]
    if problems:
        raise LimitsError("This engine cannot be built", problems)
    problems = [
        f"{name} = {given[name]:,} over {groups} groups of devices; take {-(-given[name] // groups) * groups:,}"
        for name in ("slots", "pages", "checkpoints")
        if given[name] % groups
    ]
    if capacity % limits.page:
        fitting = capacity // limits.page * limits.page
        problems.append(
            f"a sequence holds {capacity:,} tokens, which pages of {limits.page} do not divide; "
            f"load with max_seq_len={fitting or limits.page}"
        )
    if limits.spacing % limits.page:
        problems.append(
            f"spacing = {limits.spacing}; it must be a multiple of page = {limits.page}, "
            f"such as {-(-limits.spacing // limits.page) * limits.page}"
        )
    held = limits.pages // groups * limits.page
    if held < capacity:
        problems.append(
            f"{limits.pages // groups:,} pages of {limits.page} hold {held:,} tokens and one sequence may have {capacity:,}; "
            f"give pages={-(-capacity // limits.page) * groups:,} or load with max_seq_len={max(held, limits.page):,}"
        )
    if problems:
        raise LimitsError("This engine cannot be built", problems)
