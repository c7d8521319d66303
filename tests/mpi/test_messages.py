"""Send and receive: tags, any source, futures, and messages of the wrong size."""

from __future__ import annotations

import datetime
import functools
import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import mpicomm
from mpicomm import mpi, torch_internals
from mpicomm.backend.execution.message_work import MessageWork
from mpicomm.backend.execution.pending_messages import REAP_ABOVE
from mpicomm.backend.transfer import dtypes, mpi_calls
from mpicomm.recorder import flight_recorder
from tests.mpi.sweep import sweep
from tests.time_limits import scaled, wait_until
from tests.worlds import Group, on_groups

pytestmark = pytest.mark.each_torch("p2p")

needs_two = pytest.mark.mpi(min_size=2)
KINDS = ("world", "parity", "staged", "debug")
BIG = 4 << 20  # floats, 16 MiB: more than any MPI sends before the receive is posted


def ring(group: Group) -> tuple[int, int]:
    """Return the next and the previous rank of a ring, which needs two ranks."""
    if group.size == 1:
        pytest.skip("a ring needs two ranks")
    return (group.rank + 1) % group.size, (group.rank - 1) % group.size


def memory(count: int, gap: int) -> torch.Tensor:
    """Return a tensor of zeros; with a gap of 2 it is not dense, and its messages take the general path."""
    return torch.zeros(gap * count)[::gap]


either_path = pytest.mark.parametrize("gap", [1, 2], ids=["plain", "general"])


