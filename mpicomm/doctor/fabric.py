"""The network devices of this host in the files of the kernel, and the ones that NCCL and RCCL select among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpicomm import host_info

SLINGSHOT, INFINIBAND, ETHERNET = "Slingshot", "InfiniBand", "Ethernet"
ACTIVE = "ACTIVE"
GLOO_SOCKETS, NCCL_SOCKETS, NCCL_HCAS = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"
_DEFAULT_PLUGINS = ("libnccl-net.so", "librccl-net.so")
_NCCL_DEFAULTS = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")  # tried in this order: NCCL's src/misc/socket.cc


@dataclasses.dataclass(frozen=True)
class Interface:
    """A network interface that is up."""

    name: str
    gigabits: float | None = None
    """The speed in Gbit/s; None if the driver does not report it, and for virtual interfaces."""

    has_address: bool = True


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A device by which programs use the network without the kernel."""

    name: str
    network: str
    """`SLINGSHOT`, or the link layer of an RDMA device: InfiniBand, Ethernet for RoCE, or Unknown for AWS EFA."""

    state: str = ACTIVE
    """The state of its port, such as ACTIVE or DOWN."""

    rate: str = ""
    """The rate of its port, such as `200 Gb/sec`; empty if it is not known."""


@dataclasses.dataclass(frozen=True)
class FabricFacts:
    """The network devices of this host, and the settings of the libraries that use them."""

    interfaces: tuple[Interface, ...]
    adapters: tuple[Adapter, ...]
    environ: Mapping[str, str]
    vendor: str | None = None
    """The vendor of the GPUs; None without GPUs."""

    plugins: tuple[str, ...] = ()
    """The files of network plugins of NCCL or RCCL that the loader of libraries finds."""

    offered: tuple[str, ...] = ()
    """The interfaces at which rank 0 of a job on several hosts would listen, in the order in which they are tried."""

    offer_error: str = ""
    """Why it could not listen."""

    named: str | None = None
    """The interface with the address to which the host's name resolves; None without one."""

    @property
    def active_adapters(self) -> list[Adapter]:
        """The adapters whose port is active."""
        return [adapter for adapter in self.adapters if adapter.state == ACTIVE]

    @property
    def infiniband(self) -> list[Adapter]:
        """The adapters of InfiniBand, active or not."""
        return [adapter for adapter in self.adapters if adapter.network == INFINIBAND]

    @property
    def without_plugin(self) -> list[Adapter]:
        """The active adapters that NCCL can use without a plugin: src/transport/net_ib skips other link layers."""
        return [adapter for adapter in self.active_adapters if adapter.network in (INFINIBAND, ETHERNET)]

    @property
    def plugin(self) -> str:
        """The network plugin that NCCL or RCCL loads; empty without one.

        NCCL_NET_PLUGIN is a list of files or of parts of their names, or `none`: see src/plugin/net.cc of NCCL.
        """
        value = self.environ.get("NCCL_NET_PLUGIN", "")
        names = [] if value.lower() == "none" else value.split(",")
        files = [file for name in names for file in (name, f"libnccl-net-{name}.so", f"librccl-net-{name}.so")]
        loaded = files if value else _DEFAULT_PLUGINS
        return next((path for path in self.plugins if path in loaded or Path(path).name in loaded), "")

    @property
    def rdma(self) -> list[Adapter]:
        """The active adapters that NCCL uses without a plugin: those that NCCL_IB_HCA does not exclude."""
        adapters = self.without_plugin
        selected = select(self.environ.get(NCCL_HCAS, ""), [adapter.name for adapter in adapters])
        return [adapter for adapter in adapters if adapter.name in selected]

    @property
    def has_slingshot(self) -> bool:
        """Whether this host is in a Slingshot network."""
        return any(adapter.network == SLINGSHOT for adapter in self.adapters)

    @property
    def sockets(self) -> list[str]:
        """The interfaces by which NCCL connects its ranks."""
        value = self.environ.get(NCCL_SOCKETS, "")
        return nccl_interfaces(value, [interface.name for interface in self.interfaces if interface.has_address])

    @property
    def fastest(self) -> Interface | None:
        """The interface with the highest speed among those with an address; None if no speed is known."""
        known = [interface for interface in self.interfaces if interface.has_address and interface.gigabits]
        return max(known, key=lambda interface: interface.gigabits or 0, default=None)

    def is_slow(self, names: Sequence[str]) -> bool:
        """Return whether the first of these interfaces has at most half the speed of the fastest one.

        It is False if one of the two speeds is not known.
        """
        speeds = {interface.name: interface.gigabits for interface in self.interfaces}
        own, fastest = speeds.get("".join(names[:1])), self.fastest
        return own is not None and fastest is not None and own <= (fastest.gigabits or 0) / 2


