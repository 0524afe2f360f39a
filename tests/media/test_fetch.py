"""What a client may make the server fetch: nothing inside, nothing endless, nothing twice resolved."""

import ipaddress
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kimi_jax.media import fetch as fetch_module
from kimi_jax.media.addresses import is_public, parse_address
from kimi_jax.media.errors import MediaError
from kimi_jax.media.fetch import FetchRules, fetch
from kimi_jax.media.limits import Deadline, Limits
from kimi_jax.media.source import from_url

LIMIT = 1000


def deadline(seconds: float = 5.0) -> Deadline:
    return Limits(seconds=seconds).deadline()


@pytest.fixture(autouse=True)
def no_way_out(monkeypatch) -> list:
    """Connections that are made; all but those of a test's own server fail the test."""
    made = []
    real = socket.create_connection

    def connect(address, **options):
        made.append(address)
        if address[0] == "8.8.4.4":
            raise ConnectionRefusedError("nobody is there")
        assert address[0] == "127.0.0.1", f"connects to {address}"
        return real(address, **options)

    monkeypatch.setattr(fetch_module.socket, "create_connection", connect)
    return made


def refused(url: str, rules: FetchRules | None = None) -> str:
    with pytest.raises(MediaError) as raised:
        fetch(url, rules or FetchRules(resolve=lambda host, port: ["127.0.0.1"]), LIMIT, deadline())
    return str(raised.value)


INNER = [
    "127.0.0.1",
    "127.8.9.1",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",
    "169.254.170.2",
    "100.64.0.1",
    "100.100.100.200",
    "192.0.0.192",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.7",
    "203.0.113.9",
    "224.0.0.1",
    "239.1.1.1",
    "240.0.0.1",
    "255.255.255.255",
    "168.63.129.16",
    "::",
    "::1",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:8.8.8.8",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::",
    "2002:808:808::",
    "2001:0:7f00:1::1",
    "2001:db8::1",
    "100::1",
    "::ffff:0:127.0.0.1",
]


@pytest.mark.parametrize("address", INNER)
def test_inner_addresses(address, no_way_out):
    # red when a kind of address is left out, as a literal or behind a name
    assert not is_public(ipaddress.ip_address(address))
    host = f"[{address}]" if ":" in address else address
    refused(f"http://{host}/a.png")
    rules = FetchRules(resolve=lambda host, port: [address])
    assert "not a machine of the public Internet" in refused("http://pictures.example/a.png", rules)
    assert not no_way_out


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "2a00:1450:4001::1"]
)
def test_public_addresses(address):
    # red when everything is refused
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "host",
    ["2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1", "127.0.1", "0", "017700000001", "127.0.0.1.", "1.2.3",
     "127.0.0.01", "0x7f.0.0.0x1", "1.2.3.4.5", "256.1.1.1", "0X7F000001", "localhost.127", "[::1", "", "a..b", "-a.org",
     "a_b-.org", "a" * 64 + ".org", "%31%32%37.0.0.1", "①②⑦.0.0.1", "exämple.org", "a b.org", "a;b.org"],
)  # fmt: skip
def test_numbers_and_tricks_for_hosts(host, no_way_out):
    # red when a resolver gets to see what it reads as an address: decimal, octal, hexadecimal, shortened, full-width
    asked = []
    refused(f"http://{host}/", FetchRules(resolve=lambda host, port: asked.append(host) or ["8.8.8.8"]))
    assert not asked and not no_way_out


def test_hosts_that_are_names():
    # red when ordinary names are refused
    for name in ("example.org", "a-b.example.co.uk", "xn--bcher-kva.example", "img_1.example.org", "example.org."):
        assert parse_address(name) is None


@pytest.mark.parametrize(
    "url, message",
    [
        ("http://user:pass@8.8.8.8/", "user name"),
        ("http://8.8.8.8@127.0.0.1/", "user name"),
        ("http://8.8.8.8\\@127.0.0.1/", "backslashes"),
        ("http://8.8.8.8:22/", "port 22; ports that work: 80, 443"),
        ("http://8.8.8.8:0/", "port 0"),
        ("http://8.8.8.8:99999/", "cannot be read"),
        ("http://8.8.8.8/a b", "spaces"),
        ("http://8.8.8.8/\r\nHost: x", "control"),
        ("gopher://8.8.8.8/", "scheme 'gopher'"),
        ("http:///a", "host ''"),
        ("http://8.8.8.8/" + "a" * 5000, "5,015 characters, the limit is 4,096"),
    ],
)
def test_urls_with_tricks(url, message, no_way_out):
    # red when a part of the URL is passed on unread
    assert message in refused(url)
    assert not no_way_out


def test_every_address_of_a_name_counts(no_way_out):
    # red when only the first of several addresses is looked at
    rules = FetchRules(resolve=lambda host, port: ["8.8.8.8", "10.0.0.1"])
    assert "public Internet" in refused("http://both.example/", rules)
    assert "has no address" in refused("http://none.example/", FetchRules(resolve=lambda host, port: []))
    assert not no_way_out


