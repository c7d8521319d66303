"""Checks of the network of this host: its name, and its interfaces."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import socket
import time
from collections.abc import Mapping, Sequence

from mpicomm.devices import counting
from mpicomm.doctor import fabric
from mpicomm.doctor.findings import Finding, ok, problem, warning
from mpicomm.job import interfaces
from mpicomm.launch.visible_devices import AMD, NVIDIA

_SLOW_SECONDS = 2.0
# Interfaces of containers and virtual machines, which other hosts cannot reach.
_VIRTUAL = re.compile(r"docker|br-|virbr|veth|cni|flannel|cali|vxlan|podman|lxc|lxdbr|vmnet|tailscale|wg\d|tun\d|tap\d")
_VARIABLES = ("MPICOMM_INTERFACE", fabric.GLOO_SOCKETS, fabric.NCCL_SOCKETS)
"""Variables that select an interface."""


@dataclasses.dataclass(frozen=True)
class NetworkFacts:
    """The network of this host."""

    hostname: str
    addresses: tuple[str, ...]
    """The addresses to which the name resolves."""

    resolve_error: str
    """Why it does not resolve; empty if it does."""

    resolve_seconds: float
    interfaces: tuple[tuple[str, str], ...]
    """The name and the address of every interface that is up."""

    chosen: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The set variables among `_VARIABLES`."""

    vendor: str | None = None
    """The vendor of the GPUs; None without GPUs."""


def collect(environ: Mapping[str, str]) -> NetworkFacts:
    """Return the facts about this host; resolves its name."""
    name, addresses, error = socket.gethostname(), [], ""
    start = time.monotonic()
    try:
        addresses = interfaces.addresses_of(name)
    except (OSError, UnicodeError) as failure:
        error = getattr(failure, "strerror", None) or str(failure)
    seconds = time.monotonic() - start
    chosen = {name: environ[name] for name in _VARIABLES if environ.get(name)}
    return NetworkFacts(
        name, tuple(addresses), error, seconds, tuple(interfaces.listed()), chosen, counting.count({}).vendor
    )


def check(facts: NetworkFacts) -> list[Finding]:
    """Return the findings about the network."""
    return [_check_name(facts), _check_interfaces(facts.interfaces), *_check_chosen(facts)]


def first_interface(listed: Sequence[tuple[str, str]]) -> str | None:
    """Return the first interface that is not loopback: programs that do not look further take it."""
    return next((name for name, address in listed if not is_local(address)), None)


def is_local(address: str) -> bool:
    """Return whether an address is valid on its own host or link only."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_loopback or (parsed.version == 6 and parsed.is_link_local)


def _check_name(facts: NetworkFacts) -> Finding:
    name, hosts = facts.hostname, "/etc/hosts of every host, or DNS"
    if facts.resolve_error:
        return problem(
            "host name",
            f"the name of this host, {name}, does not resolve ({facts.resolve_error}): Gloo, torchrun "
            f"and MPI launchers need it",
            f"Add the name and an address of this host to {hosts}. On a single host:\n"
            f"  echo '127.0.1.1 {name}' >> /etc/hosts",
        )
    if facts.resolve_seconds > _SLOW_SECONDS:
        return warning(
            "host name",
            f"resolving {name} took {facts.resolve_seconds:.0f} s: each start of a job waits as long",
            f"Add the name and an address of this host to {hosts}; correct the name servers in /etc/resolv.conf.",
        )
    if all(is_local(address) for address in facts.addresses):
        return warning(
            "host name",
            f"{name} resolves to {', '.join(facts.addresses)}: with several hosts, Gloo and torchrun pass this "
            f"address to other hosts, which cannot reach it; mpicomm passes another one",
            f"For jobs on one host, ignore this. Otherwise replace the address by one of the network in {hosts}.",
        )
    return ok("host name", f"{name} resolves to {', '.join(facts.addresses)}")


def _check_interfaces(listed: Sequence[tuple[str, str]]) -> Finding:
    first = first_interface(listed)
    others = list(dict.fromkeys(name for name, address in listed if not is_local(address) and name != first))
    if first is None:
        return warning(
            "interfaces",
            "no network interface except loopback is up: jobs can use this host only",
            "For jobs on several hosts, bring up the interface of their network (`ip link`).",
        )
    if _VIRTUAL.match(first):
        real = next((name for name in others if not _VIRTUAL.match(name)), "NAME")
        return warning(
            "interfaces",
            f"the first interface, {first}, is one of containers or virtual machines, which other hosts cannot reach: "
            f"programs that use the first interface hang",
            f"For jobs on several hosts, select the interface of their network (`ip address` lists all):\n"
            f"  export MPICOMM_INTERFACE={real} GLOO_SOCKET_IFNAME={real} NCCL_SOCKET_IFNAME={real}",
        )
    return ok("interfaces", ", ".join([first, *others]))


def _check_chosen(facts: NetworkFacts) -> list[Finding]:
    return [
        # without a GPU of NVIDIA or AMD nothing reads the variable of NCCL
        (warning if variable == fabric.NCCL_SOCKETS and facts.vendor not in (NVIDIA, AMD) else problem)(
            variable,
            f"{variable}={value} selects no interface of this host that is up",
            f"Unset it, or set it to one of {', '.join(dict.fromkeys(name for name, _ in facts.interfaces))}.",
        )
        for variable, value in facts.chosen.items()
        if not _selects(variable, value, facts.interfaces)
    ]


def _selects(variable: str, value: str, listed: Sequence[tuple[str, str]]) -> bool:
    if variable == fabric.NCCL_SOCKETS:
        return bool(fabric.nccl_interfaces(value, [name for name, _ in listed]))
    return not {text for interface in listed for text in interface}.isdisjoint(value.split(","))
