"""Operations that end in an exception when their time is up, and name who has not come."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import mpicomm

SECONDS = 0.3
UNUSABLE = "cannot be used any more"


@pytest.fixture
def fresh(world: mpicomm.World) -> Iterator[dist.ProcessGroup]:
    """A group of all ranks, which the test may break."""
    group = dist.new_group(list(range(world.size)), timeout=datetime.timedelta(seconds=20))
    yield group
    dist.barrier()  # the late ranks have come: what was broken can be taken down
    dist.destroy_process_group(group)


@pytest.fixture
def raising(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """A group whose timeouts are exceptions, and short."""
    monkeypatch.setenv("MPICOMM_TIMEOUT", "raise")
    group = dist.new_group(list(range(world.size)), timeout=datetime.timedelta(seconds=SECONDS))
    yield group
    dist.barrier()
    dist.destroy_process_group(group)


def late(size: int) -> str:
    """Return how a message names the ranks that have not come, where rank 0 alone has."""
    return {2: "rank 1", 3: "ranks 1, 2"}.get(size, f"ranks 1-{size - 1}")


@pytest.mark.mpi(min_size=2)
def test_waiting_for_a_collective(world: mpicomm.World, fresh: dist.ProcessGroup) -> None:
    tensor = torch.ones(1)
    if world.rank == 0:
        work = dist.all_reduce(tensor, group=fresh, async_op=True)
        with pytest.raises(TimeoutError, match=rf"all_reduce #1, float32\[1\].* did not come .*: {late(world.size)}\."):
            work.wait(datetime.timedelta(seconds=SECONDS))
        with pytest.raises(mpicomm.MpicommError, match=UNUSABLE):
            dist.all_reduce(tensor, group=fresh)
    dist.barrier()
    if world.rank != 0:
        dist.all_reduce(tensor, group=fresh)
        assert tensor.item() == world.size


@pytest.mark.mpi(min_size=2)
def test_a_barrier_names_who_has_not_come(world: mpicomm.World, fresh: dist.ProcessGroup) -> None:
    if world.rank == 0:
        with pytest.raises(TimeoutError) as caught:
            mpicomm.barrier(fresh, timeout=SECONDS)
        assert f"{world.size - 1} of {world.size} ranks did not come within {SECONDS} s: {late(world.size)}." in str(
            caught.value
        )
        assert "test_deadlines.py" in str(caught.value), "it is to say where they are"
        with pytest.raises(mpicomm.MpicommError, match=UNUSABLE):
            dist.barrier(group=fresh)
    dist.barrier()
    if world.rank != 0:
        mpicomm.barrier(fresh)


def test_a_barrier_waits_for_who_comes_in_time(world: mpicomm.World) -> None:
    start = time.monotonic()
    time.sleep(0.1 * world.rank)
    mpicomm.barrier(timeout=datetime.timedelta(seconds=20))
    assert time.monotonic() - start >= 0.1 * (world.size - 1)
    mpicomm.barrier(timeout=20.0)
    mpicomm.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_synchronous_collective_raises_where_it_is_asked_to(world: mpicomm.World, raising: dist.ProcessGroup) -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=raising)
    assert torch.equal(tensor, torch.full((3,), float(world.size)))
    if world.rank == 0:
        with pytest.raises(TimeoutError, match=rf"broadcast #2.* did not come .*: {late(world.size)}\."):
            dist.broadcast(tensor, 0, group=raising)
        with pytest.raises(mpicomm.MpicommError, match=UNUSABLE):
            dist.broadcast(tensor, 0, group=raising)
    dist.barrier()
    if world.rank == 1:  # the barrier ahead of its broadcast ends: rank 0 was there; the broadcast itself would not
        assert not dist.barrier(group=raising, async_op=True).is_success() or world.size == 2


@pytest.mark.mpi(min_size=2)
def test_a_receive_raises_where_it_is_asked_to(world: mpicomm.World, raising: dist.ProcessGroup) -> None:
    """A message that is late breaks nothing: it may still come."""
    tensor = torch.zeros(2)
    if world.rank == 0:
        work = dist.irecv(tensor, 1, group=raising)
        with pytest.raises(TimeoutError, match=rf"not ended within {SECONDS} s: rank 1 has not joined it"):
            work.wait()
        with pytest.raises(TimeoutError, match=r"not ended within 0\.05 s"):
            work.wait(datetime.timedelta(seconds=0.05))
        dist.barrier()
        work.wait(datetime.timedelta(seconds=20))
        assert torch.equal(tensor, torch.ones(2))
    else:
        dist.barrier()
        if world.rank == 1:
            dist.send(torch.ones(2), 0, group=raising)