@contextmanager
def server(*answers: bytes, delay: float = 0.0) -> Iterator[tuple[FetchRules, list[bytes], int]]:
    """Answers connections of this machine one after the other; rules that allow it, what was asked, its port."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def serve() -> None:
            for answer in answers:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    asked.append(connection.recv(4096))
                    try:
                        step = 1 if delay else max(1, len(answer))
                        for at in range(0, len(answer), step):
                            connection.sendall(answer[at : at + step])
                            if stopped.wait(delay):
                                return
                    except OSError:
                        pass

        stopped = threading.Event()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        rules = FetchRules(frozenset([port]), lambda address: True, lambda host, port: ["127.0.0.1"])
        yield rules, asked, port
        stopped.set()
    thread.join(5)


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def test_a_plain_answer():
    # red when the name, the query or the type is lost on the way
    with server(answer(b"abc", "Content-Type: image/png; x=y")) as (rules, asked, port):
        found = fetch(f"http://pictures.example:{port}/a%20b?c=d", rules, LIMIT, deadline())
    assert found == (b"abc", "image/png; x=y")
    head = asked[0].decode().splitlines()
    assert head[0] == "GET /a%20b?c=d HTTP/1.1"
    assert f"Host: pictures.example:{port}" in head
    assert "Accept-Encoding: identity" in head


def test_the_checked_address_is_the_one_asked(no_way_out):
    # red when the name is resolved again for the connection: the second answer would be another machine
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])
    with server(answer(b"abc")) as (rules, _, port):
        once = FetchRules(rules.ports, rules.public, lambda host, port: next(answers))
        assert fetch(f"http://turning.example:{port}/", once, LIMIT, deadline()).data == b"abc"
    assert [host for host, _ in no_way_out] == ["127.0.0.1"]
    assert next(answers) == ["10.0.0.1"]


def test_the_next_address_is_tried(no_way_out):
    # red when a name with one address that does not answer cannot be read
    with server(answer(b"abc")) as (rules, _, port):
        two = FetchRules(rules.ports, rules.public, lambda host, port: ["8.8.4.4", "127.0.0.1"])
        assert fetch(f"http://two.example:{port}/", two, LIMIT, deadline()).data == b"abc"
        gone = FetchRules(rules.ports, rules.public, lambda host, port: ["8.8.4.4"])
        assert "nobody is there" in refused(f"http://gone.example:{port}/", gone)
    assert [host for host, _ in no_way_out] == ["8.8.4.4", "127.0.0.1", "8.8.4.4"]


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_redirects_are_not_followed(status, no_way_out):
    # red when the new place is asked, which may be an inner one
    with server(answer(b"", "Location: http://169.254.169.254/latest", status=status)) as (rules, _, port):
        assert "redirects" in refused(f"http://pictures.example:{port}/", rules)
    assert len(no_way_out) == 1


@pytest.mark.parametrize(
    "sent, message",
    [
        (answer(bytes(1001)), "1,001 bytes, the limit is 1,000"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(5000), "more than 1,000 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + bytes(1001) + b"\r\n0\r\n\r\n", "more than 1,000"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3e8\r\n" + bytes(10), "cannot be read from"),
        (answer(b"abc", length=10), "breaks off after 3 of 10"),
        (answer(b"abc", "Content-Encoding: gzip"), "'gzip'"),
        (answer(b"no", status="404 Not Found"), "status 404"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 500 + b"\r\n", "cannot be read from"),
        (b"not http at all\r\n\r\n", "cannot be read from"),
        (b"", "cannot be read from"),
    ],
)  # fmt: skip
def test_answers_that_are_refused(sent, message):
    # red when a limit is missing, or half a file counts as a whole one
    with server(sent) as (rules, _, port):
        assert message in refused(f"http://pictures.example:{port}/", rules)


@pytest.mark.parametrize(
    "sent", [answer(bytes(500)), b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 90], ids=["body", "headers"]
)
def test_an_answer_that_drips(sent):
    # red when the time limit starts anew with every byte
    began = time.monotonic()
    with server(sent, delay=0.01) as (rules, _, port), pytest.raises(MediaError, match=r"after 0.3 seconds"):
        fetch(f"http://pictures.example:{port}/", rules, LIMIT, deadline(0.3))
    assert time.monotonic() - began < 3


def test_a_resolver_that_never_answers():
    # red when the look-up is outside the time limit
    hanging = threading.Event()
    rules = FetchRules(resolve=lambda host, port: ["8.8.8.8"] * hanging.wait(30))
    with pytest.raises(MediaError, match=r"after 0.2 seconds.*looking up slow.example"):
        fetch("http://slow.example/", rules, LIMIT, deadline(0.2))
    hanging.set()


def test_a_certificate_is_asked_for():
    # red when https goes on without one
    with server(answer(b"abc")) as (rules, _, port):
        assert "cannot be read from" in refused(f"https://pictures.example:{port}/", rules)


def test_the_environment_names_no_proxy(monkeypatch, no_way_out):
    # red when a proxy is asked in the place of the checked address
    monkeypatch.setenv("http_proxy", "http://10.1.2.3:3128")
    with server(answer(b"abc")) as (rules, _, port):
        assert fetch(f"http://pictures.example:{port}/", rules, LIMIT, deadline()).data == b"abc"
    assert [host for host, _ in no_way_out] == ["127.0.0.1"]


@pytest.mark.parametrize(
    "header, claimed",
    [("Content-Type: image/png", "image/png"), ("Content-Type: binary/octet-stream", None), ("X: y", None)],
)
def test_a_url_of_an_image_part(header, claimed):
    # red when what a server calls its answer is lost, or no answer is trusted that has no name
    with server(answer(b"abc", header)) as (rules, _, port):
        assert from_url(f"HTTP://pictures.example:{port}/", Limits(), deadline(), rules) == (b"abc", claimed)


def test_a_page_in_the_place_of_an_image():
    # red when a page that says "not found" with status 200 goes to the decoder
    page = answer(b"<html>", "Content-Type: text/html")
    with server(page) as (rules, _, port), pytest.raises(MediaError, match=r"declared as 'text/html'"):
        from_url(f"http://pictures.example:{port}/", Limits(), deadline(), rules)
