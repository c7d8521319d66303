"""`mpicomm doctor --fabric` on the files of four machines, and each of its rules in both directions.

The trees follow the kernel's documentation of /sys and the pages of centres; that of this machine is recorded.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpicomm.doctor import fabric, fabric_check, fabric_rules, network_check
from mpicomm.doctor.fabric import Adapter, FabricFacts, Interface
from mpicomm.doctor.fabric_rules import RULES
from mpicomm.doctor.findings import Finding
from mpicomm.job import interfaces
from mpicomm.launch.visible_devices import AMD, INTEL, NVIDIA
from tests.launching import run_command
from tests.machine_files import Files, write


def net(name: str, speed: int | None, state: str = "up") -> Files:
    """Return the files of a network interface; the kernel refuses to read the speed of some."""
    files = {f"sys/class/net/{name}/operstate": f"{state}\n", f"sys/class/net/{name}/device/": ""}
    return files if speed is None else files | {f"sys/class/net/{name}/speed": f"{speed}\n"}


def rdma(name: str, state: str, link_layer: str = "InfiniBand") -> Files:
    port = f"sys/class/infiniband/{name}/ports/1"
    rate = "200 Gb/sec (4X HDR)\n"  # the speed, the number of lanes and the generation
    return {f"{port}/state": f"{state}\n", f"{port}/link_layer": f"{link_layer}\n", f"{port}/rate": rate}


GPUS = {"dev/nvidiactl": "", "dev/nvidia0": ""}
LO = {**net("lo", None, "unknown")}
SLINGSHOT = {
    **LO, **net("nmn0", 1000), **net("hsn0", 200000), **net("hsn1", 200000), **GPUS,
    "sys/class/cxi/cxi0/device/port/link": "up\n", "sys/class/cxi/cxi1/device/port/0/link/state": "up\n",
}  # fmt: skip
INFINIBAND = {
    **LO, **net("eno1", 1000), **net("ib0", 200000), **net("ib1", None, "down"), **GPUS,
    **rdma("mlx5_0", "4: ACTIVE"), **rdma("mlx5_1", "1: DOWN", "Ethernet"),
}  # fmt: skip
ETHERNET = {
    **LO, **net("docker0", -1, "down"), **net("eno1", 10000), **net("ens1f0", 100000), **net("eno2", 1000), **GPUS,
    "sys/class/net/bonding_masters": "\n",
}  # fmt: skip
THIS = {**LO, **net("eth0", -1), **net("ifb0", None, "down"), **net("ifb1", None, "down")}

TREES = {
    # the files, the interfaces with an address, and the finding about the devices
    "Slingshot": (
        SLINGSHOT,
        ["lo", "nmn0", "hsn0", "hsn1"],
        "nmn0 1 Gbit/s, hsn0 200 Gbit/s, hsn1 200 Gbit/s, cxi0 (Slingshot), cxi1 (Slingshot)",
    ),
    "InfiniBand": (
        INFINIBAND,
        ["lo", "eno1", "ib0"],
        "eno1 1 Gbit/s, ib0 200 Gbit/s, mlx5_0 (InfiniBand, 200 Gb/sec), mlx5_1 (Ethernet, 200 Gb/sec) DOWN",
    ),
    "Ethernet": (
        ETHERNET,
        ["lo", "docker0", "eno1", "ens1f0"],
        "docker0, eno1 10 Gbit/s, ens1f0 100 Gbit/s, eno2 1 Gbit/s without an address",
    ),
    "this machine": (THIS, ["lo", "eth0"], "eth0"),
    "a container without a network": (LO, ["lo"], "none except loopback"),
}
SETTINGS = {
    "FI_MR_CACHE_MONITOR": "userfaultfd",
    "FI_CXI_DISABLE_HOST_REGISTER": "1",
    "FI_CXI_DEFAULT_CQ_SIZE": "131072",
    "NCCL_NET_GDR_LEVEL": "PHB",
    "NCCL_PROTO": "^LL128",
    "NCCL_SOCKET_IFNAME": "hsn",
}
AURORA = {
    "CCL_PROCESS_LAUNCHER": "pmix",
    "CCL_ATL_TRANSPORT": "mpi",
    "CCL_KVS_MODE": "mpi",
    "FI_MR_CACHE_MONITOR": "userfaultfd",
}


def facts_of(root: Path, name: str, **others: object) -> FabricFacts:
    """Return the facts about a machine whose settings are as the pages demand."""
    files, names, _ = TREES[name]
    devices = fabric.read(write(files, root), [(interface, f"10.0.0.{index}") for index, interface in enumerate(names)])
    environ, plugins = (SETTINGS, ("/opt/aws-ofi-nccl/lib/libnccl-net.so",)) if name == "Slingshot" else ({}, ())
    offered = ("hsn0", "hsn1", "nmn0") if name == "Slingshot" else tuple(reversed(names[1:]))
    vendor = NVIDIA if "dev/nvidia0" in files else None
    facts = FabricFacts(*devices, environ, vendor, plugins, offered, "", names[-1] if len(names) > 1 else None)
    return dataclasses.replace(facts, **others)  # type: ignore[arg-type]


def message_of(results: list[Finding], check: str) -> str:
    (finding,) = (finding for finding in results if finding.check == check)
    return finding.message


def faults(results: list[Finding]) -> list[tuple[str, str]]:
    assert [finding for finding in results if bool(finding.remedy) == (finding.status == "ok")] == []
    return [(finding.check, finding.status) for finding in results if finding.status != "ok"]


# -- the devices, and those that libraries use -------------------------------------------------------------------------


@pytest.mark.parametrize("name", TREES)
def test_the_devices_of_a_machine(tmp_path: Path, name: str) -> None:
    results = fabric_check.check(facts_of(tmp_path, name))
    assert message_of(results, "network devices") == TREES[name][2]
    assert faults(results) == []
    assert message_of(results, "fabric settings") == f"as {len(RULES)} rules of centres and vendors demand"


@pytest.mark.parametrize(
    ("name", "environ", "shown"),
    [
        (
            "Slingshot",
            {"NCCL_SOCKET_IFNAME": "hsn"},
            "hsn0, hsn1; transfers by the plugin /opt/aws-ofi-nccl/lib/libnccl",
        ),
        ("Slingshot", {"NCCL_NET_PLUGIN": "libnccl-net.so"}, "nmn0, hsn0, hsn1; transfers by the plugin /opt/aws-"),
        ("Slingshot", {"NCCL_NET_PLUGIN": "None"}, "nmn0, hsn0, hsn1; transfers by TCP"),
        ("Slingshot", {"NCCL_NET": "Socket"}, "nmn0, hsn0, hsn1; transfers by TCP"),
        ("InfiniBand", {}, "by ib0; transfers by mlx5_0 ("),
        ("InfiniBand", {"NCCL_SOCKET_IFNAME": "^ib,lo"}, "by eno1; transfers by mlx5_0"),
        ("InfiniBand", {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "=mlx5_0:1"}, "by ib0; transfers by mlx5_0"),
        ("InfiniBand", {"NCCL_IB_HCA": "^mlx5_0"}, "by ib0; transfers by TCP"),
        ("InfiniBand", {"NCCL_IB_DISABLE": "1"}, "by ib0; transfers by TCP"),
        ("InfiniBand", {"NCCL_NET": "socket"}, "by ib0; transfers by TCP"),
        ("Ethernet", {}, "by eno1, ens1f0; transfers by TCP"),
    ],
)
def test_the_devices_of_nccl(tmp_path: Path, name: str, environ: dict[str, str], shown: str) -> None:
    assert shown in message_of(fabric_check.check(facts_of(tmp_path, name, environ=environ)), "NCCL")


def test_the_interfaces_of_the_rendezvous_and_of_gloo(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "Ethernet")
    results = fabric_check.check(facts)
    assert message_of(results, "rendezvous").endswith("every host reaches: ens1f0, then eno1, then docker0")
    assert message_of(results, "Gloo").endswith("which bootstrap() selects; without bootstrap(): ens1f0")
    environ = {"GLOO_SOCKET_IFNAME": "eno1"}
    assert message_of(fabric_check.check(dataclasses.replace(facts, environ=environ)), "Gloo").startswith("eno1 (GLOO_")
    elsewhere = dataclasses.replace(facts, offered=(), environ={"MASTER_ADDR": "node7"})
    assert message_of(fabric_check.check(elsewhere), "rendezvous").startswith("at node7 (MASTER_ADDR), which is not an")
    alone = fabric_check.check(facts_of(tmp_path / "alone", "a container without a network"))
    assert message_of(alone, "rendezvous").startswith("on this host only")
    assert message_of(alone, "Gloo").endswith("loopback, to which the name of this host leads")
    error = "MPICOMM_INTERFACE=x is not an interface.\nUnset it."
    broken = fabric_check.check(dataclasses.replace(facts, offer_error=error))
    assert Finding("rendezvous", "problem", "MPICOMM_INTERFACE=x is not an interface.", "Unset it.") in broken


@pytest.mark.parametrize(("vendor", "library"), [(AMD, "RCCL"), (INTEL, "oneCCL"), (None, None)])
def test_the_library_is_that_of_the_vendor(tmp_path: Path, vendor: str | None, library: str | None) -> None:
    results = fabric_check.check(facts_of(tmp_path, "Slingshot", vendor=vendor, environ={**SETTINGS, **AURORA}))
    assert faults(results) == []
    assert [finding.check for finding in results][3:-1] == ([library] if library else [])


@pytest.mark.parametrize(
    ("value", "selected"),
    [
        ("", "ib0 ib1 eth0 eth10"),
        ("eth", "eth0 eth10"),
        ("eth1,ib0", "ib0 eth10"),
        ("=eth1,ib0", "ib0"),
        ("=eth0", "eth0"),
        ("^ib", "eth0 eth10"),
        ("^=ib0,eth0", "ib1 eth10"),
        ("ib0:1,ib1:2", "ib0 ib1"),
        ("hsn", ""),
    ],
)
def test_lists_of_nccl(value: str, selected: str) -> None:
    assert fabric.select(value, ["ib0", "ib1", "eth0", "eth10"]) == selected.split()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("lo eth0 ib0", "ib0"),
        ("lo docker0 eth0 eth1 virbr0", "eth0 eth1"),
        ("lo virbr0 docker0", "docker0"),
        ("virbr0 lo", "lo"),
        ("", ""),
    ],
)
def test_nccl_without_a_variable(names: str, expected: str) -> None:
    assert fabric.nccl_interfaces("", names.split()) == expected.split()


# -- rules -------------------------------------------------------------------------------------------------------------

WITHOUT_PLUGIN: dict[str, object] = {"plugins": ()}
IB_DOWN = (Adapter("mlx5_0", "InfiniBand", "DOWN"),)
IB_UP = Adapter("mlx5_0", "InfiniBand", "ACTIVE", "200 Gb/sec")
EFA = (Adapter("rdmap0s6", "Unknown", "ACTIVE", "100 Gb/sec"),)
PLUGIN_FILE = "/opt/aws-ofi-nccl/lib/libnccl-net-ofi.so"
BROKEN = [
    # the machine, changes of its environment (None: unset) and other facts, the finding, and a part of its text
    (
        "Slingshot",
        {},
        {"adapters": (Adapter("cxi0", "Slingshot"), Adapter("cxi1", "Slingshot", "DOWN"))},
        "Slingshot links",
        "problem",
        "without a link: cxi1 DOWN",
    ),
    ("Slingshot", {"FI_PROVIDER": "tcp;ofi_rxm"}, {}, "FI_PROVIDER", "warning", "FI_PROVIDER=tcp;ofi_rxm excludes cxi"),
    ("Slingshot", {"FI_PROVIDER": "^cxi"}, {}, "FI_PROVIDER", "warning", "export FI_PROVIDER=cxi"),
    ("Slingshot", {}, WITHOUT_PLUGIN, "OFI plugin", "warning", "NCCL has no network plugin in LD_LIBRARY_PATH"),
    ("Slingshot", {"NCCL_NET": "AWS Libfabric"}, WITHOUT_PLUGIN, "NCCL_NET", "problem", "`network AWS Libfabric not f"),
    (
        "Slingshot",
        {"FI_MR_CACHE_MONITOR": "memhooks"},
        {},
        "FI_MR_CACHE_MONITOR",
        "problem",
        "=memhooks can cause dead",
    ),
    (
        "Slingshot",
        {"FI_MR_CACHE_MONITOR": None},
        {},
        "FI_MR_CACHE_MONITOR",
        "warning",
        "export FI_MR_CACHE_MONITOR=userfaultfd\nWhere the system has it: export FI_MR_CACHE_MONITOR=kdreg2",
    ),
    (
        "Slingshot",
        {"FI_MR_CACHE_MONITOR": "userfaultfd,"},
        {},
        "FI_MR_CACHE_MONITOR",
        "warning",
        "MONITOR=userfaultfd,: expected one of userfaultfd, uffd, kdreg2, memhooks, disabled (libfabric",
    ),
    ("Slingshot", {"NCCL_NET_PLUGIN": "none"}, {}, "NCCL_NET_PLUGIN", "warning", "NCCL_NET_PLUGIN=none is no network"),
    ("Slingshot", {"NCCL_NET_PLUGIN": "ofi"}, {}, "NCCL_NET_PLUGIN", "warning", "Unset it, or name the file"),
    (
        "Slingshot",
        {"NCCL_NET": "AWS Libfabric", "NCCL_NET_PLUGIN": "ofi"},
        {},
        "NCCL_NET",
        "problem",
        "Unset NCCL_NET_",
    ),
    ("Slingshot", {}, {"plugins": (PLUGIN_FILE,)}, "OFI plugin", "warning", "uses TCP on Slingshot"),
    ("Slingshot", {"NCCL_NET": "Socket"}, {}, "NCCL_NET", "warning", "NCCL uses TCP although the host has a faster"),
    ("InfiniBand", {"NCCL_NET": "socket"}, {}, "NCCL_NET", "warning", "Unset it."),
    ("Ethernet", {}, {"adapters": EFA}, "OFI plugin", "warning", "and uses TCP: it skips RDMA devices"),
    ("Slingshot", {"FI_CXI_DISABLE_HOST_REGISTER": None}, {}, "FI_CXI_DISABLE_HOST_REGISTER", "warning", "REGISTER=1"),
    ("Slingshot", {"FI_CXI_DEFAULT_CQ_SIZE": None}, {}, "FI_CXI_DEFAULT_CQ_SIZE", "warning", "CQ_SIZE=131072"),
    ("Slingshot", {"NCCL_NET_GDR_LEVEL": None}, {}, "NCCL_NET_GDR_LEVEL", "warning", "(CSCS, NCCL, 2026-06-16)"),
    ("Slingshot", {"NCCL_PROTO": None}, {}, "NCCL_PROTO", "warning", "export NCCL_PROTO=^LL128"),
    (
        "Slingshot",
        {"NCCL_SOCKET_IFNAME": None},
        {},
        "NCCL_SOCKET_IFNAME",
        "warning",
        "export NCCL_SOCKET_IFNAME=hsn\nIf",
    ),
    ("Slingshot", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, {}, "MPICH_GPU_SUPPORT_ENABLED", "warning", "can deadlock if bo"),
    *(
        ("Slingshot", {**AURORA, name: None}, {"vendor": INTEL}, name, "warning", f"export {name}={value}")
        for name, value in AURORA.items()
    ),
    ("InfiniBand", {}, {"adapters": IB_DOWN}, "RDMA ports", "problem", "no port of InfiniBand has a link"),
    *(
        (
            "InfiniBand",
            {},
            {"adapters": (*others, Adapter("mlx5_1", "InfiniBand", state, rate))},
            "RDMA ports",
            "warning",
            f"mlx5_1 {state} {rate} (Linux",
        )
        for others, state, rate in (
            ((), "INIT", "200 Gb/sec"),
            ((IB_UP,), "INIT", "200 Gb/sec"),
            ((IB_UP,), "DOWN", "10 Gb/sec"),
            ((IB_UP,), "ACTIVE", "100 Gb/sec"),
            ((*IB_DOWN,), "INIT", "200 Gb/sec"),
        )
    ),
    ("InfiniBand", {"NCCL_IB_DISABLE": "1"}, {}, "NCCL_IB_DISABLE", "warning", "NCCL uses TCP although the host has"),
    ("InfiniBand", {"NCCL_IB_HCA": "mlx5_2"}, {}, "NCCL_IB_HCA", "warning", "NCCL_IB_HCA=mlx5_2 selects none of the"),
    ("InfiniBand", {}, {"offered": ("eno1", "ib0")}, "MPICOMM_INTERFACE", "warning", "export MPICOMM_INTERFACE=ib0"),
    ("Ethernet", {"GLOO_SOCKET_IFNAME": "eno1"}, {}, "GLOO_SOCKET_IFNAME", "warning", "SOCKET_IFNAME=eno1, and ens1f0"),
    ("Ethernet", {"NCCL_SOCKET_IFNAME": "=eno1"}, {}, "NCCL_SOCKET_IFNAME", "warning", "and not over ens1f0, which is"),
]


@pytest.mark.parametrize(("name", "changes", "others", "check", "status", "shown"), BROKEN)
def test_a_rule_that_is_broken(
    tmp_path: Path,
    name: str,
    changes: dict[str, str | None],
    others: dict[str, object],
    check: str,
    status: str,
    shown: str,
) -> None:
    facts = facts_of(tmp_path, name, **others)
    environ = {variable: value for variable, value in {**facts.environ, **changes}.items() if value is not None}
    results = fabric_check.check(dataclasses.replace(facts, environ=environ))
    assert faults(results) == [(check, status)]
    assert shown in "\n".join(f"{finding.message}\n{finding.remedy}" for finding in results)
    assert not any(finding.check == "fabric settings" for finding in results)


KEPT = [
    # settings and machines for which the pages demand nothing
    ("Slingshot", {"FI_PROVIDER": "cxi"}, {}),
    ("Slingshot", {"FI_PROVIDER": "CXI"}, {}),
    ("Slingshot", {"FI_PROVIDER": "lnx"}, {}),
    ("Slingshot", {"FI_PROVIDER": "^verbs,lnx"}, {}),
    ("Slingshot", {"FI_MR_CACHE_MONITOR": "kdreg2"}, {}),
    ("Slingshot", {"NCCL_NET": "AWS Libfabric"}, {}),
    ("Slingshot", {"FI_MR_CACHE_MONITOR": None}, {"vendor": AMD}),
    ("Slingshot", {"NCCL_NET_PLUGIN": PLUGIN_FILE}, {"plugins": (PLUGIN_FILE,)}),
    ("Slingshot", {"NCCL_NET_PLUGIN": "x,ofi"}, {"plugins": (PLUGIN_FILE,)}),
    ("Ethernet", {}, {"adapters": EFA, "plugins": ("/opt/amazon/ofi-nccl/lib/libnccl-net.so",)}),
    ("Ethernet", {"NCCL_NET": "Socket"}, {"adapters": (Adapter("mlx5_0", "Ethernet", "DOWN"),)}),
    ("InfiniBand", {"GLOO_SOCKET_IFNAME": "ib0"}, {"offered": ("eno1", "ib0")}),
    ("Slingshot", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, {"vendor": AMD}),
    ("Slingshot", {"NCCL_PROTO": None}, {"vendor": AMD}),
    ("Slingshot", {"NCCL_IB_DISABLE": "1"}, {}),
    ("Slingshot", {"NCCL_IB_HCA": "mlx5_0"}, {}),
    ("Slingshot", {"MPICH_GPU_SUPPORT_ENABLED": "0"}, {}),
    ("Slingshot", dict.fromkeys(SETTINGS), {"vendor": None, "plugins": ()}),
    ("InfiniBand", {"FI_PROVIDER": "verbs", "NCCL_IB_DISABLE": "0"}, {}),
    ("InfiniBand", {"NCCL_IB_DISABLE": "1"}, {"vendor": None}),
    ("InfiniBand", {"NCCL_SOCKET_IFNAME": "eno1"}, {}),  # only connects the ranks
    ("InfiniBand", {"MASTER_ADDR": "10.0.0.1"}, {"offered": ("eno1",)}),
    ("InfiniBand", {}, {"offered": ("eno1",), "interfaces": (Interface("eno1", 1), Interface("ib0", None))}),
    ("Ethernet", {}, {"interfaces": (Interface("eno1", 10), Interface("ens1f0", 100, has_address=False))}),
    ("Ethernet", {}, {"offered": ("ens1f0",), "interfaces": (Interface("ens1f0", 100), Interface("ens1f1", 199))}),
    ("Ethernet", {"GLOO_SOCKET_IFNAME": "ens1f0,eno1"}, {}),
    ("this machine", {"NCCL_IB_HCA": "mlx5_0", "GLOO_SOCKET_IFNAME": "eth0"}, {}),
]


@pytest.mark.parametrize(("name", "changes", "others"), KEPT)
def test_a_rule_that_holds_or_does_not_apply(
    tmp_path: Path, name: str, changes: dict[str, str | None], others: dict[str, object]
) -> None:
    facts = facts_of(tmp_path, name, **others)
    environ = {variable: value for variable, value in {**facts.environ, **changes}.items() if value is not None}
    assert faults(fabric_check.check(dataclasses.replace(facts, environ=environ))) == []


def test_every_rule_is_tested_and_has_a_source_with_a_date() -> None:
    assert {rule.setting for rule in RULES} == {check for *_, check, _, _ in BROKEN}
    for rule in RULES:
        assert rule.source.url.startswith("https://")
        assert len(rule.source.date.split("-")) == 3


# -- this host ---------------------------------------------------------------------------------------------------------


def test_the_facts_about_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [("lo", "127.0.0.1"), ("nmn0", "10.0.0.1"), ("hsn0", "10.1.0.1"), ("lo", "::1"), ("hsn0", "fd00::1")]
    monkeypatch.setattr(interfaces, "listed", lambda: listed)
    monkeypatch.setattr(interfaces, "addresses_of", lambda _: ["10.9.0.1", "10.1.0.1"])
    plugins = ("lib/libnccl-net.so", "lib/librccl-net-ofi.so")
    root = write({**SLINGSHOT, **dict.fromkeys([*plugins, "lib/libnccl.so.2", "lib/own.so"], "")}, tmp_path)
    listing = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:  # the permissions of root would not refuse it
        if path.name == "private":
            raise PermissionError(path)
        return listing(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    facts = fabric_check.collect({"LD_LIBRARY_PATH": f"/nonexistent:{root / 'private'}:{root / 'lib'}"}, root)
    assert (facts.vendor, facts.named, sorted(facts.offered)) == (NVIDIA, "hsn0", ["hsn0", "nmn0"])
    assert facts.plugins[:2] == tuple(str(root / plugin) for plugin in plugins)
    named = str(root / "lib/own.so")
    assert named in fabric_check.collect({"NCCL_NET_PLUGIN": f"ofi,{named}"}, root).plugins
    own = {"NCCL_NET_PLUGIN": "own.so", "LD_LIBRARY_PATH": str(root / "lib")}
    assert named in fabric_check.collect(own, root).plugins
    assert [interface.has_address for interface in facts.interfaces] == [True, True, False]
    assert [(adapter.name, adapter.state) for adapter in facts.adapters] == [("cxi0", "ACTIVE"), ("cxi1", "ACTIVE")]
    for name in ("cxi0/device/port/link", "cxi1/device/port/0/link/state"):
        (root / "sys/class/cxi" / name).write_text("down")
    assert [adapter.state for adapter in fabric_check.collect({}, root).adapters] == ["DOWN", "DOWN"]
    wrong = fabric_check.collect({"MPICOMM_INTERFACE": "xyz0"}, root)
    assert wrong.offer_error.startswith("MPICOMM_INTERFACE=xyz0 is not an interface of rank 0's host")
    assert fabric_check.collect({"MPICOMM_INTERFACE": "nmn0"}, root).offered == ("nmn0",)
    assert fabric_check.collect({"MASTER_ADDR": "name"}, root).offered == ("hsn0",)


@pytest.mark.parametrize(("value", "is_wrong"), [("eth", False), ("^eth,lo", True), ("=eth", True), ("=eth0", False)])
def test_interfaces_of_nccl_that_do_not_exist(value: str, is_wrong: bool) -> None:
    listed = (("lo", "127.0.0.1"), ("eth0", "10.0.0.1"))
    chosen = network_check.collect({"NCCL_SOCKET_IFNAME": value}).chosen
    for vendor, status in ((NVIDIA, "problem"), (AMD, "problem"), (INTEL, "warning"), (None, "warning")):
        facts = network_check.NetworkFacts("a", ("10.0.0.1",), "", 0, listed, chosen, vendor)
        statuses = [finding.status for finding in network_check.check(facts) if finding.check == "NCCL_SOCKET_IFNAME"]
        assert statuses == [status] * is_wrong


def test_the_command_shows_the_fabric_only_if_asked() -> None:
    for options, is_shown in (([], False), (["--fabric"], True)):
        outcome = run_command([sys.executable, "-m", "mpicomm", "doctor", "--no-job", "--json", *options])
        checks = [finding["check"] for finding in json.loads(outcome.stdout)["findings"]]
        assert [name in checks for name in ("network devices", "rendezvous", "Gloo")] == [is_shown] * 3, outcome
        assert "interfaces" in checks


def test_the_vendors_of_libraries_are_known() -> None:
    assert set(fabric_rules.LIBRARIES) == {NVIDIA, AMD, INTEL}