def message(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the message of a rank: its values identify the rank and their order, and are exact in every dtype."""
    numbers = torch.arange(count) + 3 * rank
    return numbers % 5 < 2 if dtype == torch.bool else (numbers % 101).to(dtype)


@pytest.mark.parametrize("count", [0, 1, 1000, BIG])
@sweep([torch.bool, torch.int64, torch.bfloat16, torch.float32], few=[torch.float32], kinds=KINDS)
def test_ring(group: Group, count: int, dtype: torch.dtype) -> None:
    after, before = ring(group)
    mine, expected = (message(rank, count, dtype) for rank in (group.rank, before))
    theirs = torch.full((count,), 7.0).to(dtype)
    works = [
        dist.isend(mine, group_dst=after, group=group.handle),
        dist.irecv(theirs, group_src=before, group=group.handle),
    ]
    for work in works:
        assert work.wait()
        assert work.is_completed()
    assert torch.equal(theirs, expected)


@on_groups("world")
def test_a_receive_of_the_user_gets_no_message_of_the_group(group: Group) -> None:
    """MPI matches messages by communicator, and the user has that of the job."""
    after, before = ring(group)
    received = torch.empty(3)
    comm = mpi.job_comm()
    receive = comm.Irecv(bytearray(100), source=mpi.api().ANY_SOURCE, tag=mpi.api().ANY_TAG)
    send = dist.isend(torch.full((3,), float(group.rank)), after)
    comm.Barrier()
    is_taken = receive.Test()
    receive.Cancel()
    receive.Wait()
    assert not is_taken
    dist.recv(received, before)
    send.wait()
    assert torch.equal(received, torch.full((3,), float(before)))


@on_groups("world", "parity")
def test_any_source(group: Group) -> None:
    """Senders are global ranks, also in a group with different rank numbers."""
    if group.size == 1:
        pytest.skip("a message needs two ranks")
    if group.rank != 0:
        dist.send(torch.tensor([dist.get_rank()]), group_dst=0, group=group.handle)
        return
    senders = set()
    for _ in range(group.size - 1):
        received = torch.empty(1, dtype=torch.int64)
        sender = dist.recv(received, group=group.handle)
        assert received.item() == sender
        senders.add(sender)
    assert senders == set(group.ranks[1:])


@on_groups(*KINDS)
def test_layouts(group: Group) -> None:
    after, before = ring(group)
    mine = (torch.arange(12.0).reshape(3, 4) + group.rank).t()
    theirs = torch.zeros(4, 9)[:, ::3]
    work = dist.isend(mine, group_dst=after, group=group.handle)
    dist.recv(theirs, group_src=before, group=group.handle)
    work.wait()
    assert torch.equal(theirs, (torch.arange(12.0).reshape(3, 4) + before).t())


@on_groups("parity", "staged")
def test_batch(group: Group) -> None:
    after, before = ring(group)
    received = torch.empty(3)
    operations = [
        dist.P2POp(dist.irecv, received, group_peer=before, group=group.handle),
        dist.P2POp(dist.isend, torch.full((3,), float(group.rank)), group_peer=after, group=group.handle),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(received, torch.full((3,), float(before)))


@needs_two
def test_a_future_completes_without_a_wait(world: mpicomm.World) -> None:
    threads: list[str] = []
    if world.rank != 1:
        dist.barrier()  # a message that has already arrived calls back immediately
        if world.rank == 0:
            dist.send(torch.ones(BIG), 1)
    else:
        tensor = torch.empty(BIG)
        work = dist.irecv(tensor, 0)
        done = threading.Event()

        def note(future: torch.futures.Future) -> None:
            threads.append(threading.current_thread().name)
            assert torch.equal(future.value()[0], torch.ones(BIG))
            done.set()

        work.get_future().add_done_callback(note)
        dist.barrier()
        assert done.wait(scaled(30))
        assert work.wait()
        assert threads[0].startswith("mpicomm-poller")


@needs_two
@either_path
@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (3, "recv: expected 10 elements of .* from rank 0 .tag 4., got 3"),
        (50, r"recv of float32\[10\] failed: .*(TRUNC|truncated)"),
    ],
)
def test_a_message_of_another_size_is_an_error(world: mpicomm.World, sent: int, message: str, gap: int) -> None:
    if world.rank == 0:
        dist.send(torch.ones(sent), 1, tag=4)
    elif world.rank == 1:
        work = dist.irecv(memory(10, gap), 0, tag=4)
        with pytest.raises(RuntimeError, match=message) as caught:
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert work.exception() is caught.value


@needs_two
@either_path
def test_completed_messages_are_not_kept(world: mpicomm.World, gap: int) -> None:
    tensor = memory(1000, gap)
    kept = weakref.ref(tensor)
    if world.rank == 0:
        dist.send(tensor, 1)
    elif world.rank == 1:
        dist.recv(tensor, 0)
    del tensor
    gc.collect()
    assert kept() is None


@needs_two
@either_path
def test_messages_without_a_wait_are_freed(world: mpicomm.World, gap: int) -> None:
    messages, number, most = dist.group.WORLD._executor.messages, 20 * REAP_ABOVE, 0
    if world.rank == 0:
        for _ in range(number):
            dist.isend(memory(1, gap), 1)
    world.comm.Barrier()  # of MPI: the messages have arrived
    if world.rank == 1:
        for _ in range(number):
            dist.irecv(memory(1, gap), 0)
            most = max(most, len(messages._in_flight))
    world.comm.Barrier()
    assert most <= 2 * REAP_ABOVE


@needs_two
def test_messages_of_both_paths_are_recorded_and_numbered_alike(world: mpicomm.World) -> None:
    group = dist.new_group([0, 1])
    for number, gap in enumerate((1, 2, 1, 2), 1):
        if world.rank == 0:
            dist.send(memory(3, gap), 1, group, tag=5)
        elif world.rank == 1:
            dist.recv(memory(3, gap), 0, group, tag=5)
        if world.rank < 2:
            operation = flight_recorder.last()
            assert (operation.name, operation.peer) == (("send", 1), ("recv", 0))[world.rank]
            assert (operation.message, operation.tag, operation.count, operation.sequence) == (number, 5, 3, None)
            assert operation.is_message
            assert operation.where.endswith("(test_messages_of_both_paths_are_recorded_and_numbered_alike)")
            assert operation.end is not None
            assert operation.limit == group.timeout_seconds
            assert flight_recorder.running() == []
    if world.rank < 2:
        dist.destroy_process_group(group)


@needs_two
@either_path
def test_a_waiting_receive_is_recorded_as_running(world: mpicomm.World, gap: int) -> None:
    if world.rank == 0:
        time.sleep(0.2)
        dist.send(memory(1, gap), 1)
    elif world.rank == 1:
        work, seen = dist.irecv(memory(1, gap), 0), []
        watching = threading.Thread(
            target=lambda: wait_until(lambda: seen.extend(flight_recorder.running()) or bool(seen), "it waits")
        )
        watching.start()
        work.wait()
        watching.join()
        assert [operation.name for operation in seen] == ["recv"]


@needs_two
@either_path
def test_two_threads_wait_for_one_message(world: mpicomm.World, gap: int) -> None:
    if world.rank == 0:
        time.sleep(0.1)
        dist.send(torch.ones(3), 1)
    elif world.rank == 1:
        tensor, results = memory(3, gap), []
        work = dist.irecv(tensor, 0)
        threads = [threading.Thread(target=lambda: results.append(work.wait())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True, True]
        assert bool((tensor == 1).all())


@pytest.mark.mpi(min_size=3)
@either_path
def test_the_sender_of_a_message_is_a_rank_of_the_group(world: mpicomm.World, gap: int) -> None:
    group = dist.new_group([1, 2])
    if world.rank == 2:
        dist.send(torch.ones(1), 1, group)
    elif world.rank == 1:
        work = dist.irecv(memory(1, gap), 2, group)
        with pytest.raises(mpicomm.MpicommError, match="completed receive"):
            dist.isend(torch.ones(1), 1)._source_rank()
        dist.recv(torch.ones(1), 1)
        work.wait()
        assert work._source_rank() == 1
    if world.rank in (1, 2):
        dist.destroy_process_group(group)


@needs_two
@either_path
def test_works_of_messages_in_a_batch(world: mpicomm.World, gap: int) -> None:
    if world.rank < 2:
        received, other, group = memory(3, gap), 1 - world.rank, dist.group.WORLD
        group._start_coalescing(torch.device("cpu"))
        group.send([torch.full((3,), 1.0 + world.rank)], other, 0)
        group.recv([received], other, 0)
        group._end_coalescing(torch.device("cpu")).wait()
        assert torch.equal(received, torch.full((3,), 1.0 + other))


@needs_two
@either_path
def test_a_message_on_a_broken_or_destroyed_group(world: mpicomm.World, gap: int) -> None:
    group = dist.new_group([0, 1])
    if world.rank < 2:
        works = [dist.irecv(memory(1, gap), 1 - world.rank, group)]
        works.append(dist.isend(memory(1, gap), 1 - world.rank, group))
        for work in works:
            work.wait()
        group._executor.record.broken = "a test says so"
        for call in (dist.send, dist.recv):
            with pytest.raises(mpicomm.MpicommError, match="cannot be used any more: a test says so"):
                call(memory(1, gap), 1 - world.rank, group)
        group._executor.record.broken = ""
        dist.destroy_process_group(group)
        for call in (group.send, group.recv):
            with pytest.raises(mpicomm.MpicommError, match="was destroyed"):
                call([memory(1, gap)], 1 - world.rank, 0)


@needs_two
def test_no_memory_is_lost_by_messages(world: mpicomm.World) -> None:
    tensor, received, counts = torch.ones(4), torch.empty(4), []
    if world.rank > 1:
        return
    other = 1 - world.rank
    for _ in range(3):
        for _ in range(2 * flight_recorder.RING):
            works = [dist.irecv(received, other), dist.isend(tensor, other)]
            for work in works:
                work.wait()
        gc.collect()
        counts.append(sys.getrefcount(tensor) + sys.getrefcount(received) + sys.getrefcount(None))
    assert abs(counts[1] - counts[2]) < flight_recorder.RING


class _Uncopied:
    """A request whose message MPI completes only at its third test."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._tests = 0

    def Test(self, status: Any = None) -> bool:  # noqa: N802  mpi4py's names
        self._tests += 1
        return self._tests > 2 and self._request.Test(status)

    def Wait(self, status: Any = None) -> bool:  # noqa: N802
        return self._request.Wait(status)


@needs_two
def test_a_small_message_is_in_flight_until_mpi_has_copied_it(
    world: mpicomm.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = memory(3, gap=2).fill_(7.0 + world.rank)
    send = mpi_calls.send
    monkeypatch.setattr(mpi_calls, "send", lambda *args: _Uncopied(send(*args)))
    if world.rank == 0:
        work = dist.isend(tensor, 1)
        assert work is not None
        assert isinstance(work, MessageWork)
        work.wait()
    elif world.rank == 1:
        dist.recv(tensor, 0)
        assert torch.equal(tensor, torch.full((3,), 7.0))


@needs_two
def test_a_group_destroyed_with_a_message_on_its_way(world: mpicomm.World) -> None:
    """Destroying the group warns, and waiting raises an error; the memory is kept, because MPI may still write it.

    The next group receives its own messages; MPICH 4.0 delivered them to the receive that is still open.
    """
    group = dist.new_group([0, 1])
    if world.rank == 1:
        work = dist.irecv(torch.empty(BIG), 0, group=group)
        future = work.get_future()
        with pytest.warns(UserWarning, match="with 1 messages in flight"):
            dist.destroy_process_group(group)
        wait_until(future.done, "the future has completed")
        with pytest.raises(mpicomm.MpicommError, match="destroyed before recv of float32"):
            future.wait()
    elif world.rank == 0:
        dist.destroy_process_group(group)
    next_group = dist.new_group([0, 1])
    if world.rank == 0:
        dist.send(torch.ones(BIG), 1, group=next_group)
    elif world.rank == 1:
        received = torch.empty(BIG)
        dist.irecv(received, 0, group=next_group).wait(datetime.timedelta(seconds=scaled(30)))
        assert torch.equal(received, torch.ones(BIG))
    if world.rank < 2:
        dist.destroy_process_group(next_group)


@needs_two
def test_a_dropped_handle_loses_nothing(world: mpicomm.World) -> None:
    if world.rank == 0:
        for number in range(100):
            dist.isend(torch.full((1000,), float(number)), 1)
    elif world.rank == 1:
        for number in range(100):
            tensor = torch.empty(1000)
            dist.recv(tensor, 0)
            assert torch.equal(tensor, torch.full((1000,), float(number)))


@needs_two
@either_path
@pytest.mark.parametrize("busy", [0, 1], ids=["sender", "receiver"])
def test_a_large_message_arrives_while_its_rank_does_something_else(world: mpicomm.World, busy: int, gap: int) -> None:
    """The busy rank waits for a key of the store, which the other rank sets after the message; this works on Gloo.

    The poller of the busy rank, which does not wait for the message, sleeps before the message starts.
    """
    store = dist.distributed_c10d._get_default_store()
    started, arrived = f"a-large-message-{busy}-{gap}-started", f"a-large-message-{busy}-{gap}-arrived"
    tensor = memory(8_000_000, gap).fill_(1.0 + world.rank)
    start = [lambda: dist.isend(tensor, 1), lambda: dist.irecv(tensor, 0)]
    if world.rank == busy:
        poller = dist.group.WORLD._executor.messages._get_poller()
        assert mpi.poll(lambda: poller.is_idle, scaled(30))
        work = start[busy]()
        store.set(started, "")
        store.get(arrived)
        work.wait()
    elif world.rank == 1 - busy:
        store.get(started)
        try:
            start[world.rank]().wait(datetime.timedelta(seconds=scaled(30)))
        finally:
            store.set(arrived, "")
    if world.rank == 1:
        assert torch.equal(tensor, torch.ones(8_000_000))


@needs_two
def test_the_progress_thread_sleeps_without_messages(world: mpicomm.World) -> None:
    group = dist.new_group(list(range(world.size)))
    poller = None
    for _ in range(3):
        if world.rank < 2:
            other = 1 - world.rank
            works = [dist.irecv(torch.empty(1_000_000), other, group=group)]
            time.sleep(0.01)
            works.append(dist.isend(torch.ones(1_000_000), other, group=group))
            for work in works:
                work.wait()
            poller = group._executor.messages.poller
            assert mpi.poll(functools.partial(getattr, poller, "is_idle"), scaled(10), longest_pause=0.01)
    dist.destroy_process_group(group)
    assert poller is None or not poller._thread.is_alive()


@needs_two
def test_the_future_of_a_message_that_is_through(world: mpicomm.World) -> None:
    """It is complete immediately, even if the group and its poller no longer exist."""
    group = dist.new_group(list(range(world.size)))
    works = []
    if world.rank < 2:
        works = [dist.irecv(torch.empty(3), 1 - world.rank, group=group)]
        works.append(dist.isend(torch.ones(3), 1 - world.rank, group=group))
        works[0].get_future().wait()
        for work in works:
            work.wait()
    dist.destroy_process_group(group)
    assert all(work.get_future().done() for work in works)


class InterruptError(BaseException):
    pass


@needs_two
@either_path
def test_the_error_of_a_message_keeps_no_objects_of_the_program(world: mpicomm.World, gap: int) -> None:
    """Its traceback has the frames of the program, whose objects are freed with the work."""

    class Model:
        pass

    def step() -> weakref.ref[Model]:
        model = Model()
        with pytest.raises(RuntimeError, match="expected 5 elements"):
            dist.recv(memory(5, gap), 0)
        return weakref.ref(model)

    if world.rank == 0:
        dist.send(torch.ones(3), 1)
    elif world.rank == 1:
        model = step()
        gc.collect()
        assert model() is None


@needs_two
@either_path
def test_a_signal_handler_interrupts_the_report_of_an_error(
    world: mpicomm.World, gap: int, new_group: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the exception of the handler nor the error of the message is lost. No other thread finds the error."""

    def interrupted(_dtype: torch.dtype) -> str:
        raise InterruptError

    monkeypatch.setattr(mpi, "has_thread_multiple", lambda: False)
    group = new_group()
    work = dist.irecv(memory(5, gap), 0, group) if world.rank == 1 else None
    world.comm.Barrier()
    if world.rank == 0:
        dist.send(torch.ones(3), 1, group)
    elif work is not None:
        with monkeypatch.context() as patch:
            patch.setattr(dtypes, "short", interrupted)
            with pytest.raises(InterruptError):
                work.wait()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the same size"):
                work.wait()
    world.comm.Barrier()


@needs_two
@either_path
def test_a_signal_handler_interrupts_a_wait_while_another_thread_waits(world: mpicomm.World, gap: int) -> None:
    comm, main = world.comm, threading.main_thread()
    if world.rank == 0:
        comm.recv(source=1)
        dist.send(torch.ones(3), 1)
    elif world.rank == 1:
        work, results = dist.irecv(memory(3, gap), 0), []
        thread = threading.Thread(target=lambda: results.append(work.wait()))
        thread.start()
        wait_until(lambda: [each for each in flight_recorder.running() if each.is_message], "it waits")

        def interrupt(*_: object) -> None:
            raise InterruptError

        earlier = signal.signal(signal.SIGUSR1, interrupt)
        try:
            sender = threading.Timer(0.3, signal.pthread_kill, (main.ident, signal.SIGUSR1))
            sender.start()
            with pytest.raises(InterruptError):
                work.wait()
        finally:
            sender.join()
            signal.signal(signal.SIGUSR1, earlier)
        comm.send(None, 0)
        thread.join()
        assert results == [True]


@needs_two
def test_a_signal_handler_requests_a_future_while_another_one_is_made(
    world: mpicomm.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.rank > 1:
        return
    tensors = [memory(3, 1), memory(3, 1)]
    works = [dist.irecv(tensor, 1 - world.rank) for tensor in tensors]
    make, others = torch_internals.future_of, [works[1], works[0]]

    def handled(results: list[torch.Tensor]) -> Any:
        if others:
            others.pop().get_future()
        return make(results)

    monkeypatch.setattr(torch_internals, "future_of", handled)
    futures = [work.get_future() for work in works]
    for _ in tensors:
        dist.send(torch.ones(3), 1 - world.rank)
    for future, tensor in zip(futures, tensors, strict=True):
        assert future.wait()[0] is tensor
    assert [work.get_future() for work in works] == futures


def test_a_list_that_changes_while_its_call_is_checked(world: mpicomm.World) -> None:
    """A torch function mode, like a signal handler, runs during the checks."""
    tensors, group = [torch.full((3,), 7.0)], dist.group.WORLD

    class Clear(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), keywords: Any = None) -> Any:
            tensors.clear()
            return function(*args, **(keywords or {}))

    received = [torch.zeros(3)]
    work = group.recv(received, world.rank, 0)  # type: ignore[union-attr]
    with Clear():
        group.send(tensors, world.rank, 0).wait()  # type: ignore[union-attr]
    tensor, *_ = received
    received.clear()
    work.wait()
    assert bool((tensor == 7).all())
    assert work.result()[0] is tensor


@pytest.mark.parametrize(
    "call", [dist.all_reduce, lambda tensor: dist.group.WORLD.send([tensor], 0, 0)], ids=["all_reduce", "send"]
)
def test_a_tensor_of_a_transform(world: mpicomm.World, call: Callable[[torch.Tensor], None]) -> None:
    with pytest.raises(ValueError, match="Pass the plain tensor that it wraps"):
        torch.vmap(call)(torch.ones(2, 3))


@needs_two
@either_path
def test_messages_where_no_other_thread_may_call_mpi(
    world: mpicomm.World, gap: int, new_group: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that has arrived completes in the call, and a future is an error that leaves the work as it is."""
    with monkeypatch.context() as patch:
        patch.setattr(mpi, "has_thread_multiple", lambda: False)
        group = new_group()
        if world.rank == 0:
            dist.send(torch.ones(3), 1, group)
        world.comm.Barrier()
        if world.rank == 1:
            arrived, later = dist.irecv(memory(3, gap), 0, group), dist.irecv(memory(3, gap), 0, group)
            assert arrived._transfer.is_done
            with pytest.raises(mpicomm.MpicommError, match="MPI_THREAD_MULTIPLE"):
                later.get_future()
        world.comm.Barrier()
        if world.rank == 0:
            dist.send(torch.ones(3), 1, group)
        elif world.rank == 1:
            assert later.wait()
