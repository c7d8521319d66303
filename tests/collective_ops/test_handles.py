"""Asynchronous operations and their handles."""

from __future__ import annotations

import asyncio
import datetime
import gc
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm import arguments
from mpicomm.arguments import Deadline
from tests.time_limits import scaled


def test_starting_does_not_wait_for_other_ranks(world: mpicomm.World) -> None:
    """Rank 0 starts the operation, and receives before it waits; the other ranks send before they start it."""
    if world.rank == 0:
        handle = mpicomm.all_reduce({"a": torch.ones(3), "b": 1}, async_op=True)
        for rank in range(1, world.size):
            assert mpicomm.recv(rank) == rank
    else:
        mpicomm.send(world.rank, 0)
        handle = mpicomm.all_reduce({"a": torch.ones(3), "b": 1}, async_op=True)
    assert handle.wait()["b"] == world.size


def test_many_at_once_in_one_order(world: mpicomm.World) -> None:
    """Operations with several steps between torch operations must run in the same order on all ranks."""
    handles, tensors, works = [], [], []
    for number in range(40):
        if (number + world.rank) % 3 == 0:
            time.sleep(1e-3)
        tensors.append(torch.full((5,), float(number)))
        data = {"a": torch.full((world.rank + number % 3,), number), "b": number}
        src = number % world.size
        handles.append(mpicomm.all_gather(data, async_op=True))
        works.append(dist.all_reduce(tensors[-1], async_op=True))
        handles.append(mpicomm.all_reduce(number, async_op=True))
        handles.append(mpicomm.broadcast(number if world.rank == src else None, src, async_op=True))
    results = mpicomm.wait_all(handles)
    for work in works:
        work.wait()
    for number in range(40):
        gathered, total, from_src = results[3 * number : 3 * number + 3]
        assert [each["b"] for each in gathered] == [number] * world.size
        assert [len(each["a"]) for each in gathered] == [rank + number % 3 for rank in range(world.size)]
        assert total == number * world.size
        assert from_src == number
        assert tensors[number][0] == number * world.size


@pytest.mark.mpi(min_size=2)
def test_messages_in_flight_keep_apart(world: mpicomm.World) -> None:
    """Many concurrent messages of all lengths, between the same ranks with the same tag."""
    other = world.rank ^ 1
    if other < world.size:
        pending = [mpicomm.irecv(other) for _ in range(20)]
        going = [mpicomm.isend({"n": n, "data": torch.full((10 ** (n % 6),), n)}, other) for n in range(20)]
        for n, got in enumerate(mpicomm.wait_all(pending)):
            assert got["n"] == n
            assert torch.equal(got["data"], torch.full((10 ** (n % 6),), n))
        mpicomm.wait_all(going)


@pytest.mark.mpi(min_size=2)
def test_a_large_message_arrives_without_a_waiting_thread(world: mpicomm.World) -> None:
    """The receiver is in a barrier, while the sender waits until the message is sent."""
    if world.rank == 0:
        handle = mpicomm.irecv(1)
        dist.barrier()
        assert handle.wait().sum() == 4_000_000
    else:
        if world.rank == 1:
            mpicomm.isend(torch.ones(4_000_000), 0).wait()
        dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_recv_from_the_first_sender(world: mpicomm.World) -> None:
    if world.rank == 0:
        got = [mpicomm.recv() for _ in range(1, world.size)]
        assert sorted(each["rank"] for each in got) == list(range(1, world.size))
        assert all(torch.equal(each["data"], torch.full((1000,), each["rank"])) for each in got)
    else:
        mpicomm.send({"rank": world.rank, "data": torch.full((1000,), world.rank)}, 0)


def test_done_and_as_completed(world: mpicomm.World) -> None:
    handles = [mpicomm.all_reduce(torch.full((1000,), float(n)), async_op=True) for n in range(5)]
    seen = {id(handle): handle.wait()[0].item() for handle in mpicomm.as_completed(handles)}
    assert [seen[id(handle)] for handle in handles] == [n * world.size for n in range(5)]
    assert all(handle.done() for handle in handles)


@pytest.mark.mpi(min_size=2)
def test_as_completed_yields_in_the_order_of_completion(world: mpicomm.World) -> None:
    if world.rank == 0:
        first, second = mpicomm.irecv(1, tag=1), mpicomm.irecv(1, tag=2)
        assert not first.done()
        assert not second.done()
        mpicomm.send(None, 1)
        ended = mpicomm.as_completed([first, second])
        assert next(ended) is second
        assert not first.done()
        mpicomm.send(None, 1)
        assert next(ended) is first
        assert (first.wait(), second.wait()) == (1, 2)
    elif world.rank == 1:
        for tag in (2, 1):
            mpicomm.recv(0)
            mpicomm.send(tag, 0, tag=tag)


def test_await(world: mpicomm.World) -> None:
    async def work() -> list[int]:
        first = mpicomm.all_reduce(1, async_op=True)
        second = mpicomm.all_gather(world.rank, async_op=True)
        return [await first, *await second]

    assert asyncio.run(work()) == [world.size, *range(world.size)]


@pytest.mark.mpi(min_size=2)
def test_a_timeout_leaves_a_message_on_its_way(world: mpicomm.World) -> None:
    if world.rank == 0:
        handle = mpicomm.irecv(1)
        with pytest.raises(TimeoutError, match=r"irecv from test_handles.py:\d+ .* timed out after 0.05 s"):
            handle.wait(0.05)
        dist.barrier()
        assert handle.wait(scaled(10)) == 4
    else:
        dist.barrier()
        if world.rank == 1:
            mpicomm.send(4, 0)


def test_each_handle_gets_the_rest_of_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated clock advances by 2 s during each wait, which reads it several times."""
    now, timeouts = [100.0], []

    def wait(_: object, deadline: Deadline) -> int:
        timeouts.append(deadline.count_down())
        for _ in range(4):
            now[0] += 0.5
            deadline.count_down()
        return len(timeouts)

    monkeypatch.setattr(arguments, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(mpicomm.Handle, "_wait", wait)
    ended = mpicomm.Handle(iter(()), "all_reduce", in_callbacks=False, in_order=False)  # type: ignore[arg-type]
    assert mpicomm.wait_all([ended] * 4, datetime.timedelta(seconds=5)) == [1, 2, 3, 4]
    assert timeouts == [5.0, 3.0, 1.0, -1.0]
    assert ended.done()


def test_a_handle_that_is_dropped_warns(world: mpicomm.World) -> None:
    handle = [mpicomm.all_reduce(1, async_op=True)]
    dist.barrier()  # queued after the all_reduce, which has therefore completed
    time.sleep(0.05)
    with pytest.warns(RuntimeWarning, match=r"handle of all_reduce from test_handles.py:\d+ .* was dropped"):
        handle.clear()


def test_a_handle_that_was_waited_for_does_not_warn(world: mpicomm.World, recwarn: pytest.WarningsRecorder) -> None:
    mpicomm.all_reduce(1, async_op=True).wait()
    gc.collect()
    assert not [each for each in recwarn if "was dropped" in str(each.message)]


def test_a_barrier_in_the_background_has_no_timeout(world: mpicomm.World) -> None:
    assert mpicomm.barrier(async_op=True).wait() is None
    with pytest.raises(ValueError, match="timeout must be None with async_op=True, got "):
        mpicomm.barrier(timeout=3, async_op=True)
