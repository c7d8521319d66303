"""Checks of the fabric: the network devices of this host, the ones that libraries select, and their settings."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpicomm.devices import counting
from mpicomm.doctor import fabric, fabric_rules
from mpicomm.doctor.fabric import FabricFacts
from mpicomm.doctor.findings import Finding, from_error, ok
from mpicomm.errors import LaunchError
from mpicomm.job import interfaces
from mpicomm.launch import queries
from mpicomm.launch.visible_devices import AMD, INTEL, NVIDIA

_PLUGIN = re.compile(r"lib[nr]ccl-net\S*\.so")  # https://docs.nvidia.com, "NCCL Net Plugin"; librccl-net.so of AMD
_HOSTS = 2  # of the job for which the rendezvous is predicted: on one host it is loopback


def collect(environ: Mapping[str, str], root: Path = Path("/")) -> FabricFacts:
    """Return the facts about this host; resolves its name.

    Args:
        root: The root of the file tree with the devices.
    """
    listed = interfaces.listed()
    names = {address: name for name, address in listed}
    offered, error = _offered(environ)
    vendor = counting.count({}, root).vendor
    return FabricFacts(
        *fabric.read(root, listed),
        environ,
        vendor,
        _plugins(environ) if vendor in (NVIDIA, AMD) else (),
        tuple(dict.fromkeys(names[address] for address in offered if address in names)),
        error,
        next((names[address] for address in _addresses_of_host() if address in names), None),
    )


def check(facts: FabricFacts) -> list[Finding]:
    """Return the findings about the fabric."""
    broken = [rule.finding(facts) for rule in fabric_rules.RULES if rule.condition(facts)]
    return [
        _describe_devices(facts),
        from_error("rendezvous", facts.offer_error) if facts.offer_error else _describe_rendezvous(facts),
        _describe_gloo(facts),
        *_describe_library(facts),
        *(broken or [ok("fabric settings", f"as {len(fabric_rules.RULES)} rules of centres and vendors demand")]),
    ]


def _offered(environ: Mapping[str, str]) -> tuple[Sequence[str], str]:
    """Return the addresses at which rank 0 of a job on several hosts would listen, or the error."""
    try:
        from mpicomm.job import rendezvous  # imports torch

        return rendezvous.offered_addresses(
            rendezvous.environ_of_user(environ), environ.get("MPICOMM_INTERFACE"), _HOSTS
        ), ""
    except LaunchError as error:
        return [], str(error)
    except (ImportError, OSError, RuntimeError):  # without torch, which software_check reports
        return interfaces.own_addresses(), ""


def _addresses_of_host() -> list[str]:
    with contextlib.suppress(OSError, UnicodeError):  # network_check reports it
        return interfaces.addresses_of(socket.gethostname())
    return []


def _plugins(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the network plugins of NCCL in NCCL_NET_PLUGIN, in LD_LIBRARY_PATH and in the cache of the loader."""
    directories = [Path(text) for text in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if text]
    paths = []
    for directory in directories:
        with contextlib.suppress(OSError):  # missing, or not readable for this user
            paths += sorted(str(path) for path in directory.iterdir())
    paths += [line.rpartition("=> ")[2] for line in queries.output_of(["/sbin/ldconfig", "-p"]).splitlines()]
    named = [name for name in environ.get("NCCL_NET_PLUGIN", "").split(",") if name]
    plugins = [path for path in paths if _PLUGIN.fullmatch(Path(path).name) or Path(path).name in named]
    return tuple(dict.fromkeys([*(name for name in named if "/" in name and Path(name).is_file()), *plugins]))


# -- the devices and their users ---------------------------------------------------------------------------------------


def _describe_devices(facts: FabricFacts) -> Finding:
    shown = [
        interface.name
        + (f" {interface.gigabits:g} Gbit/s" if interface.gigabits else "")
        + ("" if interface.has_address else " without an address")
        for interface in facts.interfaces
    ]
    shown += [
        f"{adapter.name} ({', '.join(filter(None, [adapter.network, adapter.rate]))})"
        + ("" if adapter.state == fabric.ACTIVE else f" {adapter.state}")
        for adapter in facts.adapters
    ]
    return ok("network devices", ", ".join(shown) or "none except loopback")


def _describe_rendezvous(facts: FabricFacts) -> Finding:
    address = facts.environ.get("MASTER_ADDR")
    if address and not facts.offered:
        return ok("rendezvous", f"at {address} (MASTER_ADDR), which is not an address of this host")
    if not facts.offered:
        return ok("rendezvous", "on this host only: no interface except loopback has an address")
    names = ", then ".join(facts.offered)
    return ok("rendezvous", f"bootstrap() takes the first that every host reaches: {names}")


def _describe_gloo(facts: FabricFacts) -> Finding:
    if value := facts.environ.get(fabric.GLOO_SOCKETS):
        return ok("Gloo", f"{value} ({fabric.GLOO_SOCKETS})")
    alone = facts.named or "loopback, to which the name of this host leads"
    return ok("Gloo", f"the interface towards rank 0, which bootstrap() selects; without bootstrap(): {alone}")


def _describe_library(facts: FabricFacts) -> list[Finding]:
    """Return the finding about the library of the GPUs' vendor."""
    if facts.vendor == INTEL:
        transport = facts.environ.get("CCL_ATL_TRANSPORT")
        return [ok("oneCCL", f"CCL_ATL_TRANSPORT={transport}" if transport else "it selects the transport itself")]
    library = fabric_rules.LIBRARIES.get(facts.vendor or "")
    if library is None or not facts.sockets:  # network_check reports a missing interface
        return []
    sockets = ", ".join(facts.sockets)
    return [
        ok(library, f"connects its ranks by {sockets}; transfers by {_data_path(facts)} (NCCL_DEBUG=INFO shows it)")
    ]


def _data_path(facts: FabricFacts) -> str:
    network = facts.environ.get("NCCL_NET", "").lower()
    if facts.plugin and network not in ("ib", "socket"):
        return f"the plugin {facts.plugin}"
    if facts.rdma and network != "socket" and facts.environ.get("NCCL_IB_DISABLE", "0") == "0":
        return ", ".join(adapter.name for adapter in facts.rdma)
    return "TCP"
