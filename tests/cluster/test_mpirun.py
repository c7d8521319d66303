"""Several hosts without a scheduler: a launcher's remote agent starts the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import hosts
from tests.cluster.running import Cluster, Flavour, places
from tests.cluster.test_slurm import PLACE, check_places

UNEVEN = ["node1", "node1", "node1", "node2"]


@pytest.fixture
def loopback_names(cluster: Cluster) -> Iterator[None]:
    """Let every host's own name resolve to 127.0.1.1, as on Debian."""
    for name in cluster.layout.names:
        hosts.write_names(cluster.layout, name, loopback=True)
    yield
    for name in cluster.layout.names:
        hosts.write_names(cluster.layout, name)


@pytest.mark.usefixtures("loopback_names")
def test_uneven_hosts(cluster: Cluster, flavour: Flavour) -> None:
    """Each host's first interface and own name do not reach the other hosts; bootstrap finds the second interface."""
    entry = "{} slots={}" if flavour.vendor == "Open MPI" else "{}:{}"
    hostfile = cluster.folder() / "hosts"
    hostfile.write_text("".join(f"{entry.format(host, UNEVEN.count(host))}\n" for host in ("node1", "node2")))
    option = "--hostfile" if flavour.vendor == "Open MPI" else "-f"
    outcome = cluster.run(*flavour.mpiexec, option, hostfile, "-n", 4, flavour.python, *PLACE)
    assert outcome.status == 0, outcome
    found = places(outcome)
    check_places(found, UNEVEN)
    assert {place["master_addr"] for place in found} == {cluster.layout.address("node1")}


GLOO = """
import os, sys
import torch, torch.distributed as dist
import mpicomm
world = mpicomm.bootstrap("gloo", timeout=30)
total = torch.tensor([world.rank])
dist.all_reduce(total)
sys.stdout.write(f"{total.item()} by {os.environ['GLOO_SOCKET_IFNAME']}\\n")
"""


@pytest.mark.usefixtures("loopback_names")
def test_gloo_takes_the_interface_that_is_shared(cluster: Cluster, open_mpi: Flavour) -> None:
    outcome = cluster.run(*open_mpi.mpiexec, "--host", "node1,node2", "-n", 2, open_mpi.python, "-c", GLOO)
    assert outcome.status == 0, outcome
    assert outcome.stdout.splitlines() == [f"{sum(range(2))} by eth1"] * 2, outcome


def test_rendezvous_over_ipv6(cluster: Cluster, flavour: Flavour) -> None:
    """The store and the watchdog's connections use IPv6; MPI chooses its own addresses."""
    address = cluster.layout.ipv6_address("node1")
    option = ["--host" if flavour.vendor == "Open MPI" else "-hosts", "node1,node2"]
    command = ["env", f"MASTER_ADDR={address}", *flavour.mpiexec, *flavour.keep("MASTER_ADDR"), *option, "-n", 2]
    outcome = cluster.run(*command, flavour.python, *PLACE)
    assert outcome.status == 0, outcome
    found = places(outcome)
    check_places(found, ["node1", "node2"])
    assert [(place["master_addr"], place["is_watched"]) for place in found] == [(address, True)] * 2
