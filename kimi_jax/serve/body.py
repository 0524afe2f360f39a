"""The bytes of a request to a JSON object, within limits."""

import asyncio
import json
from typing import Any

from starlette.requests import Request

from kimi_jax.placement.bytes import amount
from kimi_jax.serve import limits
from kimi_jax.serve.errors import ApiError
from kimi_jax.serve.limits import Limits
from kimi_jax.text import jsontext


async def read_body(request: Request, bounds: Limits) -> bytes:
    """The whole body of a request.

    Raises:
      ApiError: 415, 413 or 408.
      ClientDisconnect: nobody is there any more.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        # a page in a browser may send forms and plain text anywhere without being asked; JSON it may not
        raise ApiError(415, "The body must be JSON", hint="Send Content-Type: application/json.", code="content_type")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and len(declared) < 20 and int(declared) > bounds.body_bytes:
        raise _too_large(bounds)
    read = bytearray()
    try:
        async with asyncio.timeout(bounds.body_seconds):
            async for part in request.stream():
                read += part
                if len(read) > bounds.body_bytes:
                    raise _too_large(bounds)
    except TimeoutError:
        raise ApiError(
            408,
            f"The body did not come within {bounds.body_seconds:g} s",
            hint="Send it at once.",
            code="timeout",
            headers={"Connection": "close"},
        ) from None
    return bytes(read)


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a body, without members that are null: clients send null for what they leave out.

    Raises:
      ApiError: 400.
    """
    marks = sum(body.count(mark) for mark in (b",", b"[", b"{"))
    if marks > limits.JSON_MARKS:
        raise _unreadable(f"it has {marks:,} commas and brackets; at most {limits.JSON_MARKS:,} are read")
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _unreadable(f"it is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise _unreadable(f"it is nested deeper than {jsontext.MAX_DEPTH} levels") from None
    except ValueError as error:
        raise _unreadable(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _unreadable(f"it is {_kind(value)}; an object works")
    if reason := jsontext.refusal(value):
        raise _unreadable(reason)
    return {name: member for name, member in value.items() if member is not None}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def _unreadable(problem: str) -> ApiError:
    return ApiError(400, "The body of this request cannot be read", [problem], code="invalid_json")


def _too_large(bounds: Limits) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {amount(bounds.body_bytes)}",
        hint="Shorten the prompt, or start the server with a larger --max-body-bytes.",
        code="body_too_large",
        headers={"Connection": "close"},
    )
