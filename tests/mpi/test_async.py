"""Asynchronous operations: calls return without blocking, operations run in order, and works have futures."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm import mpi
from mpicomm.backend.execution import worker_thread
from mpicomm.backend.execution.future_callbacks import OrderedFuture
from mpicomm.backend.execution.work import QueuedWork
from mpicomm.backend.execution.worker_thread import Worker
from mpicomm.recorder import flight_recorder
from tests import nodes
from tests.time_limits import scaled
from tests.torches import all_gather_single
from tests.worlds import Group, on_groups

pytestmark = pytest.mark.each_torch("async collectives")

BIG = 4 << 20  # floats, 16 MiB
# The worker and its queue are independent of the transport; the worker of `staged` copies tensors, and that of `debug`
# compares calls.
QUEUES = on_groups("world", "staged", "debug")


def worker_of(group: Group) -> Worker:
    return group.handle._executor._get_worker()


def hold(group: Group, call: Callable[[], object]) -> None:
    """Queue a call that is not an operation: later entries of the queue wait until it returns."""
    executor = group.handle._executor
    operation = flight_recorder.note(executor.record, "gate", None, 0, None, is_message=True, is_running=False)
    worker_of(group).submit(call, QueuedWork([], operation, executor))


class AlarmError(Exception):
    pass


def test_wait_does_not_swallow_the_exception_of_a_signal_handler(group: Group) -> None:
    def interrupt() -> None:
        has_begun.set()
        is_waiting.wait(60)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    def alarm(*_: object) -> None:
        raise AlarmError

    has_begun, is_waiting, tensor = threading.Event(), threading.Event(), torch.ones(3)
    before = signal.signal(signal.SIGUSR1, alarm)
    try:
        hold(group, interrupt)
        has_begun.wait(60)
        work = dist.all_reduce(tensor, group=group.handle, async_op=True)
        is_waiting.set()
        with pytest.raises(AlarmError):
            work.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    work.wait()
    assert torch.equal(tensor, torch.full((3,), float(group.size)))


@QUEUES
def test_an_operation_runs_although_its_caller_does_not_wait(group: Group) -> None:
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, group=group.handle, async_op=True)
    assert work is not None
    assert mpi.poll(work.is_completed, 20)
    assert torch.equal(tensor, torch.full((3,), float(group.size)))


@on_groups("world")
@pytest.mark.usefixtures("several_cores")
def test_later_operations_do_not_delay_the_first(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's thread would otherwise not run while a program starts operations at short intervals."""
    worker, delays = worker_of(group), list[int]()
    worker.wait_until_idle()
    monkeypatch.setattr(worker._timer, "set", delays.append)
    tensors = [torch.ones(2**17) for _ in range(3)]  # smaller ones may complete at once
    works = [dist.all_reduce(tensor, group=group.handle, async_op=True) for tensor in tensors]
    monkeypatch.undo()
    for work in works:
        work.wait()
    assert len(delays) == 1


