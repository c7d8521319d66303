"""A cluster for the tests: run `make test-cluster`, or pytest with a path in this directory.

Other runs of pytest ignore this directory: a cluster needs root and Slurm, and occupies the machine for some minutes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from mpicomm import mpi
from tests.cluster import cluster as clusters
from tests.cluster import layout as layouts
from tests.cluster import packages, processes
from tests.cluster.layout import ClusterError, Layout
from tests.cluster.running import Cluster, Flavour
from tests.launching import OTHER_MPI_ENV

HERE = Path(__file__).resolve().parent
# Each worker of pytest-xdist has its own cluster. test_hosts.py uses number 2, and `make cluster-up` uses 0.
NUMBER = 1 + 3 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
FIRST = "test_preemption"
"""The module whose tests wait longest: it starts first, so that other tests run at the same time."""
LAST = "test_kill_matrix"
"""The module that starts the most ranks at once: it would delay tests that depend on Slurm's time limits."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore these tests unless the command line names them."""
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(HERE) for path in named) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = {item: item.module.__name__.rpartition(".")[2] for item in items}
    items.sort(key=lambda item: (names[item] != FIRST, names[item] == LAST))


def _leave_out(reason: str) -> NoReturn:
    """Skip the test; in CI fail it, so that CI does not pass without the cluster."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster of four hosts with Slurm."""
    if reason := packages.problem():
        _leave_out(reason)
    layout = Layout(NUMBER, layouts.default_directory(NUMBER).resolve(), shared=layouts.paths_to_share())
    if layout.directory.exists():  # left by a run that was killed
        clusters.down(layouts.load(layout.directory))
    clusters.up(layout)
    yield Cluster(layout)
    clusters.down(layout)


@pytest.fixture(autouse=True)
def without_leftovers_on_hosts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves processes on a host; restore every host."""
    yield
    if "cluster" not in request.fixturenames:
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    with contextlib.suppress(ClusterError):
        processes.wait_until(lambda: not cluster.job_processes(), 5, "the hosts are empty")
    left = cluster.job_processes()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cluster.settle()
    assert not left


@pytest.fixture(scope="session")
def open_mpi() -> Flavour:
    return flavour_of("Open MPI")


@pytest.fixture(scope="session")
def mpich() -> Flavour:
    return flavour_of("MPICH")


@pytest.fixture(params=["Open MPI", "MPICH"])
def flavour(request: pytest.FixtureRequest) -> Flavour:
    """Run the test once with each MPI."""
    return flavour_of(request.param)


def flavour_of(vendor: str) -> Flavour:
    """Return an MPI; skip the test if it is not installed."""
    if mpi.library().vendor == vendor:
        return Flavour(vendor, Path(sys.executable))
    if OTHER_MPI_ENV is None:
        _leave_out(f"no environment with {vendor}; OTHER_MPI_ENV names it")
    return Flavour(vendor, Path(OTHER_MPI_ENV).absolute() / "bin" / "python")
