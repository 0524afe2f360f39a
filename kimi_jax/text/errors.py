"""What a client can get wrong in a chat request."""

from typing import Any

from kimi_jax.problems import ProblemsError


class ChatError(ProblemsError):
    """A chat request that cannot be rendered; names every message that is in the way. A client error, HTTP 400."""

    def __init__(self, *problems: str) -> None:
        super().__init__("This chat request cannot be rendered", problems)


def shown(value: Any) -> str:
    """A client's value as an error names it: short, whatever it is."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:60]!r}..."
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value)
    return f"of type {type(value).__name__}"
