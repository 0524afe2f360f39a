"""Arithmetic written out digit by digit, as on paper: each step is small enough to be known by heart.

An equation has no spaces: a number then costs one token a digit, and a step about seven.
"""

import re
from collections.abc import Iterator

SIGNS = ("+", "-", "*", "/")

_WORKED = re.compile(r"(\d+)([-+*/])(\d+): ([^:\n]*), so (\d+)")
_EQUATION = re.compile(r"(?<![\d*/+-])(\d+(?:[-+*/]\d+)+)=(\d+)(?: rest (\d+))?")


def result(left: int, sign: str, right: int) -> int:
    """What a step gives.

    Raises:
      ValueError: it gives no whole number of at least 0.
    """
    if sign == "/" and right and left % right == 0:
        return left // right
    values = {"+": left + right, "-": left - right, "*": left * right}
    if values.get(sign, -1) < 0:
        raise ValueError(f"{left}{sign}{right} gives no whole number of at least 0")
    return values[sign]


def worked(left: int, sign: str, right: int) -> str:
    """A step with its working: ``47+38: 7+8=15, 4+3+1=8, so 85``."""
    answer = result(left, sign, right)
    steps = list({"+": _sum, "-": _difference, "*": _product, "/": _quotient}[sign](left, right))
    if len(steps) == 1 and steps[0] == f"{left}{sign}{right}={answer}":
        return steps[0]
    return f"{left}{sign}{right}: {', '.join(steps)}, so {answer}"


def short(left: int, sign: str, right: int) -> str:
    """A step without its working: ``47+38=85``."""
    return f"{left}{sign}{right}={result(left, sign, right)}"


def wrong_equations(text: str) -> list[str]:
    """Every equation of a text that does not hold."""
    return [found[0] for found in _EQUATION.finditer(text) if not _holds(found[1], int(found[2]), int(found[3] or 0))]


def wrong_working(text: str) -> list[str]:
    """Every worked step of a text whose parts do not add up to what it says: a lost carry leaves each equation true."""
    return [found[0] for found in _WORKED.finditer(text) if not _adds_up(found)]


def _adds_up(found: re.Match[str]) -> bool:
    left, sign, right, steps, claimed = found.groups()
    parts: list[int] = []
    for step in steps.split(", "):
        expression, _, value = step.partition("=")
        if sign == "*" and "*" not in expression:
            parts.pop()  # a carry is added to the product before
        parts.append(int(value.split(" rest ")[0]))
    if sign == "/":  # from the left, one digit of the quotient a step
        written = int("".join(map(str, parts)))
    else:  # from the right, the last with all its digits
        written = sum(part % 10 * 10**place for place, part in enumerate(parts[:-1])) + parts[-1] * 10 ** (
            len(parts) - 1
        )
    return written == int(claimed) == result(int(left), sign, int(right))


def _holds(expression: str, claimed: int, rest: int) -> bool:
    if "/" in expression:
        over, under = map(int, expression.split("/"))
        return under > 0 and divmod(over, under) == (claimed, rest)
    total = sum(
        (-1 if sign == "-" else 1) * _multiplied(term) for sign, term in re.findall(r"([-+]?)([\d*]+)", expression)
    )
    return total == claimed and rest == 0


def _multiplied(term: str) -> int:
    product = 1
    for factor in term.split("*"):
        product *= int(factor)
    return product


def _digits(value: int, places: int) -> list[int]:
    """From the ones up."""
    return [value // 10**place % 10 for place in range(places)]


def _places(*values: int) -> int:
    return max(len(str(value)) for value in values)


def _sum(left: int, right: int) -> Iterator[str]:
    carry, places = 0, _places(left, right)
    for above, below in zip(_digits(left, places), _digits(right, places), strict=True):
        total = above + below + carry
        yield f"{above}+{below}{'+1' if carry else ''}={total}"
        carry = total // 10


def _difference(left: int, right: int) -> Iterator[str]:
    borrowed, places = 0, _places(left, right)
    for above, below in zip(_digits(left, places), _digits(right, places), strict=True):
        short_of = above - below - borrowed < 0
        above += 10 * short_of
        yield f"{above}-{below}{'-1' if borrowed else ''}={above - below - borrowed}"
        borrowed = int(short_of)


def _product(left: int, right: int) -> Iterator[str]:
    if right > 9:
        left, right = right, left
    if right > 9:
        raise ValueError(f"{left}*{right} has no factor of one digit")
    carry = 0
    for digit in _digits(left, _places(left)):
        product = digit * right
        yield f"{digit}*{right}={product}"
        if carry:
            yield f"{product}+{carry}={product + carry}"
        carry = (product + carry) // 10


def _quotient(left: int, right: int) -> Iterator[str]:
    if left < 10 * right:
        yield f"{left}/{right}={left // right}"
        return
    rest = 0
    for digit in reversed(_digits(left, _places(left))):
        part = rest * 10 + digit
        yield f"{part}/{right}={part // right}" + (f" rest {part % right}" if part % right else "")
        rest = part % right
