"""Plain calls of the extension module: same results as the general path, also where ranks mix the paths."""

from __future__ import annotations

import gc
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm import mpi, torch_internals
from mpicomm.backend import plain_calls
from mpicomm.backend.execution.work import EarlyWork
from mpicomm.backend.transfer import mpi_calls
from mpicomm.backend.transfer.algorithms import Algorithm
from mpicomm.recorder import flight_recorder

pytestmark = [
    pytest.mark.each_mpi,
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(plain_calls.PlainCalls is None, reason="the extension module was not built"),
]

COUNT = 6
QUEUED = 2**17  # elements from which on asynchronous calls do not begin in the call if there are several cores
NEVER = 2**64 - 1
NEVER_PLAIN_BY_MPI = ("all_reduce MIN", "all_reduce MAX", "all_gather", "gather", "scatter")
REDUCTIONS = {f"all_reduce {op}": getattr(dist.ReduceOp, op) for op in ("SUM", "AVG", "MIN", "MAX")}
OPERATIONS = [
    *REDUCTIONS, "reduce", "broadcast", "all_gather_single", "all_gather_single in place", "all_gather", "gather",
    "scatter", "reduce_scatter_single", "all_to_all_single",
]  # fmt: skip


class Subclass(torch.Tensor):
    pass


