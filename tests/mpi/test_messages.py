"""Send and receive: tags, any source, futures, and messages of the wrong size."""

from __future__ import annotations

import datetime
import functools
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm import mpi
from mpicomm.backend.execution.pending_messages import MessageWork
from mpicomm.backend.transfer import mpi_calls
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
@pytest.mark.parametrize("sent", [3, 50])
def test_a_message_of_another_size_is_an_error(world: mpicomm.World, sent: int) -> None:
    if world.rank == 0:
        dist.send(torch.ones(sent), 1)
    elif world.rank == 1:
        work = dist.irecv(torch.empty(10), 0)
        with pytest.raises(RuntimeError, match=r"recv") as caught:
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert work.exception() is caught.value


@needs_two
def test_completed_messages_are_not_kept(world: mpicomm.World) -> None:
    tensor = torch.ones(1000)
    memory = weakref.ref(tensor)
    if world.rank == 0:
        dist.send(tensor, 1)
    elif world.rank == 1:
        dist.recv(tensor, 0)
    del tensor
    gc.collect()
    assert memory() is None


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
    tensor = torch.full((3,), 7.0 + world.rank)
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
@pytest.mark.parametrize("busy", [0, 1], ids=["sender", "receiver"])
def test_a_large_message_arrives_while_its_rank_does_something_else(world: mpicomm.World, busy: int) -> None:
    """The busy rank waits for a key of the store, which the other rank sets after the message; this works on Gloo.

    The poller of the busy rank, which does not wait for the message, sleeps before the message starts.
    """
    store = dist.distributed_c10d._get_default_store()
    started, arrived = f"a-large-message-{busy}-started", f"a-large-message-{busy}-arrived"
    tensor = torch.full((8_000_000,), 1.0 + world.rank)
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
            poller = group._executor.messages._poller
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