@on_groups("world")
@pytest.mark.usefixtures("several_cores")
def test_a_long_operation_starts_within_its_call(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the caller does not release the GIL afterwards."""
    monkeypatch.setattr(worker_thread, "_START_SECONDS", 30)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(30)
    try:
        work = dist.all_reduce(torch.ones(BIG), group=group.handle, async_op=True)
        operation = flight_recorder.last()
    finally:
        sys.setswitchinterval(interval)
    assert operation is not None
    assert operation.start is not None
    work.wait()


@pytest.mark.mpi(min_size=2)
@QUEUES
def test_a_synchronous_operation_runs_after_the_queued_ones(group: Group) -> None:
    """The queue is blocked until it contains the synchronous operation, or the operation has completed without it."""
    tensor = torch.full((3,), 1.0 + group.rank)
    worker, has_ended = worker_of(group), threading.Event()
    # The queue then has the blocking call, the broadcast and the all_reduce.
    hold(group, lambda: mpi.poll(lambda: len(worker.jobs) == 3 or has_ended.is_set(), 30))
    dist.broadcast(tensor, group_src=group.size - 1, group=group.handle, async_op=True)
    dist.all_reduce(tensor, group=group.handle)
    has_ended.set()
    dist.barrier(group=group.handle)
    assert torch.equal(tensor, torch.full((3,), float(group.size**2)))


@pytest.mark.mpi(min_size=2)
@on_groups("world", "staged")
def test_calls_of_a_callback_run_before_later_calls_of_its_thread(group: Group) -> None:
    """On odd ranks the main thread calls its operation first; on even ranks, the callback calls its operation first."""
    first, by_callback, later = (torch.full((3,), float(value)) for value in (1, 10, 100))
    worker, gate = worker_of(group), threading.Event()
    hold(group, gate.wait)
    work = dist.all_reduce(first, group=group.handle, async_op=True)

    def call_back(_future: torch.futures.Future) -> None:
        if group.rank % 2:
            mpi.poll(lambda: len(worker.jobs) > 1, 1)  # this callback, and the later all_reduce
        dist.all_reduce(by_callback, group=group.handle)

    called_back = work.get_future().then(call_back)
    gate.set()
    work.wait()
    if group.rank % 2 == 0:
        called_back.wait()
    dist.all_reduce(later, group=group.handle)
    called_back.wait()
    assert torch.equal(by_callback, torch.full((3,), 10.0 * group.size))
    assert torch.equal(later, torch.full((3,), 100.0 * group.size))


@on_groups("world", "staged")
def test_a_waiting_thread_runs_no_callbacks(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker wakes up only after the main thread has run the operation before the callback."""
    tensors, threads = [torch.ones(3) for _ in range(2)], list[str]()
    worker, delays = worker_of(group), list[int]()
    monkeypatch.setattr(worker._timer, "set", delays.append)
    works = [dist.all_reduce(tensors[0], group=group.handle, async_op=True)]
    called_back = works[0].get_future().then(lambda _: threads.append(threading.current_thread().name))
    works.append(dist.all_reduce(tensors[1], group=group.handle, async_op=True))
    monkeypatch.undo()
    threading.Timer(0.2, lambda: worker._timer.set(min(delays))).start()
    works[1].wait()
    called_back.wait()
    assert [name.startswith("mpicomm-worker") for name in threads] == [True]
    assert all(torch.equal(tensor, torch.full((3,), float(group.size))) for tensor in tensors)


@on_groups("world")
def test_a_waiting_thread_does_not_overtake_the_worker(group: Group) -> None:
    order: list[str] = []
    worker, gate = worker_of(group), threading.Event()
    hold(group, lambda: gate.wait() and order.append("worker"))
    assert mpi.poll(lambda: worker._runner != 0, 10)
    threading.Timer(0.1, gate.set).start()
    dist.all_reduce(torch.ones(3), group=group.handle, async_op=True).wait()
    order.append("waiting thread")
    assert order == ["worker", "waiting thread"]


@on_groups("world", "debug")
def test_many_at_once(group: Group) -> None:
    tensors = [torch.full((100,), float(index + group.rank)) for index in range(200)]
    works = [dist.all_reduce(tensor, group=group.handle, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for index, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((100,), float(group.size * index + sum(range(group.size)))))


@QUEUES
def test_a_callback_may_wait_for_operations_queued_after_it(group: Group) -> None:
    tensor, other = torch.ones(4), torch.ones(3)
    first = dist.all_reduce(tensor, group=group.handle, async_op=True)
    second = dist.all_reduce(other, group=group.handle, async_op=True)
    later = first.get_future().then(lambda _future: second.wait())
    assert later.wait()
    assert torch.equal(other, torch.full((3,), float(group.size)))


@QUEUES
def test_callbacks_that_call_operations_agree_on_their_order(group: Group) -> None:
    """This includes ranks that compare their calls, with the numbers of the calls."""
    tensors = [torch.ones(1000) for _ in range(20)]
    gate = threading.Event()
    hold(group, gate.wait)

    def again(future: torch.futures.Future) -> None:
        dist.all_reduce(future.value()[0], group=group.handle)

    works = [dist.all_reduce(tensor, group=group.handle, async_op=True) for tensor in tensors]
    later = [work.get_future().then(again) for work in works]
    gate.set()
    for each in later:
        each.wait()
    for tensor in tensors:
        assert torch.equal(tensor, torch.full((1000,), float(group.size**2)))


@pytest.mark.mpi(min_size=2)
@QUEUES
@pytest.mark.parametrize("late", ["even", "odd"])
def test_a_callback_runs_where_it_was_added(group: Group, late: str) -> None:
    """On some ranks the operations have completed before the callback is added; on the others they have not started."""
    first, second, by_callback, last = (torch.full((3,), float(value)) for value in (1, 10, 100, 1000))
    threads: list[str] = []
    gate = threading.Event()
    hold(group, gate.wait)
    works = [dist.all_reduce(each, group=group.handle, async_op=True) for each in (first, second)]
    has_to_wait = (group.rank % 2 == 0) == (late == "odd")

    def call_back(_future: torch.futures.Future) -> None:
        threads.append(threading.current_thread().name)
        dist.all_reduce(by_callback, group=group.handle)

    if not has_to_wait:
        gate.set()
        mpi.poll(works[1].is_completed, 0.2)  # false until the other ranks set their gates
    called_back = works[0].get_future().then(call_back)
    gate.set()
    dist.all_reduce(last, group=group.handle)
    called_back.wait()
    for tensor, value in ((first, 1), (second, 10), (by_callback, 100), (last, 1000)):
        assert torch.equal(tensor, torch.full((3,), float(value * group.size)))
    assert [name.startswith("mpicomm-worker") for name in threads] == [True]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("is_async", [False, True])
def test_callbacks_on_other_groups_run_before_later_calls(world: mpicomm.World, is_async: bool) -> None:
    """The callback of one group calls operations of other groups; the program calls one later, delayed on rank 0."""
    groups = [dist.new_group() for _ in range(3)]
    tensors = [torch.full((4,), 10.0**power * (1 + world.rank)) for power in range(5)]
    first, second, third, fourth, fifth = tensors

    def call_back(_future: torch.futures.Future) -> None:
        dist.all_reduce(third, group=groups[1])
        dist.all_reduce(fourth, group=groups[2], async_op=True).wait()

    work = dist.all_reduce(first, group=groups[0], async_op=True)
    dist.all_reduce(second, group=groups[1], async_op=True)
    called_back = work.get_future().then(call_back)
    time.sleep(0.3 * (world.rank == 0))
    last = dist.all_reduce(fifth, group=groups[2], async_op=is_async)
    if last is not None:
        last.wait()
    called_back.wait()
    total = world.size * (world.size + 1) / 2
    assert [each[0].item() for each in tensors] == [total * 10**power for power in range(5)]
    for each in groups:
        dist.destroy_process_group(each)


def test_callbacks_of_two_groups_run_in_the_order_in_which_they_were_added(world: mpicomm.World) -> None:
    groups = [dist.new_group() for _ in range(2)]
    ran: list[int] = []
    futures = []
    for index in range(20):
        work = dist.all_reduce(torch.ones(1 + 1000 * (index % 3)), group=groups[index % 2], async_op=True)
        futures.append(work.get_future().then(lambda _, index=index: ran.append(index)))
    for each in reversed(futures):
        each.wait()
    assert ran == list(range(20))
    for each in groups:
        dist.destroy_process_group(each)


@pytest.mark.mpi(min_size=2)
def test_threads_do_not_wait_for_each_others_callbacks(world: mpicomm.World) -> None:
    """Odd ranks start the threads in a different order; each thread has its own group."""
    groups = [dist.new_group() for _ in range(2)]
    tensors = [torch.full((3,), 10.0**power) for power in range(4)]

    def work(index: int) -> None:
        first, by_callback = tensors[index::2]
        future = dist.all_reduce(first, group=groups[index], async_op=True).get_future()
        future.then(lambda _: dist.all_reduce(by_callback, group=groups[index])).wait()

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(2)]
    for index in (1, 0) if world.rank % 2 else (0, 1):
        threads[index].start()
        time.sleep(0.2)
    assert mpi.poll(lambda: not any(each.is_alive() for each in threads), scaled(20))
    assert [each[0].item() for each in tensors] == [world.size * 10**power for power in range(4)]
    for each in groups:
        dist.destroy_process_group(each)


def test_a_callback_of_several_works_has_a_place_too(world: mpicomm.World) -> None:
    with dist._coalescing_manager(async_ops=True) as joint:
        tensors = [torch.full((3,), float(value)) for value in (1, 10)]
        for each in tensors:
            dist.all_reduce(each)
    by_callback = torch.full((3,), 100.0)
    if world.rank == 0:
        time.sleep(0.1)
    called_back = dist.all_reduce(tensors[0], async_op=True).get_future().then(lambda _: dist.all_reduce(by_callback))
    joint.wait()
    called_back.wait()
    assert torch.equal(by_callback, torch.full((3,), 100.0 * world.size))


def test_an_error_in_a_callback_is_raised_by_its_future(world: mpicomm.World, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_future: torch.futures.Future) -> None:
        raise KeyError("no such key")

    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    future.add_done_callback(fail)
    failed = future.then(fail)
    with pytest.raises(KeyError, match="no such key"):
        failed.wait()
    with pytest.raises(KeyError):
        failed.then(lambda done: done.value()).wait()
    assert caplog.text.count("a callback of an asynchronous operation failed") == 1
    dist.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_callback_of_a_message_calls_no_collective(world: mpicomm.World) -> None:
    if world.rank == 0:
        dist.barrier()
        dist.send(torch.ones(BIG), 1)
    elif world.rank == 1:
        work = dist.irecv(torch.empty(BIG), 0)
        called_back = work.get_future().then(lambda _: dist.all_reduce(torch.ones(1)))
        dist.barrier()
        with pytest.raises(RuntimeError, match=r"a callback of a message .* called a collective"):
            called_back.wait()
    else:
        dist.barrier()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_groups("world", "mpi", "staged", "debug", *nodes.KINDS)
def test_inference_tensors(group: Group, dtype: torch.dtype) -> None:
    """They may be written only in inference mode, which is not active on the worker thread."""
    with torch.inference_mode():
        dense = torch.full((3,), 1.0 + group.rank, dtype=dtype)
        strided = torch.full((3, 2), 1.0 + group.rank, dtype=dtype)[:, 0]
        gathered, parts = (
            torch.empty(3 * group.size, dtype=dtype),
            [torch.empty(3, dtype=dtype) for _ in range(group.size)],
        )
        works = [all_gather_single(gathered, dense, group=group.handle, async_op=True)]
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


@pytest.mark.mpi(min_size=2)
@on_groups("world", "staged")
def test_the_lists_of_a_queued_operation_may_change_before_it_runs(group: Group) -> None:
    outputs = [torch.zeros(3) for _ in range(group.size)] if group.rank == 0 else []
    given, gate = list(outputs), threading.Event()
    hold(group, gate.wait)
    tensor = torch.full((3,), 1.0 + group.rank)
    work = dist.gather(tensor, given or None, group_dst=0, group=group.handle, async_op=True)
    given.clear()
    gate.set()
    assert work is not None
    work.wait()
    assert all(torch.equal(each, torch.full((3,), 1.0 + rank)) for rank, each in enumerate(outputs))


@on_groups("world")
def test_a_completed_work_has_the_value_of_its_future(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = QueuedWork._complete

    def slowly(work: QueuedWork, future: OrderedFuture) -> None:
        time.sleep(0.05)
        complete(work, future)

    monkeypatch.setattr(QueuedWork, "_complete", slowly)
    for waits in (True, False, True, False):
        work = dist.all_reduce(torch.ones(3), group=group.handle, async_op=True)
        assert work is not None
        future = work.get_future()
        if waits:
            work.wait()
        else:
            while not work.is_completed():
                time.sleep(0.001)
        assert torch.equal(future.value()[0], torch.full((3,), float(group.size)))


@on_groups("world", "staged")
def test_the_factor_of_a_queued_sum_may_change_before_it_runs(group: Group) -> None:
    factor, gate = torch.tensor(2.0), threading.Event()
    hold(group, gate.wait)
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor), group=group.handle, async_op=True)
    factor.fill_(100.0)
    gate.set()
    assert work is not None
    work.wait()
    assert torch.equal(tensor, torch.full((3,), 2.0 * group.size))


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("other_thread", ["worker", "waiting"])
def test_denormals_do_not_depend_on_the_thread_that_runs_the_operation(other_thread: str, flushes: bool) -> None:
    dist.all_reduce(torch.ones(1), async_op=True).wait()  # the worker exists, with the setting of this moment
    tensor = torch.tensor([0x000A0000], dtype=torch.int32).view(torch.float32).repeat(2000)
    try:
        if not torch.set_flush_denormal(flushes):
            pytest.skip("the processor always computes with denormals")
        work = dist.all_reduce(tensor, async_op=True)
        torch.set_flush_denormal(not flushes)
        if other_thread == "worker":
            mpi.poll(work.is_completed, 60)
        work.wait()
        seen = tensor[:1].view(torch.int32).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert seen is flushes
