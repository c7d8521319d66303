"""A PBS job with PALS and Cray MPICH on two hosts: the stand-ins of tests/pals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.running import Cluster, Flavour, places
from tests.cluster.test_slurm import PLACE, check_places
from tests.pals import installation

HOSTS = ["node1", "node1", "node2", "node2"]


@pytest.fixture(name="job")
def _job(cluster: Cluster, mpich: Flavour) -> list[str]:
    """The beginning of a command line in a PBS job of four ranks on two hosts."""
    folder = cluster.folder()
    environ = installation.install(folder, mpich.python) | installation.of_job(Path(folder, "nodes"), HOSTS)
    words = [f"{name}={value}" for name, value in environ.items()]
    return ["env", *words, f"PATH={folder}:/usr/bin:/bin", str(mpich.python), "-m", "mpicomm", "run"]


def test_ranks_on_two_hosts_exchange_messages(cluster: Cluster, job: list[str]) -> None:
    outcome = cluster.run(*job, "-m", "mpicomm.examples.p2p")
    assert outcome.status == 0, outcome
    assert "mpiexec -n 4 --ppn 2 --hostfile " in outcome.stderr, outcome
    assert outcome.stdout.count("rank 2: had 2, received 1 from rank 1") == 3, f"from the other host\n{outcome}"


def test_ranks_have_the_places_that_pals_reports(cluster: Cluster, job: list[str]) -> None:
    outcome = cluster.run(*job, "-n", 3, *PLACE)
    assert outcome.status == 0, outcome
    found = places(outcome)
    check_places(found, HOSTS[:3])
    assert {place["launcher"] for place in found} == {"PALS mpiexec"}
    assert {place["master_addr"] for place in found} == {cluster.layout.address("node1")}


def test_hosts_are_named_for_a_number_of_ranks_on_each(cluster: Cluster, job: list[str]) -> None:
    outcome = cluster.run(*job, "--nnodes", "1:2", "--nproc-per-node", 1, *PLACE)
    assert outcome.status == 0, outcome
    assert "mpiexec -n 2 --ppn 1 --hosts node1,node2 " in outcome.stderr, outcome
    check_places(places(outcome), ["node1", "node2"])
