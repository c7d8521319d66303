"""Jobs of the MPI operator: its files and variables on virtual hosts, with a launcher that has no rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from mpicomm.launch.jobscript import KubernetesJob, script
from tests.cluster.conftest import flavour_of
from tests.cluster.layout import INTEL_MPI_ENV, ROOT
from tests.cluster.pods import Pods
from tests.cluster.running import Cluster, Flavour, places
from tests.cluster.test_slurm import check_places

USER = 1000  # of the containers of a generated job


@pytest.fixture(params=["Open MPI", "MPICH", "Intel MPI"])
def container_mpi(request: pytest.FixtureRequest) -> Flavour:
    """Run the test once with each MPI of the operator."""
    if request.param != "Intel MPI":
        return flavour_of(request.param)
    if INTEL_MPI_ENV is None:
        pytest.skip("no environment with Intel MPI; `make compat MPI=intel` installs one, or INTEL_MPI_ENV names it")
    return Flavour(request.param, INTEL_MPI_ENV / "bin" / "python")


@pytest.fixture
def start(cluster: Cluster) -> Iterator[Callable[..., Pods]]:
    """Return a function that makes the pods of a job, which end with the test."""
    found = []

    def make(vendor: str, **fields: Any) -> Pods:
        found.append(Pods(cluster.layout, cluster.folder(), vendor, **fields))
        return found[-1]

    yield make
    for each in found:
        each.down()


def container(cluster: Cluster, mpi: Flavour) -> dict[str, str]:
    """Return the variables of the image and of the user."""
    path = f"{mpi.python.parent}:{os.defpath}"
    return {"PATH": path, "PYTHONPATH": str(ROOT), "DATA": "a b", **cluster.layout.site_environ}


def run(mpi: Flavour, *words: str) -> list[str]:
    return [str(mpi.python), "-m", "mpicomm", "run", *words]


def test_every_worker_gets_its_ranks(cluster: Cluster, container_mpi: Flavour, start: Callable[..., Pods]) -> None:
    """The variables of the container reach the ranks, which ssh alone would lose."""
    pods = start(container_mpi.vendor)
    pods.up()
    program = ["sh", "-c", 'exec python -m tests.cluster.place "$DATA"']
    outcome = pods.launch(*run(container_mpi, "--", *program), environ=container(cluster, container_mpi))
    assert outcome.status == 0, outcome
    found = places(outcome)
    check_places(found, pods.names)
    assert {place["label"] for place in found} == {"a b"}


def test_a_generated_job(cluster: Cluster, container_mpi: Flavour, start: Callable[..., Pods]) -> None:
    """The commands and variables of the manifest are sufficient: the image has no configuration of ssh."""
    program = ("sh", "-c", 'echo "$(hostname) $(id -u) $DATA"')
    environ = container(cluster, container_mpi)
    given = tuple(f"{name}={value}" for name, value in environ.items() if name != "PATH")
    job = KubernetesJob(program, nodes=3, ranks_per_node=2, image="train", env=given)
    spec = yaml.safe_load(script(job))["spec"]
    launcher, worker = (
        spec["mpiReplicaSpecs"][role]["template"]["spec"]["containers"][0] for role in ("Launcher", "Worker")
    )
    pods = start("Open MPI", slots=spec["slotsPerWorker"], user=USER)
    pods.up(worker["command"])
    variables = {each["name"]: each["value"] for each in launcher["env"]} | {"PATH": environ["PATH"]}
    words = [expanded(word) for word in launcher["command"]]
    outcome = pods.launch(*words, environ={name: expanded(value) for name, value in variables.items()})
    assert outcome.status == 0, outcome
    assert sorted(outcome.stdout.splitlines()) == sorted(f"{name} {USER} a b" for name in pods.names * 2)


def expanded(text: str) -> str:
    """Replace $$ by $, as Kubernetes does; the generated job has no variables to expand."""
    assert "$(" not in text.replace("$$", "")
    return text.replace("$$", "$")
