"""Small asynchronous calls, which begin in the call: errors, signal handlers and changed arguments before their end."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm import mpi, torch_internals
from mpicomm.backend import plain_calls
from mpicomm.backend.execution.executor import Executor
from mpicomm.backend.execution.work import CompletedWork
from mpicomm.backend.execution.worker_thread import WakeTimer, Worker
from mpicomm.recorder import flight_recorder

pytestmark = [
    pytest.mark.usefixtures("several_cores"),
    pytest.mark.each_mpi,
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(plain_calls.PlainCalls is None, reason="the extension module was not built"),
]

QUEUED = 2**17  # elements from which on asynchronous calls do not begin in the call if there are several cores
FAILED = r"changed before it completed|cannot be used any more"
NEVER = 2**64 - 1
LARGE = 2**20  # elements of a block that needs several steps


class InterruptError(Exception):
    pass


@pytest.fixture
def group(world: mpicomm.World, new_group: Callable[..., Any]) -> Iterator[Any]:
    """A group that has opened its shared memory; the test may break it."""
    handle = new_group()
    dist.all_reduce(torch.ones(1), group=handle)
    world.comm.Barrier()
    return handle


def late(world: mpicomm.World) -> None:
    """Let the calls of the other ranks continue in their queues, since rank 1 is late."""
    if world.rank == 1:
        time.sleep(0.2)


def sum_of_ranks(world: mpicomm.World, factor: float = 1.0) -> float:
    return factor * world.size * (world.size + 1) / 2


def test_an_exception_of_a_signal_handler_after_a_call_has_begun(
    world: mpicomm.World, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call completes nevertheless: the other ranks have its contribution."""
    first, second, wake, is_interrupted = torch.full((4,), 1.0 + world.rank), torch.ones(4), Worker.wake_for, []

    def interrupted(worker: Worker, job: Any) -> None:
        if not is_interrupted:
            is_interrupted.append(True)
            raise InterruptError
        wake(worker, job)

    monkeypatch.setattr(Worker, "wake_for", interrupted)
    late(world)
    try:
        dist.all_reduce(first, group=group, async_op=True)
    except InterruptError:
        assert world.rank != 1
        assert not group._executor.record.broken
    assert mpi.poll(lambda: bool((first == sum_of_ranks(world)).all()), 10)
    dist.all_reduce(second, group=group)
    assert bool((second == world.size).all())


