"""A file from another machine, for a server that was told to fetch: what a client names must not reach inner networks.

Every address of the host must be public. The connection goes to those that were checked, not to the name again, so a
name that resolves differently the second time gains nothing. Redirects are not followed, proxies of the environment not used.
"""

import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from kimi_jax.media.addresses import Address, is_public, parse_address
from kimi_jax.media.errors import MediaError
from kimi_jax.media.limits import Deadline

PORTS = {"http": 80, "https": 443}
MOST_URL = 4096
_PIECE = 1 << 16

Resolve = Callable[[str, int], list[str]]


@dataclass(frozen=True)
class FetchRules:
    """What may be fetched.

    Attributes:
      ports: of the other machine.
      public: whether an address may be talked to.
      resolve: host and port to addresses.
    """

    ports: frozenset[int] = frozenset(PORTS.values())
    public: Callable[[Address], bool] = is_public
    resolve: Resolve = lambda host, port: _resolve(host, port)


class Answer(NamedTuple):
    """What a server sent, and what it calls it."""

    data: bytes
    content_type: str | None


class _Target(NamedTuple):
    scheme: str
    host: str
    port: int
    path: str


def fetch(url: str, rules: FetchRules, limit: int, deadline: Deadline) -> Answer:
    """The body of a plain 200 answer.

    Args:
      url: http or https.
      rules: which machines may be asked.
      limit: bytes of the body.
      deadline: for name, connection, headers and body together.

    Raises:
      MediaError: the URL, its machine, its answer or the limits are in the way. Says nothing of what inner machines answer:
        they are never asked.
    """
    target = _target(url, rules)
    try:
        addresses = _addresses(target, rules, deadline)
        with _connected(target, addresses, deadline) as connection:
            connection.request("GET", target.path, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
            with connection.getresponse() as response:
                return _body(response, limit, deadline)
    except MediaError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        deadline.check("while fetching it")
        raise MediaError(f"{target.host} cannot be read from: {type(error).__name__}: {str(error)[:200]}") from None


def _target(url: str, rules: FetchRules) -> _Target:
    """The parts of a URL that is written without tricks."""
    if len(url) > MOST_URL:
        raise MediaError(f"its URL has {len(url):,} characters, the limit is {MOST_URL:,}")
    if any(not "!" <= letter <= "~" or letter == "\\" for letter in url):
        raise MediaError(
            "its URL has spaces, control characters, backslashes or letters outside ASCII; escape them as %.."
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise MediaError(f"its URL cannot be read: {error}") from None
    return _checked(parts, port, rules)


def _checked(parts: SplitResult, port: int | None, rules: FetchRules) -> _Target:
    host = parts.hostname or ""
    problems = []
    if parts.scheme not in PORTS:
        problems.append(f"its URL has the scheme {parts.scheme!r}; http and https work")
    if "@" in parts.netloc:
        problems.append("its URL has a user name or password, which are not sent")
    port = PORTS.get(parts.scheme, 0) if port is None else port
    if parts.scheme in PORTS and port not in rules.ports:
        problems.append(f"its URL names port {port}; ports that work: {', '.join(map(str, sorted(rules.ports)))}")
    try:
        parse_address(host)
    except ValueError as error:
        problems.append(f"its URL names the host {host[:80]!r}: {error}")
    if problems:
        raise MediaError(*problems)
    path = parts.path or "/"
    return _Target(parts.scheme, host, port, f"{path}?{parts.query}" if parts.query else path)


def _addresses(target: _Target, rules: FetchRules, deadline: Deadline) -> list[Address]:
    """The addresses of the host, once all of them are known to be public."""
    literal = parse_address(target.host)
    found = [literal] if literal is not None else _looked_up(target, rules, deadline)
    if not found or not all(map(rules.public, found)):
        raise MediaError(f"{target.host} is not a machine of the public Internet")
    return found


def _looked_up(target: _Target, rules: FetchRules, deadline: Deadline) -> list[Address]:
    """Asks a resolver, which knows no time limit, from a thread that is left behind when the time is up."""
    found: list[Address] = []

    def look_up() -> None:
        try:
            found.extend(map(ip_address, rules.resolve(target.host, target.port)))
        except (OSError, ValueError):
            found.clear()

    thread = threading.Thread(target=look_up, name="kimi-jax-resolve", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline.left))
    deadline.check(f"while looking up {target.host}")
    if not found:
        raise MediaError(f"{target.host} has no address")
    return found


def _resolve(host: str, port: int) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


@contextmanager
def _connected(target: _Target, addresses: list[Address], deadline: Deadline) -> Iterator[http.client.HTTPConnection]:
    """A connection to one of the addresses, that is cut when the time is up, whatever it waits for."""
    connection: Any = http.client.HTTPConnection(target.host, target.port)
    connection.default_port = PORTS[target.scheme]  # which the Host header leaves out
    raw: Any = _first_open(addresses, target.port, deadline)
    timer = None
    try:
        if target.scheme == "https":
            raw = ssl.create_default_context().wrap_socket(
                raw, server_hostname=target.host, do_handshake_on_connect=False
            )
        # the socket's own time limit starts anew with every byte
        timer = threading.Timer(max(0.0, deadline.left), partial(_cut, raw))
        timer.daemon = True
        timer.start()
        if target.scheme == "https":
            raw.do_handshake()
        connection.sock = raw
        yield connection
    finally:
        if timer is not None:
            timer.cancel()
        connection.close()
        raw.close()


def _first_open(addresses: list[Address], port: int, deadline: Deadline) -> socket.socket:
    """A socket to the first address that answers; where none does, OSError of the last."""
    for address in addresses[:-1]:
        with suppress(OSError):
            return socket.create_connection((str(address), port), timeout=max(0.001, deadline.left))
    return socket.create_connection((str(addresses[-1]), port), timeout=max(0.001, deadline.left))


def _cut(raw: socket.socket) -> None:
    with suppress(OSError):  # it may be closed already
        socket.socket.shutdown(raw, socket.SHUT_RDWR)  # not an SSLSocket's own, which a reading thread would trip over


def _body(response: http.client.HTTPResponse, limit: int, deadline: Deadline) -> Answer:
    if 300 <= response.status < 400:
        raise MediaError(f"its URL redirects (status {response.status}), which is not followed; send the final URL")
    if response.status != 200:
        raise MediaError(f"its URL answers with status {response.status}")
    encoding = response.getheader("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise MediaError(f"its URL answers in {encoding[:40]!r}, though only identity was accepted")
    announced = response.length
    if announced is not None and announced > limit:
        raise MediaError(f"the file has {announced:,} bytes, the limit is {limit:,}")
    pieces, total = [], 0
    while piece := response.read1(_PIECE):
        deadline.check("while fetching it")
        total += len(piece)
        if total > limit:
            raise MediaError(f"the file has more than {limit:,} bytes, which is the limit")
        pieces.append(piece)
    deadline.check("while fetching it")
    if announced is not None and total != announced:
        raise MediaError(f"the file breaks off after {total:,} of {announced:,} bytes")
    return Answer(b"".join(pieces), response.getheader("Content-Type"))
