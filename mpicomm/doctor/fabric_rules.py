"""The settings that computing centres and vendors demand for a network, as data: `RULES`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from mpicomm.doctor.fabric import ACTIVE, GLOO_SOCKETS, NCCL_HCAS, NCCL_SOCKETS, SLINGSHOT, Adapter, FabricFacts
from mpicomm.doctor.findings import Finding, Status
from mpicomm.launch.visible_devices import AMD, INTEL, NVIDIA

LIBRARIES = {NVIDIA: "NCCL", AMD: "RCCL", INTEL: "oneCCL"}
"""The vendor's library of collective operations."""

_MONITORS = ("userfaultfd", "uffd", "kdreg2", "memhooks", "disabled")  # of libfabric
_OTHER_MONITOR = "export FI_MR_CACHE_MONITOR=userfaultfd\nWhere the system has it: export FI_MR_CACHE_MONITOR=kdreg2"


@dataclasses.dataclass(frozen=True)
class Source:
    """A page that demands a setting."""

    title: str
    url: str
    date: str
    """Of the page; of the reading if it has none."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A setting, and the finding if it is not as a page demands."""

    setting: str
    """The variable or the part of the network, which is the name of the check."""

    network: str
    """The network on which it matters, for documents."""

    condition: Callable[[FabricFacts], bool]
    """Whether the setting is wrong."""

    message: str
    """`{value}` stands for the value of the variable, `{library}` for the vendor's library, `{first}` for the interface
    at which rank 0 listens first, `{fastest}` for the fastest one, `{ports}` for the worse ports of InfiniBand, and
    `{unlinked}` for the devices of Slingshot that are not active."""

    remedy: str
    source: Source
    status: Status = "warning"

    def finding(self, facts: FabricFacts) -> Finding:
        """Return the finding about a host on which the condition holds."""
        names = {
            "value": facts.environ.get(self.setting, ""),
            "library": LIBRARIES.get(facts.vendor or "", "NCCL"),
            "first": "".join(facts.offered[:1]),
            "fastest": _fastest(facts),
            "unlinked": ", ".join(f"{device.name} {device.state}" for device in _devices_without_link(facts)),
            "ports": ", ".join(f"{port.name} {port.state} {port.rate}".strip() for port in _worse_ports(facts)),
        }
        message = f"{self.message.format(**names)} ({self.source.title}, {self.source.date})"
        return Finding(self.setting, self.status, message, self.remedy.format(**names))


ALCF_CCL = Source("ALCF, oneCCL", "https://docs.alcf.anl.gov/aurora/data-science/frameworks/oneCCL/", "2026-03-17")
ALCF_ISSUES = Source("ALCF, known issues", "https://docs.alcf.anl.gov/aurora/known-issues/", "2025-12-16")
CSCS_MPI = Source("CSCS, Open MPI", "https://docs.cscs.ch/software/communication/openmpi/", "2026-01-08")
CSCS_NCCL = Source("CSCS, NCCL", "https://docs.cscs.ch/software/communication/nccl/", "2026-06-16")
HPE_CXI = Source("HPE, source of the CXI driver", "https://github.com/HewlettPackard/shs-cxi-driver", "2026-11-27")
ISAMBARD = Source("Isambard, NCCL", "https://docs.isambard.ac.uk/user-documentation/guides/nccl/", "2026-11-26")
KERNEL_IB = Source(
    "Linux, sysfs-class-infiniband",
    "https://www.kernel.org/doc/Documentation/ABI/stable/sysfs-class-infiniband",
    "2026-11-26",
)
KERNEL_NET = Source(
    "Linux, sysfs-class-net", "https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-class-net", "2026-11-26"
)
LIBFABRIC = Source("libfabric, fi_mr", "https://ofiwg.github.io/libfabric/main/man/fi_mr.3.html", "2026-11-26")
NCCL_SOURCE = Source("NVIDIA, source of NCCL", "https://github.com/NVIDIA/nccl/tree/master/src", "2026-11-26")
NVIDIA_NCCL = Source(
    "NVIDIA, NCCL variables", "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html", "2026-11-26"
)
OLCF = Source(
    "OLCF, PyTorch on Frontier", "https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html", "2026-07-07"
)


def _fastest(facts: FabricFacts) -> str:
    return facts.fastest.name if facts.fastest else ""


def _has_nccl(facts: FabricFacts) -> bool:
    return facts.vendor in (NVIDIA, AMD)


