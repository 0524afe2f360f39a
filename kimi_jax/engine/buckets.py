"""A few fixed sizes for everything that varies, so that steady state compiles nothing."""


def bucket(size: int, largest: int, smallest: int = 16, factor: int = 4) -> int:
    """The smallest bucket that holds ``size``: ``smallest`` times powers of ``factor``, capped at ``largest``.

    Raises:
      ValueError: ``size`` is above ``largest``.
    """
    if size > largest:
        raise ValueError(f"{size} does not fit the largest bucket {largest}")
    found = smallest
    while found < size:
        found *= factor
    return min(found, largest)


def widths(largest: int, smallest: int = 16, factor: int = 4) -> list[int]:
    """Every bucket that :func:`bucket` may answer with, smallest first."""
    found = []
    while not found or found[-1] < largest:
        found.append(bucket(found[-1] + 1 if found else 1, largest, smallest, factor))
    return found


def prefill_calls(remaining: list[int], chunk: int) -> list[list[int]]:
    """How many tokens each row runs in each prefill call, such that all rows end their prompt in the last one.

    Args:
      remaining: prompt tokens of each row; 0 for an idle row.
      chunk: most tokens of one row in one call.
    """
    last = [min(tokens, chunk) for tokens in remaining]
    ahead = [tokens - final for tokens, final in zip(remaining, last, strict=True)]
    calls = []
    while any(ahead):
        now = [min(tokens, chunk) for tokens in ahead]
        calls.append(now)
        ahead = [tokens - done for tokens, done in zip(ahead, now, strict=True)]
    return [*calls, last]
