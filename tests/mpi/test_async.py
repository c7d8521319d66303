"""Asynchronous operations: never blocking in the call, in order, with real futures."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.backend.work import QueuedWork
from mpicomm.faults import recorder
from tests.worlds import Group

BIG = 4 << 20  # floats, 16 MiB


@pytest.mark.mpi(min_size=2)
def test_a_started_all_reduce_does_not_block_the_messages_it_waits_for(world: mpicomm.World) -> None:
    """Rank 0 starts an all_reduce, receives, then waits; rank 1 sends 16 MiB, then joins: legal on Gloo."""
    total, message = torch.ones(3), torch.empty(BIG)
    if world.rank == 0:
        work = dist.all_reduce(total, async_op=True)
        dist.recv(message, 1)
        work.wait()
        assert torch.equal(message, torch.full((BIG,), 2.0))
    else:
        if world.rank == 1:
            dist.send(torch.full((BIG,), 2.0), 0)
        dist.all_reduce(total)
    assert torch.equal(total, torch.full((3,), float(world.size)))


@pytest.mark.mpi(min_size=2)
def test_the_call_returns_before_the_others_come(world: mpicomm.World) -> None:
    tensor = torch.ones(1)
    if world.rank == 0:
        started = time.monotonic()
        work = dist.all_reduce(tensor, async_op=True)
        assert time.monotonic() - started < 10
        assert not work.is_completed()
        dist.send(torch.zeros(1), 1)  # lets rank 1 go on, and with it the all_reduce
        work.wait()
    else:
        if world.rank == 1:
            dist.recv(torch.empty(1), 0)
        dist.all_reduce(tensor)
    assert tensor.item() == world.size


def test_operations_keep_their_order(group: Group) -> None:
    """Each step depends on the one before, whether it is asynchronous or not."""
    tensor = torch.ones(1, dtype=torch.float64)
    works = [dist.all_reduce(tensor, group=group.handle, async_op=step % 3 != 0) for step in range(20)]
    for work in works:
        if work is not None:
            work.wait()
    assert tensor.item() == float(group.size) ** 20


def test_many_at_once(group: Group) -> None:
    tensors = [torch.full((100,), float(index + group.rank)) for index in range(200)]
    works = [dist.all_reduce(tensor, group=group.handle, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for index, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((100,), float(group.size * index + sum(range(group.size)))))


def test_the_future_holds_the_tensors_and_calls_back_elsewhere(group: Group) -> None:
    tensor = torch.full((4,), 1.0)
    threads: list[threading.Thread] = []
    gate = torch.futures.Future()
    work = dist.all_reduce(tensor, group=group.handle, async_op=True)

    def note(future: torch.futures.Future) -> torch.Tensor:
        threads.append(threading.current_thread())
        return future.value()[0] * 2

    doubled = work.get_future().then(note)
    assert torch.equal(doubled.wait(), torch.full((4,), 2.0 * group.size))
    assert torch.equal(work.get_future().value()[0], tensor)
    assert threads
    gate.set_result(None)


def test_a_callback_may_start_the_next_operation(group: Group) -> None:
    tensor = torch.ones(4)

    def again(future: torch.futures.Future) -> torch.Tensor:
        result = future.value()[0]
        dist.all_reduce(result, group=group.handle)  # synchronous, on the worker's own thread
        return result

    work = dist.all_reduce(tensor, group=group.handle, async_op=True)
    assert torch.equal(work.get_future().then(again).wait(), torch.full((4,), float(group.size) ** 2))


def test_a_callback_may_queue_an_operation_and_wait_for_it(group: Group) -> None:
    """As PowerSGD does; on the worker's own thread the operation would wait behind its own callback."""
    tensor, other = torch.ones(4), torch.ones(3)

    def again(_future: torch.futures.Future) -> torch.Tensor:
        dist.all_reduce(other, group=group.handle, async_op=True).wait()
        return other

    work = dist.all_reduce(tensor, group=group.handle, async_op=True)
    assert torch.equal(work.get_future().then(again).wait(), torch.full((3,), float(group.size)))


def test_a_callback_may_wait_for_what_is_queued_behind_it(group: Group) -> None:
    tensor, other = torch.ones(4), torch.ones(3)
    first = dist.all_reduce(tensor, group=group.handle, async_op=True)
    second = dist.all_reduce(other, group=group.handle, async_op=True)
    later = first.get_future().then(lambda _future: second.wait())
    assert later.wait()
    assert torch.equal(other, torch.full((3,), float(group.size)))


def test_callbacks_that_call_operations_agree_on_their_order(group: Group) -> None:
    """Where the ranks compare their calls, by number, too: a callback's comes when it comes.

    All callbacks are there before the first operation ends: one that comes later runs at once, where it was added.
    """
    tensors = [torch.ones(1000) for _ in range(20)]
    gate = threading.Event()
    engine = group.handle._engine
    closed = recorder.note(engine.record, "gate", None, 0, None, is_message=True, is_running=False, depth=1)
    engine.executor._get_worker().submit(gate.wait, QueuedWork([], closed, engine.executor))

    def again(future: torch.futures.Future) -> None:
        dist.all_reduce(future.value()[0], group=group.handle)

    works = [dist.all_reduce(tensor, group=group.handle, async_op=True) for tensor in tensors]
    later = [work.get_future().then(again) for work in works]
    gate.set()
    for each in later:
        each.wait()
    for tensor in tensors:
        assert torch.equal(tensor, torch.full((1000,), float(group.size**2)))


def test_several_groups_at_once(groups: dict[str, Group]) -> None:
    kinds = list(groups.values())
    tensors = [torch.full((1000,), float(1 + group.rank)) for group in kinds]
    works = [
        dist.all_reduce(tensor, group=group.handle, async_op=True) for group, tensor in zip(kinds, tensors, strict=True)
    ]
    for work in works:
        work.wait()
    for group, tensor in zip(kinds, tensors, strict=True):
        assert torch.equal(tensor, torch.full((1000,), group.size * (group.size + 1) / 2))


def test_a_dropped_handle_still_completes(group: Group) -> None:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, group=group.handle, async_op=True)
    dist.barrier(group=group.handle)
    assert torch.equal(tensor, torch.full((1000,), float(group.size)))


def test_asynchronous_barrier(group: Group) -> None:
    work = dist.barrier(group=group.handle, async_op=True)
    assert work.wait()
    assert work.is_success()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inference_tensors(group: Group, dtype: torch.dtype) -> None:
    """They may be written in inference mode alone, in which the worker is not."""
    with torch.inference_mode():
        dense = torch.full((3,), 1.0 + group.rank, dtype=dtype)
        strided = torch.full((3, 2), 1.0 + group.rank, dtype=dtype)[:, 0]
        gathered, parts = (
            torch.empty(3 * group.size, dtype=dtype),
            [torch.empty(3, dtype=dtype) for _ in range(group.size)],
        )
        works = [dist.all_gather_single(gathered, dense, group=group.handle, async_op=True)]
        works.append(dist.all_gather(parts, dense, group=group.handle, async_op=True))
        works += [
            dist.all_reduce(each, dist.ReduceOp.AVG, group=group.handle, async_op=True) for each in (dense, strided)
        ]
    for work in works:
        work.wait()
    expected = torch.arange(1, group.size + 1).repeat_interleave(3).to(dtype)
    assert torch.equal(gathered, expected)
    assert torch.equal(torch.cat(parts), expected)
    for each in (dense, strided):
        assert torch.equal(each, torch.full((3,), (group.size + 1) / 2).to(dtype))
