"""`python -m tests.cluster`: a second cluster can be up, and a stopped cluster leaves nothing behind."""

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

NUMBER = 2  # tests/cluster/conftest.py leaves this number free


def command(*words: str) -> Outcome:
    return run_command([sys.executable, "-m", "tests.cluster", f"--number={NUMBER}", *words])


@pytest.fixture
def other(cluster: Cluster) -> Iterator[Layout]:
    """The layout of a second cluster, with two hosts; the test starts it."""
    layout = Layout(NUMBER, layouts.default_directory(NUMBER).resolve(), nodes=2)
    yield layout
    with contextlib.suppress(ClusterError):
        clusters.down(layouts.load(layout.directory))


def test_two_clusters_at_once_and_down_after_a_crash(other: Layout) -> None:
    outcome = command("up", "--nodes=2", "--gpus=0")
    assert outcome.status == 0, outcome
    assert f"export SLURM_CONF={other.slurm_conf}" in outcome.stdout
    again = command("up")
    assert again.status == 1
    assert "exists: a cluster is up, or was not taken down." in again.stderr
    step = run_command(["srun", "-N2", "hostname"], env={"SLURM_CONF": str(other.slurm_conf)})
    assert sorted(step.stdout.split()) == ["node1", "node2"], step
    hosts.kill(other, "node2")
    for name in (hosts.SWITCH, "slurmctld"):
        processes.stop(other, name)
    assert command("down").status == 0
    assert not other.directory.exists()
    assert other.link not in [name for _, name in socket.if_nameindex()]
    running = [path for path in Path("/proc").glob("[0-9]*/cmdline") if processes.started(int(path.parts[2]))]
    assert not [path for path in running if str(other.directory).encode() in path.read_bytes()]
    assert str(other.directory) not in Path("/proc/self/mountinfo").read_text()
