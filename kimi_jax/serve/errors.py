"""What a client is told when something is wrong: OpenAI's error object, every problem in it."""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import Response

from kimi_jax.problems import ProblemsError
from kimi_jax.serve import limits
from kimi_jax.text.errors import shown


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
      status: of the HTTP response; 4xx where the client can do something about it.
      body: OpenAI's error object. ``message`` says everything, ``problems`` the same by line.
      headers: of the response.
    """

    def __init__(
        self,
        status: int,
        title: str,
        problems: Sequence[str] = (),
        hint: str = "",
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        more: int = 0,
    ) -> None:
        self.status = status
        self.headers = dict(headers or {})
        listed = list(problems[: limits.PROBLEMS])
        more += len(problems) - len(listed)
        if more:
            listed.append(f"and {more:,} more problems")
        message = str(ProblemsError(title, listed, hint)) if listed else " ".join(filter(None, (f"{title}.", hint)))
        self.body = {
            "message": message,
            "type": _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
            "param": param,
            "code": code,
            "problems": listed,
        }
        super().__init__(message)


_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def response(error: ApiError) -> Response:
    """The HTTP response that an error is."""
    return Response(encode({"error": error.body}), error.status, error.headers, "application/json")


def encode(value: Any) -> bytes:
    """A value as compact JSON. Half a surrogate pair is escaped; NaN and infinity raise ValueError: they are not JSON."""
    written = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return written.encode(errors="backslashreplace")  # a lone surrogate becomes \udXXX, which JSON reads back


def refused(error: ProblemsError) -> ApiError:
    """A request that the engine or the renderer refused."""
    return ApiError(400, error.title, error.problems, error.hint, code="invalid_value")


def invalid(error: ValidationError, accepted: Sequence[str], refusals: Mapping[str, str]) -> ApiError:
    """A body that does not fit its form.

    Args:
      error: what pydantic found.
      accepted: fields of the form.
      refusals: field that a client may know from elsewhere -> why it is not accepted and what works.
    """
    details = error.errors(include_url=False)
    told = details[: limits.PROBLEMS]  # there may be a million, and a near name of each takes time to find
    problems = [_problem(detail, accepted, refusals) for detail in told]
    first, more = _path(details[0]["loc"]), len(details) - len(told)
    return ApiError(
        400, "This request cannot be read", problems, code="invalid_request", param=first or None, more=more
    )


def _problem(detail: ErrorDetails, accepted: Sequence[str], refusals: Mapping[str, str]) -> str:
    where, kind = _path(detail["loc"]), detail["type"]
    if kind == "extra_forbidden":
        if where in refusals:
            return f"{where} is not accepted: {refusals[where]}"
        close = difflib.get_close_matches(where, accepted if len(detail["loc"]) == 1 else (), n=1)
        return f"{shown(where)} is no field here" + (f"; did you mean {close[0]}?" if close else "")
    if kind == "missing":
        return f"{where} is missing"
    if kind == "value_error":  # of our own validators: they say all themselves
        said = detail["msg"].removeprefix("Value error, ")
        return f"{where}: {said}" if where else said
    said = detail["msg"].replace("Input should be", "it must be", 1)
    return f"{where or 'the body'} is {_shown(detail['input'])}; {said[:1].lower()}{said[1:]}"


def _path(loc: Sequence[int | str]) -> str:
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in loc if key != "[key]")
    return path.removeprefix(".")[: limits.NAME]


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value):,}"
    return shown(value)
