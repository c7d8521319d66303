"""Timeouts that do not affect their group; tests/launch/test_deadlines.py tests the timeouts that do."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.recorder import flight_recorder
from tests.time_limits import scaled, wait_until

SECONDS = 2.5  # the watchdog checks in the second half, and has nothing to report


@pytest.fixture
def raising(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """A group with a short timeout that is raised as an exception."""
    monkeypatch.setenv("MPICOMM_ON_TIMEOUT", "raise")
    group = dist.new_group(list(range(world.size)), timeout=datetime.timedelta(seconds=SECONDS))
    yield group
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_the_watchdog_has_no_deadline_for_a_barrier(world: mpicomm.World) -> None:
    """The barrier raises TimeoutError itself, also if a stopped rank delays the list of missing ranks."""
    limits: list[float | None] = []
    store = dist.distributed_c10d._get_default_store()

    def observe() -> None:
        running = wait_until(flight_recorder.running, "this rank is in the barrier")
        limits.extend(operation.limit for operation in running)
        store.add("in the barrier without a limit", 1)

    if world.rank == 0:
        others = world.size - 1
        wait_until(lambda: store.add("in the barrier without a limit", 0) == others, "the others are in the barrier")
        mpicomm.barrier(timeout=20)
        return
    thread = threading.Thread(target=observe)
    thread.start()
    mpicomm.barrier(timeout=20)
    thread.join()
    assert limits == [None]


@pytest.mark.mpi(min_size=2)
def test_a_receive_raises_when_it_is_awaited(world: mpicomm.World, raising: dist.ProcessGroup) -> None:
    """A late message does not break the group: it may still arrive."""
    tensor = torch.zeros(2)
    if world.rank == 0:
        work = dist.irecv(tensor, 1, group=raising)
        with pytest.raises(TimeoutError, match=rf"timed out after {SECONDS} s, waiting for rank 1"):
            work.wait()
        raising.set_timeout(datetime.timedelta(seconds=0.2))
        with pytest.raises(TimeoutError, match=r"timed out after 0\.2 s"):
            work.wait()
        with pytest.raises(TimeoutError, match=r"timed out after 0\.05 s"):
            work.wait(datetime.timedelta(seconds=0.05))
        dist.barrier()
        work.wait(datetime.timedelta(seconds=scaled(20)))
        assert torch.equal(tensor, torch.ones(2))
    else:
        dist.barrier()
        if world.rank == 1:
            dist.send(torch.ones(2), 0, group=raising)