def _has_nccl_on_slingshot(facts: FabricFacts) -> bool:
    return _has_nccl(facts) and facts.has_slingshot


def _lacks_plugin(facts: FabricFacts) -> bool:
    return _has_nccl_on_slingshot(facts) and not facts.plugin


def _lacks_plugin_on_efa(facts: FabricFacts) -> bool:
    has_others = facts.active_adapters != facts.without_plugin and not facts.has_slingshot
    return _has_nccl(facts) and has_others and not facts.rdma and not facts.plugin


def _uses_tcp(facts: FabricFacts) -> bool:
    is_fast = facts.has_slingshot or bool(facts.rdma)
    return _has_nccl(facts) and is_fast and facts.environ.get("NCCL_NET", "").lower() == "socket"


def _worse_ports(facts: FabricFacts) -> list[Adapter]:
    """Return the ports of InfiniBand that are not active, or slower than another one."""
    rates = {adapter.name: float(adapter.rate.partition(" ")[0] or 0) for adapter in facts.infiniband}
    fastest = max((rates[adapter.name] for adapter in facts.infiniband if adapter.state == ACTIVE), default=0)
    return [adapter for adapter in facts.infiniband if adapter.state != ACTIVE or rates[adapter.name] < fastest]


def _devices_without_link(facts: FabricFacts) -> list[Adapter]:
    return [adapter for adapter in facts.adapters if adapter.network == SLINGSHOT and adapter.state != ACTIVE]


def _has_no_link(facts: FabricFacts) -> bool:
    return bool(facts.infiniband) and all(adapter.state == "DOWN" for adapter in facts.infiniband)


def _needs_plugin(facts: FabricFacts) -> bool:
    return facts.environ.get("NCCL_NET", "").lower() not in ("", "ib", "socket")  # the networks in NCCL itself


def _selects_other_provider(facts: FabricFacts) -> bool:
    """Return whether FI_PROVIDER, a list of providers or `^` and those to exclude, leaves none for Slingshot."""
    value = facts.environ.get("FI_PROVIDER", "")
    names = re.split("[,;]", value.removeprefix("^").lower())  # libfabric ignores the case
    # lnx can contain cxi
    is_wrong = "cxi" in names if value.startswith("^") else {"cxi", "lnx"}.isdisjoint(names)
    return facts.has_slingshot and value != "" and is_wrong


def _has_slower_sockets(facts: FabricFacts) -> bool:
    uses_sockets = _has_nccl(facts) and not facts.has_slingshot and not facts.rdma
    # NCCL transfers over all that it selects.
    return uses_sockets and facts.is_slow(facts.sockets) and _fastest(facts) not in facts.sockets


def _is_unset(name: str, condition: Callable[[FabricFacts], bool]) -> Callable[[FabricFacts], bool]:
    return lambda facts: condition(facts) and not facts.environ.get(name)


def _demanded(name: str, value: str, reason: str, source: Source) -> Rule:
    """Return the rule about a variable that pages set for NCCL or RCCL on Slingshot."""
    message = f"{name} is not set: {reason}"
    remedy = f"export {name}={value}"
    return Rule(name, SLINGSHOT, _is_unset(name, _has_nccl_on_slingshot), message, remedy, source)


def _demanded_on_aurora(name: str, value: str) -> Rule:
    return Rule(
        name,
        f"{SLINGSHOT}, oneCCL",
        _is_unset(name, lambda facts: facts.vendor == INTEL and facts.has_slingshot),
        f"{name} is not set: the page lists it among the settings without which training does not work on Aurora",
        f"export {name}={value}",
        ALCF_CCL,
    )


