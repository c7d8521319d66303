"""`mpicomm run --stage-env`, whose hosts have a /tmp of their own, and `--exclude-failed` with a spare host."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import small_env
from tests.cluster import hosts
from tests.cluster.running import Cluster, Flavour
from tests.launching import Outcome

WORLD = """
import os, sys
import mpicomm
world = mpicomm.bootstrap()
os.write(1, f"{world.rank} {world.hostname} {sys.prefix}\\n".encode())
if world.hostname in sys.argv:
    raise RuntimeError("uncorrectable ECC error encountered")
mpicomm.barrier()
"""
SLURM, SSH = "srun", "ssh"


def run(cluster: Cluster, python: Path, launcher: str, names: Sequence[str], *words: object) -> Outcome:
    """Start two ranks on each host with `mpicomm run`, in an allocation or by a remote agent."""
    command: list[object] = [python, "-m", "mpicomm", "run"]
    if launcher == SLURM:
        allocation = ["salloc", f"-N{len(names)}", "--ntasks-per-node=2", f"--nodelist={','.join(names)}"]
        return cluster.run(*allocation, *command, *words)
    return cluster.run(*command, "--hosts", ",".join(f"{name}:2" for name in names), *words)


def program(cluster: Cluster) -> Path:
    path = cluster.folder() / "world.py"
    path.write_text(WORLD)
    return path


def on_host(cluster: Cluster, name: str, *command: str) -> str:
    done = subprocess.run(hosts.enter(cluster.layout, name) + list(command), capture_output=True, text=True, check=True)
    return done.stdout


def ranks(outcome: Outcome) -> list[list[str]]:
    return sorted(line.split() for line in outcome.stdout.splitlines() if line[:1].isdigit())


@pytest.mark.parametrize("launcher", [SLURM, SSH])
def test_each_host_has_a_copy_until_the_end(cluster: Cluster, flavour: Flavour, launcher: str) -> None:
    python = small_env.make(cluster.folder() / "env", flavour.python)
    outcome = run(cluster, python, launcher, ["node1", "node2"], "--stage-env=/tmp", program(cluster))
    assert outcome.status == 0, outcome
    copy = ranks(outcome)[0][2]
    assert Path(copy).parent == Path("/tmp")
    assert ranks(outcome) == [[str(rank), f"node{1 + rank // 2}", copy] for rank in range(4)], outcome
    assert f"to {copy} on 2 nodes in " in outcome.stderr, outcome
    assert not [name for name in ("node1", "node2") if "mpicomm-env" in on_host(cluster, name, "ls", "/tmp")]


@pytest.mark.parametrize("launcher", [SLURM, SSH])
def test_a_full_disk_on_one_host_starts_no_rank(cluster: Cluster, open_mpi: Flavour, launcher: str) -> None:
    python = small_env.make(cluster.folder() / "env", open_mpi.python)
    for name in ("node3", "node4"):
        on_host(cluster, name, "mkdir", "-p", "/tmp/local")
    on_host(cluster, "node4", "mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", "/tmp/local")
    try:
        outcome = run(cluster, python, launcher, ["node3", "node4"], "--stage-env=/tmp/local", program(cluster))
        left = [name for name in ("node3", "node4") if on_host(cluster, name, "ls", "/tmp/local")]
    finally:
        on_host(cluster, "node4", "umount", "/tmp/local")
    assert outcome.status == 2, outcome
    assert "to 1 of 2 nodes:\n  node4: 16 KiB free in /tmp/local, expected " in outcome.stderr, outcome
    assert ranks(outcome) == left == []


@pytest.mark.parametrize("launcher", [SLURM, SSH])
def test_a_failed_host_is_replaced_by_a_spare(cluster: Cluster, open_mpi: Flavour, launcher: str) -> None:
    options = ["--nnodes", "2", "--max-restarts", "1", "--exclude-failed"]
    names = ["node1", "node2", "node3"]
    outcome = run(cluster, open_mpi.python, launcher, names, *options, program(cluster), "node2")
    assert outcome.status == 0, outcome
    assert "leaving out node2, on which a rank failed; 2 of 3 hosts are left" in outcome.stderr, outcome
    assert {host for _, host, _ in ranks(outcome)} == set(names), outcome
    assert [host for _, host, _ in ranks(outcome)].count("node3") == 2, outcome
