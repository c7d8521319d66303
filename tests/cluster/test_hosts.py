"""The cluster itself: several can be up, and a stopped cluster leaves nothing behind."""

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