RULES = (
    # 1. Slingshot
    Rule(
        "FI_PROVIDER",
        SLINGSHOT,
        _selects_other_provider,
        "FI_PROVIDER={value} excludes cxi, libfabric's provider for Slingshot: MPI and the plugins of NCCL and RCCL "
        "use a slower network, or fail",
        "Unset it, or: export FI_PROVIDER=cxi",
        CSCS_MPI,
    ),
    Rule(
        "Slingshot links",
        SLINGSHOT,
        lambda facts: bool(_devices_without_link(facts)),
        "devices of Slingshot without a link: {unlinked}. Ranks that use them fail",
        "Leave out this host, and report it to the site: `cxi_stat` shows the links.",
        HPE_CXI,
        "problem",
    ),
    Rule(
        "OFI plugin",
        SLINGSHOT,
        lambda facts: _lacks_plugin(facts) and not _needs_plugin(facts) and not facts.environ.get("NCCL_NET_PLUGIN"),
        "{library} has no network plugin in LD_LIBRARY_PATH and the cache of the loader: it uses TCP on Slingshot, "
        "which does not scale",
        "Load the module of the site with aws-ofi-nccl, or add its directory to LD_LIBRARY_PATH; NCCL_DEBUG=INFO shows "
        "the network that {library} uses.",
        OLCF,
    ),
    Rule(
        "NCCL_NET_PLUGIN",
        SLINGSHOT,
        lambda facts: _lacks_plugin(facts) and not _needs_plugin(facts) and bool(facts.environ.get("NCCL_NET_PLUGIN")),
        "NCCL_NET_PLUGIN={value} is no network plugin in LD_LIBRARY_PATH and the cache of the loader: {library} uses "
        "TCP on Slingshot, which does not scale",
        "Unset it, or name the file of the plugin.",
        CSCS_NCCL,
    ),
    Rule(
        "NCCL_NET",
        SLINGSHOT,
        lambda facts: _lacks_plugin(facts) and _needs_plugin(facts),
        "NCCL_NET={value} demands a network plugin, and NCCL_NET_PLUGIN, LD_LIBRARY_PATH and the cache of the loader "
        "select none: {library} fails with `network {value} not found`",
        "Unset NCCL_NET_PLUGIN. Load the module of the site with aws-ofi-nccl, or add its directory to "
        "LD_LIBRARY_PATH.",
        CSCS_NCCL,
        "problem",
    ),
    Rule(
        "FI_MR_CACHE_MONITOR",
        SLINGSHOT,
        lambda facts: _has_nccl_on_slingshot(facts) and facts.environ.get("FI_MR_CACHE_MONITOR") == "memhooks",
        "FI_MR_CACHE_MONITOR={value} can cause deadlocks with the network plugin of {library}",
        _OTHER_MONITOR,
        OLCF,
        "problem",
    ),
    Rule(
        "FI_MR_CACHE_MONITOR",
        SLINGSHOT,
        lambda facts: (
            facts.has_slingshot and facts.environ.get("FI_MR_CACHE_MONITOR", "disabled") not in ("", *_MONITORS)
        ),
        f"FI_MR_CACHE_MONITOR={{value}}: expected one of {', '.join(_MONITORS)}",
        _OTHER_MONITOR,
        LIBFABRIC,
    ),
    Rule(
        "FI_MR_CACHE_MONITOR",
        SLINGSHOT,
        # not with AMD: OLCF's page calls the default of Frontier, kdreg2, safe
        _is_unset("FI_MR_CACHE_MONITOR", lambda facts: facts.vendor == NVIDIA and facts.has_slingshot),
        "FI_MR_CACHE_MONITOR is not set: the default of some versions, memhooks, can deadlock with the plugin of NCCL",
        _OTHER_MONITOR,
        CSCS_NCCL,
    ),
    _demanded(
        "FI_CXI_DISABLE_HOST_REGISTER", "1", "{library} can hang if libfabric registers host memory with it", ISAMBARD
    ),
    _demanded(
        "FI_CXI_DEFAULT_CQ_SIZE", "131072", "in large jobs the default completion queue can overflow", ALCF_ISSUES
    ),
    _demanded("NCCL_NET_GDR_LEVEL", "PHB", "{library} may copy through host memory instead of GPU Direct", CSCS_NCCL),
    Rule(
        "NCCL_PROTO",
        SLINGSHOT,
        _is_unset("NCCL_PROTO", lambda facts: facts.vendor == NVIDIA and facts.has_slingshot),
        "NCCL_PROTO is not set: NCCL 2.27 and newer select LL128, which is slower on Slingshot",
        "export NCCL_PROTO=^LL128",
        CSCS_NCCL,
    ),
    Rule(
        NCCL_SOCKETS,
        SLINGSHOT,
        lambda facts: (
            _has_nccl_on_slingshot(facts)
            and any(interface.name.startswith("hsn") for interface in facts.interfaces if interface.has_address)
            and bool(facts.sockets)
            and not facts.sockets[0].startswith("hsn")
        ),
        "{library} connects its ranks by another interface than those of Slingshot, hsn*",
        f"export {NCCL_SOCKETS}=hsn\nIf {{library}} then hangs: export {NCCL_SOCKETS}=hsn0",
        OLCF,
    ),
    *(
        _demanded_on_aurora(name, value)
        for name, value in {
            "CCL_PROCESS_LAUNCHER": "pmix",
            "CCL_ATL_TRANSPORT": "mpi",
            "CCL_KVS_MODE": "mpi",
            "FI_MR_CACHE_MONITOR": "userfaultfd",
        }.items()
    ),
    # 2. InfiniBand and RoCE
    Rule(
        "RDMA ports",
        "InfiniBand",
        _has_no_link,
        "no port of InfiniBand has a link: MPI fails, or uses TCP",
        "Examine the cable, the switch and the subnet manager: `ibstat` shows the state of the ports.",
        KERNEL_IB,
        "problem",
    ),
    Rule(
        "RDMA ports",
        "InfiniBand",
        lambda facts: bool(_worse_ports(facts)) and not _has_no_link(facts),
        "ports of InfiniBand that are not active, or slower than others of this host: {ports}",
        "If this host should use them: a port in state INIT waits for the subnet manager; for the state DOWN or a low "
        "rate, examine the cable and the switch. `ibstat` shows the state of the ports.",
        KERNEL_IB,
    ),
    Rule(
        "NCCL_NET",
        "Slingshot, InfiniBand",
        _uses_tcp,
        "NCCL_NET={value}: {library} uses TCP although the host has a faster network",
        "Unset it.",
        NVIDIA_NCCL,
    ),
    Rule(
        "OFI plugin",
        "AWS EFA",
        _lacks_plugin_on_efa,
        "{library} has no network plugin, and uses TCP: it skips RDMA devices that are neither InfiniBand nor Ethernet",
        "Install aws-ofi-nccl, or add its directory to LD_LIBRARY_PATH; NCCL_DEBUG=INFO shows the network that "
        "{library} uses.",
        NCCL_SOURCE,
    ),
    Rule(
        "NCCL_IB_DISABLE",
        "InfiniBand",
        lambda facts: _has_nccl(facts) and bool(facts.rdma) and facts.environ.get("NCCL_IB_DISABLE", "0") != "0",
        "NCCL_IB_DISABLE={value}: {library} uses TCP although the host has active RDMA devices",
        "Unset it.",
        NVIDIA_NCCL,
    ),
    Rule(
        NCCL_HCAS,
        "InfiniBand",
        lambda facts: _has_nccl(facts) and not facts.rdma and bool(facts.without_plugin),
        f"{NCCL_HCAS}={{value}} selects none of the active RDMA devices of this host: {{library}} uses TCP",
        "Unset it, or name devices of `ls /sys/class/infiniband`.",
        NVIDIA_NCCL,
    ),
    # 3. any network
    Rule(
        "MPICH_GPU_SUPPORT_ENABLED",
        "any, with Cray MPICH",
        lambda facts: facts.vendor == NVIDIA and facts.environ.get("MPICH_GPU_SUPPORT_ENABLED", "0") != "0",
        "MPICH_GPU_SUPPORT_ENABLED={value}: GPU-aware MPI and {library} in one program can deadlock if both transfer "
        "at the same time",
        "If MPI gets no GPU tensors: export MPICH_GPU_SUPPORT_ENABLED=0",
        CSCS_NCCL,
    ),
    Rule(
        "MPICOMM_INTERFACE",
        "any",
        lambda facts: (
            not facts.environ.get("MASTER_ADDR")
            and not facts.environ.get(GLOO_SOCKETS)
            and facts.is_slow(facts.offered)
        ),
        "bootstrap() tries {first} first, over which Gloo transfers CPU tensors in jobs of torchrun, and {fastest} is "
        "faster",
        "If all hosts reach each other by {fastest}: export MPICOMM_INTERFACE={fastest}",
        KERNEL_NET,
    ),
    Rule(
        GLOO_SOCKETS,
        "any",
        lambda facts: facts.is_slow(facts.environ.get(GLOO_SOCKETS, "").split(",")),
        f"{GLOO_SOCKETS}={{value}}, and {{fastest}} is faster",
        f"Unset it, since bootstrap() selects an interface, or: export {GLOO_SOCKETS}={{fastest}}",
        KERNEL_NET,
    ),
    Rule(
        NCCL_SOCKETS,
        "Ethernet",
        _has_slower_sockets,
        "{library} transfers by TCP, and not over {fastest}, which is faster",
        f"If all hosts reach each other by {{fastest}}: export {NCCL_SOCKETS}={{fastest}}",
        KERNEL_NET,
    ),
)
