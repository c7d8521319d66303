"""Barriers in shared memory, by the extension module and by the general path: order, timeouts and differing calls."""

from __future__ import annotations

import datetime
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm import torch_internals
from mpicomm.recorder import flight_recorder
from tests import nodes
from tests.time_limits import wait_until

pytestmark = [pytest.mark.each_mpi, pytest.mark.mpi(min_size=2)]

LATE_SECONDS = 0.2
PATHS = {"plain": (), "general": None, "rank 0 general": (0,)}
paths = pytest.mark.parametrize("path", PATHS)


@pytest.fixture
def group(new_group: Callable[..., Any], path: str) -> Any:
    """A group that has opened its shared memory, some of whose ranks take the general path."""
    nodes.require("slots")
    handle = new_group()
    dist.all_reduce(torch.ones(1), group=handle)
    ranks = PATHS[path]
    if ranks is None or dist.get_rank() in ranks:
        handle._plain = None
    return handle


def barrier(group: Any, seconds: float = 0, *, is_async: bool = False) -> dist.Work:
    opts = torch_internals.BarrierOptions()
    opts.asyncOp = is_async
    if seconds:
        opts.timeout = datetime.timedelta(seconds=seconds)
    return group.barrier(opts)


@paths
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_queued", [False, True])
def test_no_rank_leaves_before_the_last_one_has_arrived(
    world: mpicomm.World, group: Any, is_async: bool, is_queued: bool
) -> None:
    """Ranks on this node have one clock."""
    tensor, works = torch.ones(2**16), []
    world.comm.Barrier()
    if world.rank == 1:
        time.sleep(LATE_SECONDS)
    if is_queued:
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
    called = time.monotonic()
    works.append(barrier(group, is_async=is_async))
    for work in works:
        work.wait()  # type: ignore[union-attr]
    left = time.monotonic()
    assert left >= max(mpicomm.all_gather_object(called))
    operation = next(each for each in reversed(flight_recorder.recorded()) if each.name == "barrier")
    assert operation.end is not None
    assert operation.limit is None
    assert flight_recorder.running() == []


@paths
def test_the_watchdog_sees_a_barrier_without_a_deadline(world: mpicomm.World, group: Any) -> None:
    seen: list[flight_recorder.Operation] = []
    watching = threading.Thread(
        target=lambda: wait_until(lambda: seen.extend(flight_recorder.running()) or bool(seen), "it waits")
    )
    world.comm.Barrier()
    if world.rank == 1:
        time.sleep(LATE_SECONDS)
        barrier(group)
        return
    watching.start()
    barrier(group)
    watching.join()
    assert [(each.name, each.limit, each.where.split()[0].split(":")[0]) for each in seen] == [
        ("barrier", None, "test_barrier.py")
    ]


@paths
@pytest.mark.parametrize("is_async", [False, True])
def test_ranks_that_wait_do_not_compute(world: mpicomm.World, group: Any, is_async: bool) -> None:
    world.comm.Barrier()
    if world.rank == 1:
        time.sleep(1.0)
    start = time.monotonic(), time.process_time()
    barrier(group, is_async=is_async).wait()
    seconds, used = time.monotonic() - start[0], time.process_time() - start[1]
    assert world.rank == 1 or used < 0.4 * seconds


@paths
@pytest.mark.parametrize("is_async", [False, True], ids=["own timeout", "asynchronous, timeout of the group"])
def test_a_rank_is_missing(world: mpicomm.World, group: Any, is_async: bool) -> None:
    """The ranks that wait get an error that names the missing one. A barrier before it does not shorten its timeout."""
    if is_async:
        group.set_timeout(datetime.timedelta(seconds=0.5))
    seconds = 0.0 if is_async else 0.5
    if world.rank == 1:
        time.sleep(LATE_SECONDS)
    barrier(group, seconds, is_async=is_async).wait()
    start = time.monotonic()
    error: Exception | None = None
    if world.rank != 1:
        with pytest.raises((TimeoutError, mpicomm.MpicommError)) as caught:  # the latter after that of another rank
            barrier(group, seconds, is_async=is_async).wait()
        error = caught.value
        seconds = time.monotonic() - start
        with pytest.raises(mpicomm.MpicommError, match="cannot be used any more"):
            dist.all_reduce(torch.ones(1), group=group)
    raised = [each for each in world.comm.allgather((seconds, error)) if isinstance(each[1], TimeoutError)]
    message = rf"barrier #3.* timed out after 0.5 s: 1 of {world.size} ranks did not reach it: rank 1"
    assert any(re.search(message, str(each)) for _, each in raised), raised
    assert all(waited >= 0.5 for waited, _ in raised)


@paths
def test_ranks_that_call_another_operation(world: mpicomm.World, group: Any) -> None:
    def call() -> object:
        return dist.all_reduce(torch.ones(1), group=group) if world.rank == 1 else barrier(group)

    with pytest.raises((RuntimeError, ValueError), match=r"must call the same operation|cannot be used any more"):
        call()
    world.comm.Barrier()
