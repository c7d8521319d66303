"""The network interfaces of this host and their addresses."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Collection, Mapping, Sequence

from mpicomm import host_info

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
_IFF_UP = 0x1  # linux/if.h
# Slingshot's interfaces (hsn0 to hsn3, in the pages of ALCF, OLCF, NERSC and LUMI), and those of InfiniBand (ib0).
# The names decide before the speeds, since drivers of InfiniBand's interfaces may report none.
_FAST_NAMES = ("hsn", "ib")


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
    """Return the addresses of this host except loopback, in the order of `by_speed`."""
    try:
        named = addresses_of(socket.gethostname())
    except (OSError, UnicodeError):
        named = []
    interfaces = listed()
    return by_speed(interfaces, {name: host_info.megabits_of_interface(name) for name, _ in interfaces}, named)


def by_speed(interfaces: Sequence[tuple[str, str]], speeds: Mapping[str, int], named: Collection[str]) -> list[str]:
    """Return the addresses of interfaces except loopback, those of the fastest network first.

    Interfaces of Slingshot (hsn*) come before those of InfiniBand (ib*), then the others by speed.

    Args:
        interfaces: Name and address of every interface.
        speeds: The speed of every interface in Mbit/s; 0 if unknown.
        named: The addresses to which the name of the host resolves; of equal interfaces, theirs come first.
    """

    def rank(interface: tuple[str, str]) -> tuple[int, int, bool]:
        name, address = interface
        network = next((index for index, start in enumerate(_FAST_NAMES) if name.startswith(start)), len(_FAST_NAMES))
        return network, -speeds[name], address not in named

    usable = [interface for interface in interfaces if not ipaddress.ip_address(interface[1]).is_loopback]
    return [address for _, address in sorted(usable, key=rank)]


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
    rows = [line.split() for line in host_info.read("/proc/net/if_inet6").splitlines()]
    return [(row[5], str(ipaddress.IPv6Address(int(row[0], 16)))) for row in rows if row[3] in ("00", "10")]
