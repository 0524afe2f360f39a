"""Which machines of the network a client may make this one talk to: public ones only."""

import ipaddress
import re

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_REFUSED = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",  # public by number, but the metadata service of its cloud (Azure)
            "192.0.0.0/24",  # protocol assignments; 192.0.0.192 is a metadata service (Oracle)
            "192.88.99.0/24",  # relays of 6to4
            "2001::/23",  # protocol assignments, Teredo among them
            "2002::/16",  # 6to4: an IPv4 address of any kind inside
            "3fff::/20",  # documentation
        ),
    )
)
"""Beside what Python's own table calls not global, which differs between its versions."""

_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public Internet; forms that carry another address inside do not count as public."""
    if not address.is_global or address.is_multicast or any(address in network for network in _REFUSED):
        return False
    # outside lie ::ffff:a.b.c.d, ::a.b.c.d and 64:ff9b::a.b.c.d
    return isinstance(address, ipaddress.IPv4Address) or address in _GLOBAL_UNICAST


def parse_address(host: str) -> Address | None:
    """The address that a host is, None for a name.

    Raises:
      ValueError: neither a usual address nor a name: decimal, octal, hexadecimal or shortened numbers, which resolvers read as
        addresses, or other characters than those of names.
    """
    if ":" in host:
        return ipaddress.IPv6Address(host)
    labels = host.removesuffix(".").split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return ipaddress.IPv4Address(host)  # refuses leading zeros, which some read as octal
    if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError("not a host name (names in other letters go as xn--...)")
    return None
