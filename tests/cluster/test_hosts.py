"""The cluster itself: its hosts are isolated from each other, and a stopped cluster leaves nothing behind."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import cluster as clusters
from tests.cluster import hosts, processes
from tests.cluster import layout as layouts
from tests.cluster.layout import ClusterError, Layout
from tests.cluster.running import Cluster
from tests.launching import Outcome, run_command

# The numbers of clusters other than the shared one: OTHER starts, FAILING fails to start.
OTHER, FAILING = 2, 3


def command(number: int, *words: object) -> Outcome:
    """Run `python -m tests.cluster`."""
    return run_command([sys.executable, "-m", "tests.cluster", f"--number={number}", *map(str, words)])


def on(cluster: Cluster, name: str, line: str) -> str:
    """Run a shell command on a host, and return its output."""
    outcome = command(cluster.layout.number, "sh", name, "bash", "-c", line)
    assert outcome.status == 0, outcome
    return outcome.stdout.strip()


def test_each_host_has_its_own_resources(cluster: Cluster) -> None:
    for name in ("node1", "node3"):
        assert on(cluster, name, "hostname; cat /etc/hostname").split() == [name, name]
        assert on(cluster, name, "ls /sys/class/net").split() == ["eth0", "eth1", "lo"]
        addresses = on(cluster, name, "ip -brief -4 address | awk '{print $3}'").split()
        assert addresses == [
            "127.0.0.1/8",
            f"{cluster.layout.lonely_address(name)}/24",
            f"{cluster.layout.address(name)}/24",
        ]
        assert on(cluster, name, "cat /proc/1/comm") == "sleep"
    here = on(cluster, "node1", "touch /tmp/mine /dev/shm/mine; ls /tmp/mine /dev/shm/mine; pwd").split()
    assert here == ["/dev/shm/mine", "/tmp/mine", str(Path.cwd())]
    assert on(cluster, "node2", "ls /dev/shm/mine /tmp/mine 2>/dev/null || true") == ""
    assert not Path("/tmp/mine").exists()


def test_hosts_share_a_directory(cluster: Cluster) -> None:
    path = cluster.folder() / "note"
    on(cluster, "node1", f"echo from node1 > {path}")
    assert path.read_text() == "from node1\n"
    assert on(cluster, "node4", f"cat {path}") == "from node1"


def test_hosts_reach_each_other_by_one_of_two_networks(cluster: Cluster) -> None:
    def reaches(address: str) -> bool:
        return on(cluster, "node1", f"timeout 3 bash -c '</dev/tcp/{address}/26818' 2>&1 && echo yes || true") == "yes"

    assert reaches("node2")
    assert reaches(cluster.layout.address("node2"))
    assert not reaches(cluster.layout.lonely_address("node2"))
    hosts.cut(cluster.layout, "node2")
    assert not reaches("node2")
    hosts.mend(cluster.layout, "node2")
    assert reaches("node2")


def test_a_host_that_was_killed_boots_again(cluster: Cluster) -> None:
    on(cluster, "node4", "touch /dev/shm/before; (env --unset=TESTS_JOB sleep 300 &) >/dev/null 2>&1")
    assert len(cluster.job_processes()) == 1
    assert command(cluster.layout.number, "kill", "node4").status == 0
    assert not cluster.job_processes()
    outcome = command(cluster.layout.number, "sh", "node4", "true")
    assert (outcome.status, outcome.stderr.splitlines()[0]) == (1, "cluster: node4 is down.")
    assert command(cluster.layout.number, "boot", "node4").status == 0
    assert on(cluster, "node4", "ls -A /dev/shm") == ""
    outcome = cluster.run("srun", "--nodelist=node4", "hostname")
    assert outcome.stdout == "node4\n", outcome


def test_the_agent_starts_with_a_new_environment(cluster: Cluster) -> None:
    outcome = cluster.run(cluster.layout.agent, "-x", "-o", "BatchMode=yes", "root@node2", "hostname; pwd;", "env")
    assert outcome.status == 0, outcome
    name, directory, *environ = outcome.stdout.splitlines()
    assert (name, directory) == ("node2", "/root")
    assert not [line for line in environ if line.startswith(("SLURM", "PYTHON", "MPICOMM"))]


def test_another_host_is_an_error(cluster: Cluster) -> None:
    outcome = command(cluster.layout.number, "cut", "node9")
    assert outcome.status == 1
    assert outcome.stderr == "cluster: there is no host node9; there are node1, node2, node3, node4.\n"


# -- start and stop ----------------------------------------------------------------------------------------------------


@pytest.fixture
def other(cluster: Cluster) -> Iterator[Layout]:
    """The layout of a second cluster, with two hosts; the test starts it."""
    layout = Layout(OTHER, layouts.default_directory(OTHER).resolve(), nodes=2, shared=layouts.paths_to_share())
    yield layout
    with contextlib.suppress(ClusterError):
        clusters.down(layouts.load(layout.directory))


def check_nothing_is_left(layout: Layout) -> None:
    assert not layout.directory.exists()
    assert layout.link not in [name for _, name in socket.if_nameindex()]
    running = [path for path in Path("/proc").glob("[0-9]*/cmdline") if processes.started(int(path.parts[2]))]
    assert not [path for path in running if str(layout.directory).encode() in path.read_bytes()]
    assert str(layout.directory) not in Path("/proc/self/mountinfo").read_text()


def test_two_clusters_at_once_and_down_after_a_crash(other: Layout) -> None:
    outcome = command(OTHER, "up", "--nodes=2", "--gpus=0", "--loopback-names")
    assert outcome.status == 0, outcome
    assert f"export SLURM_CONF={other.slurm_conf}" in outcome.stdout
    again = command(OTHER, "up")
    assert again.status == 1
    assert "exists: a cluster is up, or was not taken down." in again.stderr
    environ = {"SLURM_CONF": str(other.slurm_conf)}
    step = run_command(["srun", "-N2", "bash", "-c", "getent hosts $(hostname)"], env=environ)
    assert sorted(step.stdout.split()) == ["127.0.1.1", "127.0.1.1", "node1", "node2"], step
    hosts.kill(other, "node2")
    for name in (hosts.SWITCH, "slurmctld"):
        processes.stop(other, name)
    assert command(OTHER, "down").status == 0
    check_nothing_is_left(other)


def test_up_that_fails_has_no_leftovers(cluster: Cluster) -> None:
    layout = Layout(FAILING, layouts.default_directory(FAILING).resolve())
    with socket.socket() as taken:
        taken.bind(("", layout.controller_port))
        outcome = command(FAILING, "up", "--nodes=2")
    assert outcome.status == 1, outcome
    assert outcome.stderr.startswith("cluster: slurmctld has ended as soon as it was started."), outcome
    assert "Address already in use" in outcome.stderr, outcome
    check_nothing_is_left(layout)
