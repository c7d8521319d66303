"""A cluster for the tests: `make test-cluster`, or pytest with a path in this directory.

Other runs of pytest pass by: a cluster needs root and Slurm, and takes the machine for some minutes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpicomm import mpi
from tests.cluster import cluster as clusters
from tests.cluster import layout as layouts
from tests.cluster import packages, processes
from tests.cluster.layout import ClusterError, Layout
from tests.cluster.running import Cluster, Flavour
from tests.launching import OTHER_MPI_ENV

HERE = Path(__file__).resolve().parent
# Each worker of pytest-xdist has a cluster of its own; the numbers between are those of test_hosts.py, and 0 is that of
# `make cluster-up`.
NUMBER = 1 + 3 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
FIRST = "test_preemption"
"""The module that waits longest, so that others run beside it."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave these tests out unless the command line names them."""
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(HERE) for path in named) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.module.__name__.rpartition(".")[2] != FIRST)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Four hosts with Slurm."""
    if reason := packages.problem():
        pytest.skip(reason)
    layout = Layout(NUMBER, layouts.default_directory(NUMBER).resolve(), shared=layouts.paths_to_share())
    if layout.directory.exists():  # of a run that was killed
        clusters.down(layouts.load(layout.directory))
    clusters.up(layout)
    yield Cluster(layout)
    clusters.down(layout)


@pytest.fixture(autouse=True)
def leaves_nothing_on_hosts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which something still runs on a host; put every host in order."""
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
    return _flavour("Open MPI")


@pytest.fixture(scope="session")
def mpich() -> Flavour:
    return _flavour("MPICH")


@pytest.fixture(params=["Open MPI", "MPICH"])
def flavour(request: pytest.FixtureRequest) -> Flavour:
    """Each of the two, one after the other."""
    return _flavour(request.param)


def _flavour(vendor: str) -> Flavour:
    if mpi.library().vendor == vendor:
        return Flavour(vendor, Path(sys.executable))
    if OTHER_MPI_ENV is None:
        pytest.skip(f"no environment with {vendor}; OTHER_MPI_ENV names it")
    return Flavour(vendor, Path(OTHER_MPI_ENV).absolute() / "bin" / "python")
