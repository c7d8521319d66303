"""Jobs of the MPI operator: its files and variables on virtual hosts, with a launcher that has no rank."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from mpicomm.launch.jobscript import KubernetesJob, script
from tests.cluster import processes
from tests.cluster.conftest import flavour_of
from tests.cluster.layout import INTEL_MPI_ENV, ROOT
from tests.cluster.pods import LAUNCHER, Pods
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


def test_the_host_file_of_another_mpi(cluster: Cluster, mpich: Flavour, start: Callable[..., Pods]) -> None:
    """MPICH cannot read Open MPI's host file, which is the operator's default."""
    pods = start("Open MPI", slots=2)
    pods.up()
    outcome = pods.launch(*run(mpich, "hostname"), environ=container(cluster, mpich))
    assert outcome.status == 0, outcome
    assert sorted(outcome.stdout.split()) == sorted(pods.names * 2)


def test_a_job_on_fewer_hosts_is_an_error(cluster: Cluster, open_mpi: Flavour, start: Callable[..., Pods]) -> None:
    pods = start("Open MPI")
    pods.write_files()
    environ = container(cluster, open_mpi)
    outcome = pods.launch(*run(open_mpi, "-n", "2", "hostname"), environ=environ)
    assert outcome.status == 2, outcome
    assert "-n 2 leaves 1 of 3 hosts in /etc/mpi/hostfile without a rank: pi-worker-2." in outcome.stderr
    # mpirun of Open MPI 5 ignores the host file, and starts all ranks on the launcher.
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = [*open_mpi.mpiexec, "-n", "2", open_mpi.python, "-m", "tests.cluster.place"]
    outcome = pods.launch(*mpirun, environ={**environ, **as_root})
    assert outcome.status not in (0, None), outcome
    assert f"LaunchError: the ranks run on 1 of 3 hosts: {LAUNCHER}\n" in outcome.stderr, outcome


def test_a_worker_that_has_no_address_yet(cluster: Cluster, mpich: Flavour, start: Callable[..., Pods]) -> None:
    pods = start("MPICH")
    pods.up()
    pods.write_names(LAUNCHER, without="pi-worker-2")
    log = pods.folder / "log"
    log.touch()

    def give_address() -> None:
        processes.wait_until(lambda: "waiting for the addresses of 1 hosts" in log.read_text(), 60, "it waits")
        pods.write_names(LAUNCHER)

    thread = threading.Thread(target=give_address)
    thread.start()
    line = 'log=$1; shift; exec "$@" 2>"$log"'
    outcome = pods.launch("sh", "-c", line, "sh", log, *run(mpich, "hostname"), environ=container(cluster, mpich))
    thread.join()
    assert outcome.status == 0, (outcome, log.read_text())
    assert sorted(outcome.stdout.split()) == pods.names


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