def read(root: Path, listed: Sequence[tuple[str, str]]) -> tuple[tuple[Interface, ...], tuple[Adapter, ...]]:
    """Return the interfaces that are up, except loopback, and the adapters.

    Args:
        root: The root of the file tree.
        listed: The name and the address of every interface that is up.
    """
    with_address = [name for name, _ in listed]
    directory = root / "sys/class/net"
    names = dict.fromkeys([*with_address, *_children(directory)])
    interfaces = (
        Interface(name, host_info.megabits_of_interface(name, root) / 1000 or None, name in with_address)
        for name in names
        if name != "lo" and (name in with_address or host_info.read(directory / name / "operstate") == "up")
    )
    cxi = root / "sys/class/cxi"
    slingshot = (Adapter(name, SLINGSHOT, _state_of_link(cxi / name)) for name in _children(cxi))
    rdma = root / "sys/class/infiniband"
    return tuple(interfaces), (*slingshot, *(_read_rdma(rdma / name) for name in _children(rdma)))


def select(value: str, names: Sequence[str]) -> list[str]:
    """Return the names that a value of NCCL_SOCKET_IFNAME or NCCL_IB_HCA selects; all if it is empty.

    It is a list of prefixes; `^` before the list excludes them, and `=` makes them whole names. A device of NCCL_IB_HCA
    may have a port, `mlx5_0:1`.
    """
    rest = value.removeprefix("^")
    prefixes = [part.partition(":")[0] for part in rest.removeprefix("=").split(",") if part]
    is_exact, is_excluded = rest.startswith("="), value.startswith("^")
    matching = [name for name in names if any(name == part if is_exact else name.startswith(part) for part in prefixes)]
    return [name for name in names if (name in matching) != is_excluded] if prefixes else list(names)


def nccl_interfaces(value: str, names: Sequence[str]) -> list[str]:
    """Return the interfaces by which NCCL connects its ranks, in the order in which it takes them.

    Args:
        value: That of NCCL_SOCKET_IFNAME; empty if it is not set.
        names: The interfaces with an address.
    """
    choices = (select(pattern, names) for pattern in ((value,) if value else _NCCL_DEFAULTS))
    return next((choice for choice in choices if choice), [])


def _state_of_link(directory: Path) -> str:
    """Return the state of a device of Slingshot; ACTIVE if the driver does not show it, as for virtual functions."""
    # Words of the driver for Cassini 1 and 2: get_port_status() in utils/cxi_stat.c of HPE's shs-libcxi.
    words = [host_info.read(directory / "device/port" / name) for name in ("link", "0/link/state")]
    word = next(filter(str.isalpha, words), "up")
    return ACTIVE if word == "up" else word.upper()


def _read_rdma(directory: Path) -> Adapter:
    """Read the first active port of an RDMA device, or else its first one."""
    ports = [directory / "ports" / port for port in _children(directory / "ports")]
    # `4: ACTIVE`: Documentation/ABI/stable/sysfs-class-infiniband of the kernel
    states = [host_info.read(port / "state").rpartition(" ")[2] for port in ports]
    if not ports:
        return Adapter(directory.name, "unknown", "unknown")
    index = states.index(ACTIVE) if ACTIVE in states else 0
    port = ports[index]
    rate = host_info.read(port / "rate").partition(" (")[0]  # `200 Gb/sec (4X HDR)`
    return Adapter(directory.name, host_info.read(port / "link_layer"), states[index], rate)


def _children(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
