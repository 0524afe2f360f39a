"""What can be wrong with a picture, or with the file that says how pictures are prepared."""

from collections.abc import Iterator
from contextlib import contextmanager

from kimi_jax.problems import ProblemsError


class MediaError(ProblemsError):
    """A picture that cannot be used: a client error, HTTP 400."""

    def __init__(self, *problems: str, hint: str = "") -> None:
        super().__init__("This image cannot be read", problems, hint)


class BusyError(RuntimeError):
    """As many pictures are under way as may be; try again later: HTTP 503."""


class SettingsError(ProblemsError):
    """A ``preprocessor_config.json`` that asks for something that is not built."""


@contextmanager
def foreign_errors() -> Iterator[None]:
    """Whatever a decoder of somebody else raises on a stranger's bytes, as MediaError: OSError, SyntaxError, struct.error ..."""
    try:
        yield
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"it is damaged: {type(error).__name__}: {str(error)[:200]}") from None
