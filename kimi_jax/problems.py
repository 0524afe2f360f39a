"""The one shape of an error that can name several things at once, and what it says of a wrong name."""

import difflib
from collections.abc import Iterable, Sequence


class ProblemsError(ValueError):
    """A refusal that lists everything wrong at once, then the nearest thing that works.

    Attributes:
      title: what was asked.
      problems: one line per problem.
      hint: what would work; may be empty.
    """

    def __init__(self, title: str, problems: Sequence[str], hint: str = "") -> None:
        self.title = title
        self.problems = tuple(problems)
        self.hint = hint
        count = len(self.problems)
        lines = [
            f"{title} ({count} problem{'' if count == 1 else 's'}):",
            *(f"  {problem}" for problem in self.problems),
        ]
        super().__init__("\n".join([*lines, hint] if hint else lines))


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean "vocab"?`, or the known names when none is near."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f'; did you mean "{close[0]}"?' if close else f"; known: {', '.join(known)}"
