"""API keys: who may ask."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

from kimi_jax.serve.errors import ApiError


class Keys:
    """The keys that are accepted; without any, everybody is.

    A given key is compared with all of them, as digests of equal length: how long that takes says nothing about a key.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def check(self, headers: Headers) -> None:
        """Raises ApiError 401 unless the request carries ``Authorization: Bearer KEY`` with one of the keys."""
        if not self._digests:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip())
        known = [hmac.compare_digest(digest, key) for key in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiError(
                401,
                "This key is not accepted" if given else "This server asks for a key",
                hint="Send Authorization: Bearer KEY with a key that it was started with.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