def tensors_after(name: str, dtype: torch.dtype, *, is_strided: bool) -> list[torch.Tensor]:
    """Run an operation and return all its tensors; those that are not dense take the general path."""
    rank, size, gap = dist.get_rank(), dist.get_world_size(), 2 if is_strided else 1

    def numbers(count: int, first: int) -> torch.Tensor:
        values = torch.arange(count) % 7 + first + rank
        return torch.zeros(gap * count, dtype=dtype)[::gap].copy_(values)

    root, mine, blocks, received = size - 1, numbers(COUNT, 1), numbers(size * COUNT, 2), numbers(size * COUNT, 3)
    of_ranks = [numbers(COUNT, 10 * other) for other in range(size)]
    at_root = of_ranks if rank == root else None
    calls: dict[str, Callable[[], object]] = {
        "reduce": lambda: dist.reduce(mine, root),
        "broadcast": lambda: dist.broadcast(mine, root),
        "all_gather_single": lambda: dist.all_gather_into_tensor(received, mine),
        "all_gather_single in place": lambda: dist.all_gather_into_tensor(blocks, blocks[rank * COUNT :][:COUNT]),
        "all_gather": lambda: dist.all_gather(of_ranks, mine),
        "gather": lambda: dist.gather(mine, at_root, root),
        "scatter": lambda: dist.scatter(mine, at_root, root),
        "reduce_scatter_single": lambda: dist.reduce_scatter_tensor(mine, blocks),
        "all_to_all_single": lambda: dist.all_to_all_single(received, blocks),
    }
    if name in REDUCTIONS:
        dist.all_reduce(mine, REDUCTIONS[name])
    else:
        calls[name]()
    return [mine, blocks, received, *of_ranks]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("slow_ranks", "is_by_mpi"),
    [((), False), ((), True), ((0,), False), ((1,), False)],
    ids=["fast", "fast by MPI", "rank 0 general", "rank 1 general"],
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_do_not_depend_on_the_path(
    world: mpicomm.World,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    slow_ranks: tuple[int, ...],
    is_by_mpi: bool,
    dtype: torch.dtype,
) -> None:
    expected = tensors_after(name, dtype, is_strided=True)
    executor, prepared = dist.group.WORLD._executor, []  # type: ignore[union-attr]
    if is_by_mpi:
        monkeypatch.setattr(executor.algorithms, "select", lambda *_: Algorithm.MPI)
        executor.algorithms.plain.use([(NEVER, NEVER)] * 8)
    submit = executor.submit
    monkeypatch.setattr(executor, "submit", lambda *args: prepared.append(args[0]) or submit(*args))
    is_general = world.rank in slow_ranks
    try:
        for _ in range(3):
            torch.testing.assert_close(tensors_after(name, dtype, is_strided=is_general), expected, rtol=0, atol=0)
    finally:
        executor.algorithms.publish_to(executor.algorithms.plain)
    needs_conversion = is_by_mpi and ("AVG" in name or (dtype is torch.bfloat16 and "reduce" in name))
    is_general = is_general or needs_conversion or (is_by_mpi and name in NEVER_PLAIN_BY_MPI)
    assert len(prepared) == (3 if is_general else 0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_integers_are_compared_with_their_sign(world: mpicomm.World, dtype: torch.dtype) -> None:
    of_ranks = [torch.arange(3000).add(100 * rank).to(dtype) for rank in range(world.size)]
    for op, expected in ((dist.ReduceOp.MIN, torch.amin), (dist.ReduceOp.MAX, torch.amax)):
        tensor = of_ranks[world.rank].clone()
        dist.all_reduce(tensor, op)
        assert torch.equal(tensor, expected(torch.stack(of_ranks), 0))


@pytest.mark.usefixtures("several_cores")
def test_the_inputs_of_a_queued_call_stay_alive() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    source, output = torch.full((QUEUED * size,), 1.0 + rank), torch.empty(QUEUED)
    alive = weakref.ref(source)
    work = dist.reduce_scatter_tensor(output, source, async_op=True)
    del source
    assert alive() is not None
    work.wait()  # type: ignore[union-attr]
    assert bool((output == size * (size + 1) / 2).all())
    del work
    collected = alive()
    assert collected is None


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_each_call_is_recorded_with_its_own_line() -> None:
    """The distance of the program's frame differs between these calls of one operation."""
    tensor, received = torch.ones(1), torch.empty(dist.get_world_size())

    def nested() -> None:
        dist.all_gather_into_tensor(received, tensor)

    def direct() -> None:
        dist.group.WORLD.all_gather_single(received, tensor, torch_internals.AllgatherOptions())  # type: ignore[union-attr]

    for call in (nested, direct, nested, direct, direct, nested):
        call()
        operation = flight_recorder.last()
        assert operation is not None
        first = call.__code__.co_firstlineno
        assert operation.where == f"test_plain_calls.py:{first + 1} ({call.__name__})"
        assert (operation.name, operation.count, operation.peer) == ("all_gather", 1, None)
    exec(compile("dist.all_gather_into_tensor(received, tensor)", "other.py", "exec"), locals() | {"dist": dist})
    assert flight_recorder.last().where == "other.py:1"  # type: ignore[union-attr]


def test_numbers_of_calls_are_those_of_the_group() -> None:
    handle = dist.new_group()
    for count in range(1, 4):
        dist.all_reduce(torch.ones(1), group=handle)
        operation = flight_recorder.last()
        assert operation is not None
        assert operation.sequence == count == handle._get_sequence_number_for_group()
        assert operation.end is not None
        assert flight_recorder.running() == []
    dist.destroy_process_group(handle)


def test_arguments_that_do_not_qualify_are_left_to_the_general_path() -> None:
    plain, opts = dist.group.WORLD._plain, torch_internals.AllreduceOptions()  # type: ignore[union-attr]
    tensor = torch.ones(2)
    work = plain.allreduce([tensor], opts)
    assert work is not None
    work.wait()
    for arguments in (
        (), ([tensor],), ([tensor], None), ([tensor], opts, 1), (tensor, opts), ((tensor,), opts), ([], opts),
        ([tensor, tensor], opts), ([None], opts), ([1.0], opts), ([tensor], torch_internals.BroadcastOptions()),
        ([torch.ones(2, device="meta")], opts), ([torch.ones(0)], opts), ([torch.ones(2, dtype=torch.complex64)], opts),
        ([torch.ones(2).to_sparse()], opts), ([torch.ones(4)[::2]], opts),
        ([torch.ones(1, dtype=torch.complex64).conj().imag], opts), ([torch.ones(2).as_subclass(Subclass)], opts),
    ):  # fmt: skip
        assert plain.allreduce(*arguments) is None
    with pytest.raises(TypeError):
        plain.allreduce([tensor], opts=opts)
    for wrong in (-1, dist.get_world_size(), 2**31 - 1):
        of_root = torch_internals.BroadcastOptions()
        of_root.rootRank = wrong
        assert plain.broadcast([tensor], of_root) is None


def test_no_memory_is_lost() -> None:
    tensor, received = torch.ones(4), [torch.empty(4) for _ in range(dist.get_world_size())]

    def call() -> None:
        for is_async in (False, True):
            for work in (
                dist.all_reduce(tensor, async_op=is_async),
                dist.all_gather(received, tensor, async_op=is_async),
            ):
                if work is not None:
                    work.wait()

    counts = []
    for _ in range(3):
        for _ in range(2 * flight_recorder.RING):
            call()
        gc.collect()
        counts.append(sys.getrefcount(tensor) + sys.getrefcount(received[0]) + sys.getrefcount(None))
    assert abs(counts[1] - counts[2]) < flight_recorder.RING


def test_lists_and_overlaps_that_do_not_qualify() -> None:
    plain, size, rank = dist.group.WORLD._plain, dist.get_world_size(), dist.get_rank()  # type: ignore[union-attr]
    gather, of_all, spread = torch_internals.GatherOptions(), torch_internals.AllgatherOptions(), torch.empty(4 * size)
    exchange, reducing = torch_internals.AllToAllOptions(), torch_internals.ReduceScatterOptions()
    gather.rootRank = rank
    mine, blocks = torch.ones(4), list(spread.split(4))
    for wrong in (
        blocks[:-1], [*blocks, mine], tuple(blocks), [mine] * size, [spread[1:5], *blocks[1:]],
        [blocks[0].int(), *blocks[1:]], [blocks[0][:3], *blocks[1:]], [None, *blocks[1:]],
    ):  # fmt: skip
        assert plain.gather([wrong], [mine], gather) is None
        assert plain.allgather([wrong], [mine], of_all) is None
    large = torch.empty(2**20 * size)  # moves in several steps
    beside = large[rank * 2**20 + 8 :][: 2**20] if rank + 1 < size else large[rank * 2**20 - 8 :][: 2**20]
    assert plain.all_gather_single(large, beside, of_all) is None
    assert plain.allgather([list(large.split(2**20))], [beside], of_all) is None
    assert plain.reduce_scatter_single(spread[2:6], spread, reducing) is None
    assert plain.all_to_all_single(spread, spread, [], [], exchange) is None
    odd = torch.empty(size + 1, size)
    assert plain.all_to_all_single(odd, torch.empty(size + 1, size), [], [], exchange) is None
    assert plain.all_to_all_single(odd.view(-1), torch.empty(size + 1, size), [], [], exchange) is None
    assert plain.all_to_all_single(spread, torch.empty(4 * size), [4] * size, [], exchange) is None
    assert plain.all_to_all_single(torch.ones(()), torch.ones(()), [], [], exchange) is None


@pytest.mark.parametrize("shift", [8, -8, 2**19])
def test_all_gather_of_a_part_of_its_output(world: mpicomm.World, shift: int) -> None:
    """The blocks move in several steps: this rank reads its input while it writes others' elements."""
    count, size = 2**20, world.size
    output = torch.zeros(count * size)
    place = min(max(world.rank * count + shift, 0), (size - 1) * count)
    source = output[place : place + count]
    source.copy_(torch.arange(float(count)) + world.rank)
    dist.group.WORLD._allgather_base(output, source, torch_internals.AllgatherOptions()).wait()  # type: ignore[union-attr]
    expected = torch.cat([torch.arange(float(count)) + rank for rank in range(size)])
    assert torch.equal(output, expected)


def test_different_plain_calls_fail_on_all_ranks(world: mpicomm.World, new_group: Callable[..., Any]) -> None:
    handle = new_group()
    dist.all_reduce(torch.ones(1), group=handle)
    with pytest.raises(RuntimeError, match=f"must be equal on all ranks, got 16 to {12 + 4 * world.size} bytes"):
        dist.all_reduce(torch.ones(4 + world.rank), group=handle)
    with pytest.raises(mpicomm.MpicommError, match="cannot be used any more: all_reduce #2"):
        dist.all_reduce(torch.ones(4), group=handle)
    other = new_group()
    dist.all_reduce(torch.ones(1), group=other)
    work = dist.all_reduce(torch.ones(4 + world.rank), group=other, async_op=True)
    with pytest.raises(RuntimeError, match="must be equal on all ranks"):
        work.wait()  # type: ignore[union-attr]


def test_a_rank_whose_tensor_is_not_on_the_host(world: mpicomm.World) -> None:
    """The others leave the call to MPI."""
    executor = dist.group.WORLD._executor  # type: ignore[union-attr]
    tensor = torch.full((3,), 1.0 + world.rank)
    if world.rank == 0:
        assert not executor.algorithms.slots.reduce(torch.ones(3, device="meta"))
        mpi_calls.all_reduce(executor.comm, tensor, mpi.api().FLOAT, mpi.api().SUM)
    else:
        dist.all_reduce(tensor)
    assert bool((tensor == world.size * (world.size + 1) / 2).all())


@pytest.mark.parametrize("is_async", [False, True])
def test_autograd_detects_that_a_plain_call_has_written_a_large_tensor(
    monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    state = dist.group.WORLD._executor.algorithms.slots._state  # type: ignore[union-attr]
    monkeypatch.setattr(state, "soon_ns", 10**10)  # all asynchronous calls complete in the call
    factor = torch.ones(2**16, requires_grad=True)
    value = torch.ones(2**16)
    loss = (factor * value).sum()
    work = dist.all_reduce(value, async_op=is_async)
    assert isinstance(work, EarlyWork) is is_async
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_list_that_another_thread_changes_during_a_call(world: mpicomm.World) -> None:
    group, opts = dist.group.WORLD, torch_internals.AllreduceOptions()
    tensors, alive = [torch.ones(2)], []
    opts.asyncOp = False
    comm = mpi.job_comm()

    def change() -> None:
        mpi.poll(lambda: bool(flight_recorder.running()), 30)
        tensor = weakref.ref(tensors.pop())
        gc.collect()
        alive.append(tensor() is not None)
        comm.isend(None, 1)

    thread = threading.Thread(target=change)
    if world.rank == 0:
        thread.start()
    elif world.rank == 1:
        comm.recv(source=0)
    group.allreduce(tensors, opts)  # type: ignore[union-attr]
    if world.rank == 0:
        thread.join()
    assert alive == ([True] if world.rank == 0 else [])


@pytest.mark.usefixtures("several_cores")
def test_the_result_of_a_queued_call_is_not_the_list_of_the_caller() -> None:
    tensors = [torch.ones(QUEUED)]
    work = dist.group.WORLD.allreduce(tensors, torch_internals.AllreduceOptions())  # type: ignore[union-attr]
    tensors.clear()
    work.wait()
    assert [tensor.numel() for tensor in work.result()] == [QUEUED]


def test_a_thread_that_has_made_a_plain_call_is_known() -> None:
    """The process does not end while it may make further calls."""
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
    thread.start()
    thread.join()
    assert flight_recorder.is_used_by(thread)


def test_a_thread_destroys_the_group_during_a_call(world: mpicomm.World, new_group: Callable[..., Any]) -> None:
    handle, errors = new_group(), []
    dist.all_reduce(torch.ones(1), group=handle)

    def wait() -> None:
        try:
            dist.all_reduce(torch.ones(1), group=handle)
        except (RuntimeError, ValueError) as error:
            errors.append(error)

    if world.rank == 0:
        thread = threading.Thread(target=wait)
        thread.start()
        mpi.poll(lambda: bool(flight_recorder.running()), 30)
        handle._executor.algorithms.close()
        thread.join()
        assert "destroyed during the operation" in f"{errors[0]} {errors[0].__context__}"
    dist.barrier()


@pytest.mark.usefixtures("several_cores")
@pytest.mark.parametrize("count", [4, QUEUED])
def test_the_memory_has_moved_before_the_wait(world: mpicomm.World, no_worker: None, count: int) -> None:
    """Rank 1 is late: on the others the call has begun, or is queued, when the tensor gets other memory."""
    tensor, total = torch.full((count,), 1.0 + world.rank), world.size * (world.size + 1) / 2
    others = torch.zeros(count)
    world.comm.Barrier()
    if world.rank == 1:
        time.sleep(0.2)
    work = dist.all_reduce(tensor, async_op=True)
    if world.rank != 1:
        tensor.set_(tensor.clone())
        before = others.clone()
        work.wait()  # type: ignore[union-attr]
        assert torch.equal(others, before)
    else:
        work.wait()  # type: ignore[union-attr]
    assert bool((tensor == total).all())


@pytest.mark.usefixtures("several_cores")
def test_a_queued_tensor_is_no_longer_dense_when_its_call_runs(world: mpicomm.World, no_worker: None) -> None:
    """Rank 1 is late: on the others the second call waits for the first when its tensor is transposed."""
    first, size = torch.ones(QUEUED), world.size
    square = torch.arange(QUEUED, dtype=torch.float32).view(QUEUED // 64, 64) * (world.rank + 1)
    expected = torch.arange(QUEUED, dtype=torch.float32).view(QUEUED // 64, 64) * (size * (size + 1) / 2)
    world.comm.Barrier()
    if world.rank == 1:
        time.sleep(0.2)
        square = square.t().contiguous()
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, square)]
    if world.rank != 1:
        square.set_(square.t())
    for work in works:
        work.wait()  # type: ignore[union-attr]
    assert torch.equal(square, expected.t())
    assert square.is_contiguous() == (world.rank == 1)


def test_handles_of_mpi_keep_their_bits() -> None:
    """MPICH's are of 32 bits, which mpi4py may extend by their sign."""
    api = types.SimpleNamespace(_sizeof=lambda value: value[0], _handleof=lambda value: value[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_calls.mpi, "api", lambda: api)
        assert plain_calls._handle((4, 0xFFFFFFFF84000000)) == 0x84000000 - 2**32
        assert plain_calls._handle((4, 0x84000000)) == 0x84000000 - 2**32
        assert plain_calls._handle((4, 0x44000000)) == 0x44000000
        assert plain_calls._handle((8, 0x7F147A76D060)) == 0x7F147A76D060