def test_a_signal_handler_calls_an_operation_while_a_call_continues(
    world: mpicomm.World, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, inner, wake, calls = torch.full((4,), 1.0 + world.rank), torch.ones(3), Worker.wake_for, []

    def handled(worker: Worker, job: Any) -> None:
        wake(worker, job)
        if not calls:
            calls.append(dist.all_reduce(inner, dist.ReduceOp.MAX, group=group))

    monkeypatch.setattr(Worker, "wake_for", handled)
    late(world)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if not calls:
        dist.all_reduce(inner, dist.ReduceOp.MAX, group=group)
    work.wait()  # type: ignore[union-attr]
    assert bool((tensor == sum_of_ranks(world)).all())
    assert bool((inner == 1).all())


def test_an_error_before_a_call_begins_leaves_the_ranks_in_step(
    world: mpicomm.World, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first asynchronous call of a group starts its thread, with a file descriptor."""
    tensor = torch.full((4,), 1.0 + world.rank)

    def fail(_timer: WakeTimer) -> None:
        raise OSError("too many open files")

    if world.rank == 0:
        with monkeypatch.context() as patch:
            patch.setattr(WakeTimer, "__init__", fail)
            with pytest.raises(OSError, match="too many open files"):
                dist.all_reduce(torch.full((4,), 100.0), group=group, async_op=True)
    dist.all_reduce(tensor, group=group, async_op=True).wait()  # type: ignore[union-attr]
    assert bool((tensor == sum_of_ranks(world)).all())
    assert group._get_sequence_number_for_group() == 2


def halve(tensor: torch.Tensor) -> None:
    tensor.set_(tensor[: tensor.numel() // 2].clone())


def widen(tensor: torch.Tensor) -> None:
    tensor.data = tensor.to(torch.float64)


@pytest.mark.parametrize("count", [64, QUEUED])
@pytest.mark.parametrize("change", [halve, widen])
def test_a_tensor_with_other_elements_when_its_call_continues(
    world: mpicomm.World, group: Any, no_worker: None, count: int, change: Callable[[torch.Tensor], None]
) -> None:
    """Nothing is written over the memory beside it. The other ranks get the sum, or an error."""
    tensor, first, works = torch.ones(count), torch.ones(count), []
    late(world)
    if world.rank:
        with contextlib.suppress(RuntimeError, ValueError):
            for each in [first, tensor] if count == QUEUED else [tensor]:
                dist.all_reduce(each, group=group)
    else:
        if count == QUEUED:
            works.append(dist.all_reduce(first, group=group, async_op=True))
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
        change(tensor)
        expected = tensor.clone()
        for work in works[:-1]:
            work.wait()  # type: ignore[union-attr]
        with pytest.raises((RuntimeError, ValueError), match=FAILED):
            works[-1].wait()  # type: ignore[union-attr]
        assert torch.equal(tensor, expected)
    world.comm.Barrier()


def test_the_group_is_destroyed_during_an_asynchronous_call(
    world: mpicomm.World, new_group: Callable[..., Any], set_cores: Callable[[float], None]
) -> None:
    """Of rank 0, by another thread; the other ranks call late."""
    set_cores(1)
    group, errors = new_group(), list[str]()
    dist.all_reduce(torch.ones(1), group=group)
    dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()  # type: ignore[union-attr]
    group._executor.algorithms.slots._state.soon_ns = 10**9

    def call() -> None:
        try:
            dist.all_reduce(torch.ones(4), group=group, async_op=True).wait()  # type: ignore[union-attr]
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))

    if world.rank == 0:
        thread = threading.Thread(target=call)
        thread.start()
        assert mpi.poll(lambda: bool(flight_recorder.running()), 30)
        group._plain.close()  # what destroy_process_group() does first
        thread.join(30)
        assert errors
    world.comm.Barrier()


def test_options_that_are_changed_before_the_call_continues(world: mpicomm.World, group: Any, no_worker: None) -> None:
    opts, tensor = torch_internals.GatherOptions(), torch.full((4,), 1.0 + world.rank)
    received = [[torch.zeros(4) for _ in range(world.size)]] if world.rank == 0 else []
    opts.rootRank = 0
    late(world)
    if world.rank:
        with contextlib.suppress(RuntimeError, ValueError):
            group.gather(received, [tensor], opts).wait()
    else:
        work = group.gather(received, [tensor], opts)
        opts.rootRank = 1
        with pytest.raises(RuntimeError, match=FAILED):
            work.wait()
    world.comm.Barrier()


@pytest.mark.parametrize("cores", [1.0, 2.0])
def test_a_large_call_begins_in_the_call_if_its_rank_has_one_core(
    world: mpicomm.World,
    new_group: Callable[..., Any],
    set_cores: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    cores: float,
) -> None:
    set_cores(cores)
    tensor, group = torch.full((QUEUED,), 1.0 + world.rank), new_group()
    dist.all_reduce(torch.ones(1), group=group)
    state = group._executor.algorithms.slots._state
    monkeypatch.setattr(WakeTimer, "set", lambda *_: None)  # the worker's thread begins nothing
    before = state.number
    work = dist.all_reduce(tensor, group=group, async_op=True)
    has_begun = state.number != before
    monkeypatch.undo()
    work.wait()  # type: ignore[union-attr]
    assert has_begun is (cores < 2)
    assert bool((tensor == sum_of_ranks(world)).all())


@pytest.mark.parametrize("count", [4, QUEUED])
def test_a_call_does_not_wait_for_late_ranks(world: mpicomm.World, group: Any, count: int) -> None:
    """Rank 1 calls after the call of rank 0 has returned."""
    tensor, native = torch.full((count,), 1.0 + world.rank), group._executor.algorithms.slots
    native._state.pause_ns = 10**11
    if world.rank == 1:
        assert mpi.poll(lambda: world.comm.Iprobe(0, 5), 20)
        world.comm.recv(source=0, tag=5)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    native._state.pause_ns = 10**6
    if world.rank == 0:
        world.comm.send(None, 1, 5)
    work.wait()  # type: ignore[union-attr]
    assert bool((tensor == sum_of_ranks(world)).all())


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("waits", [False, True])
def test_a_small_call_continues_with_the_large_blocks_of_other_ranks(
    world: mpicomm.World, group: Any, waits: bool
) -> None:
    counts = [4, 4, *[LARGE] * (world.size - 2)]
    received = [torch.zeros(count) for count in counts] if world.rank == 0 else None
    late(world)
    work = dist.gather(torch.full((counts[world.rank],), 1.0 + world.rank), received, 0, group=group, async_op=True)
    if waits or world.rank != 1:
        work.wait()
    else:
        dist.destroy_process_group(group)  # the worker completes the call
    for rank, block in enumerate(received or []):
        assert bool((block == 1.0 + rank).all())
    world.comm.Barrier()


@pytest.mark.parametrize("is_by_mpi", [False, True])
def test_the_group_is_destroyed_while_a_call_is_queued(
    world: mpicomm.World, group: Any, is_by_mpi: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_by_mpi:
        group._plain.use([(NEVER, NEVER)] * 8)
    errors: list[Exception] = []
    is_inside, may_continue, submit = threading.Event(), threading.Event(), Executor._submit

    def slow(executor: Executor, *arguments: Any) -> Any:
        is_inside.set()
        may_continue.wait(30)
        return submit(executor, *arguments)

    def call() -> None:
        try:
            dist.all_reduce(torch.ones(QUEUED), group=group, async_op=True).wait()  # type: ignore[union-attr]
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    if world.rank == 0:
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "_submit", slow)
            thread.start()
            is_inside.wait(30)
    dist.destroy_process_group(group)
    may_continue.set()
    if world.rank == 0:
        thread.join(30)
        assert "the group was destroyed before the operation" in str(errors[0])
    world.comm.Barrier()


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("late_rank", [0, 1])
def test_works_do_not_depend_on_when_a_call_has_completed(world: mpicomm.World, group: Any, late_rank: int) -> None:
    """Of two ranks the later one completes the calls at once, and the other one later."""
    if world.rank == late_rank:
        time.sleep(0.2)
    received = [torch.zeros(2) for _ in range(world.size)]
    listed = list(received)
    work = dist.all_gather(listed, torch.full((2,), 1.0 + world.rank), group=group, async_op=True)
    assert world.rank != late_rank or world.size > 2 or isinstance(work, CompletedWork)
    listed.clear()
    work.wait()  # type: ignore[union-attr]
    assert [id(tensor) for tensor in work.result()] == [id(tensor) for tensor in received]  # type: ignore[union-attr]
    world.comm.Barrier()
    # a batch
    if world.rank == late_rank:
        time.sleep(0.2)
    group._start_coalescing(torch.device("cpu"))
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=group, async_op=True)
    joint = group._end_coalescing(torch.device("cpu"))
    joint.wait()
    assert len(joint.result()) == 3
    world.comm.Barrier()
    # a dropped result
    if world.rank == late_rank:
        time.sleep(0.2)
    output = torch.zeros(64 * world.size)
    memory = weakref.ref(output)
    dist.all_gather_into_tensor(output, torch.ones(64), group=group, async_op=True).wait()  # type: ignore[union-attr]
    del output
    gc.collect()
    dist.all_reduce(torch.ones(65), group=group)
    assert memory() is None
