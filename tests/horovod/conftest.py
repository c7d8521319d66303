"""Horovod is initialized once for the tests of a module under MPI, which all run on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import mpicomm
import mpicomm.horovod as hvd


@pytest.fixture(scope="module")
def started(world: mpicomm.World) -> Iterator[None]:
    """Initialize Horovod in the job that the other tests use too, with dynamic process sets.

    It ends with the module: its thread calls operations in the background, also while a test of another package
    replaces the calls of MPI by faulty ones.
    """
    del world
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
        hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture
def dynamic(started: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Initialize Horovod, and let the test add and remove process sets."""
    del started
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")


@pytest.fixture
def parity(started: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[hvd.ProcessSet]:
    """Register the sets of the even and of the odd ranks; returns the one that contains this rank."""
    del started
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    sets = [hvd.add_process_set(range(odd, hvd.size(), 2)) for odd in (0, 1)]
    yield sets[hvd.rank() % 2]
    for each in sets:
        assert hvd.remove_process_set(each)
