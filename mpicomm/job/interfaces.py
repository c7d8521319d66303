"""The network interfaces of this host and their addresses."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
_IFF_UP = 0x1  # linux/if.h


def listed() -> list[tuple[str, str]]:
    """Return name and address of every interface that is up; IPv4 first, then IPv6."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                flags = struct.unpack_from("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)[0]
                address = socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
            except OSError:  # an interface without an IPv4 address
                continue
            if flags & _IFF_UP:
                addresses.append((name, address))
    return addresses + _ipv6()


def own_addresses() -> list[str]:
    """Return the addresses of this host except loopback; those to which its name resolves come first."""
    addresses = [address for _, address in listed() if not ipaddress.ip_address(address).is_loopback]
    try:
        named = addresses_of(socket.gethostname())
    except (OSError, UnicodeError):
        named = []
    return sorted(addresses, key=lambda address: address not in named)


def addresses_of(name: str) -> list[str]:
    """Return the addresses to which the name of a host resolves.

    Raises:
        OSError: If it does not resolve.
        UnicodeError: If it is no valid name; Python's codec for host names raises it.
    """
    infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


def towards(address: str) -> str | None:
    """Return the name of the interface on the route to an address; None if it cannot be determined."""
    own_address = address_towards(address)
    return next((name for name, interface_address in listed() if interface_address == own_address), None)


def address_towards(address: str) -> str | None:
    """Return this host's address on the route to another address; None if it cannot be determined."""
    try:
        family, _, _, _, endpoint = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(endpoint)  # on a datagram socket: looks up the route, sends no packet
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _ipv6() -> list[tuple[str, str]]:
    table = Path("/proc/net/if_inet6")
    if not table.exists():
        return []
    rows = [line.split() for line in table.read_text().splitlines()]
    return [(row[5], str(ipaddress.IPv6Address(int(row[0], 16)))) for row in rows if row[3] in ("00", "10")]
