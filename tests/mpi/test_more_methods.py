"""Less common methods of torch's process groups: coalesced, sparse and uneven operations, and older signatures."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm import torch_compatibility, torch_internals
from mpicomm.backend.execution import work
from mpicomm.recorder import flight_recorder
from tests.mpi import test_collectives
from tests.mpi.counts import limit
from tests.mpi.sweep import sweep
from tests.mpi.test_collectives import MOVED, WHEN, finish
from tests.time_limits import scaled
from tests.torches import all_gather_single, reduce_scatter_single
from tests.worlds import MAIN_KINDS, Group, on_groups


def options(kind: str, is_async: bool, **values: object) -> Any:
    made = getattr(torch_internals, kind)()
    made.asyncOp = is_async
    for name, value in values.items():
        setattr(made, name, value)
    return made


@pytest.fixture(params=["whole", "in parts"])
def counts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, group: Group) -> None:
    """Run with MPI's own limit on counts, 2^31 or more, or with a limit of two."""
    if request.param == "in parts":
        limit(monkeypatch, group, 2)


def of_rank(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return test_collectives.of_rank(rank, dtype, count)


# -- coalesced operations --------------------------------------------------------------------------------------------


@WHEN
def test_coalesced_all_gather_of_single_tensors(group: Group, is_async: bool) -> None:
    sources = [of_rank(group.rank, 3), of_rank(group.rank, 2, torch.int64)]
    outputs = [torch.empty(3 * group.size), torch.empty(2 * group.size, dtype=torch.int64)]
    finish(group.handle.all_gather_single_coalesced(outputs, sources, options("AllgatherOptions", is_async)))
    for output, count in zip(outputs, (3, 2), strict=True):
        expected = torch.cat([of_rank(rank, count, output.dtype) for rank in range(group.size)])
        assert torch.equal(output, expected)


@WHEN
def test_coalesced_all_gather_of_lists(group: Group, is_async: bool) -> None:
    sources = [of_rank(group.rank, 3), of_rank(group.rank, 2, torch.bfloat16)]
    outputs = [[torch.empty_like(each) for each in sources] for _ in range(group.size)]
    finish(group.handle.allgather_coalesced(outputs, sources, options("AllgatherOptions", is_async)))
    for rank, of_one in enumerate(outputs):
        assert torch.equal(of_one[0], of_rank(rank, 3))
        assert torch.equal(of_one[1], of_rank(rank, 2, torch.bfloat16))


@WHEN
@on_groups("world", "staged")
def test_the_coalescing_manager_with_a_device(group: Group, is_async: bool) -> None:
    """With a device, torch forwards each call immediately, and requests the work of all calls at the end."""
    size = group.size
    summed, gathered, mine = of_rank(group.rank, 4), torch.empty(2 * size), torch.empty(2)
    calls = [
        lambda: dist.all_reduce(summed, group=group.handle, async_op=is_async),
        lambda: all_gather_single(gathered, of_rank(group.rank, 2), group=group.handle, async_op=is_async),
        lambda: reduce_scatter_single(mine, gathered, group=group.handle, async_op=is_async),
    ]
    for call in calls:
        with dist._coalescing_manager(group.handle, torch.device("cpu"), async_ops=is_async) as manager:
            call()
        if is_async:
            manager.wait()
    assert torch.equal(summed, torch.full((4,), size * (size + 1) / 2))
    assert torch.equal(gathered, torch.cat([of_rank(rank, 2) for rank in range(size)]))
    assert torch.equal(mine, size * of_rank(group.rank, 2))


def test_a_coalesced_operation_is_reported_at_the_line_of_the_manager(group: Group) -> None:
    """torch calls it at the end of the block, in contextlib."""
    with dist._coalescing_manager(group.handle):
        dist.all_reduce(torch.ones(1), group=group.handle)
    operation = flight_recorder.last()
    assert operation is not None
    assert operation.where.endswith("(test_a_coalesced_operation_is_reported_at_the_line_of_the_manager)")


def test_the_works_of_a_batch_have_one_timeout() -> None:
    waited: list[float] = []

    class Slow(dist.Work):
        def wait(self, timeout: datetime.timedelta) -> bool:
            waited.append(timeout.total_seconds())
            time.sleep(0.02)
            return True

    assert work.JointWork([Slow(), Slow(), Slow()]).wait(datetime.timedelta(seconds=20))
    first, second, third = waited
    assert first <= 20
    assert second <= first - 0.019
    assert third <= second - 0.019


# -- sparse tensors --------------------------------------------------------------------------------------------------


def sparse_of(rank: int, dtype: torch.dtype, size: int) -> torch.Tensor:
    """Return a sparse tensor with one entry shared by all ranks, and `rank` entries that only this rank has."""
    rows = [0, *[rank] * rank]
    columns = [0, *range(1, rank + 1)]
    values = torch.full((len(rows), 2), 1.0 + rank).to(dtype)
    return torch.sparse_coo_tensor(torch.tensor([rows, columns]), values, (size, size + 1, 2))


@WHEN
@pytest.mark.parametrize("op", ["SUM", "AVG", "PREMUL_SUM"])
@sweep([torch.float32, torch.bfloat16, torch.complex64, torch.int64], few=[torch.bfloat16], kinds=MAIN_KINDS)
@pytest.mark.usefixtures("counts")
def test_sparse_all_reduce(group: Group, dtype: torch.dtype, op: str, is_async: bool) -> None:
    if op == "PREMUL_SUM" and dtype == torch.int64:
        pytest.skip("is not defined for integers")
    redop = dist._make_nccl_premul_sum(2.0) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)
    tensor = sparse_of(group.rank, dtype, group.size)
    finish(group.handle.allreduce([tensor], options("AllreduceOptions", is_async, reduceOp=redop)))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    total = sum(sparse_of(rank, dtype, group.size).to_dense().to(wide) for rank in range(group.size))
    expected = {"SUM": total, "AVG": total / group.size, "PREMUL_SUM": 2 * total}[op]
    assert tensor.layout == torch.sparse_coo
    assert torch.equal(tensor.to_dense(), (expected.trunc() if dtype == torch.int64 else expected).to(dtype))


@on_groups(*MAIN_KINDS)
def test_sparse_without_entries(group: Group) -> None:
    tensor = torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (3, 3))
    if group.rank == group.size - 1:
        tensor = torch.eye(3).to_sparse()
    dist.all_reduce(tensor, group=group.handle)
    assert torch.equal(tensor.to_dense(), torch.eye(3))


# -- single tensors, uneven sizes ------------------------------------------------------------------------------------


@WHEN
@sweep(MOVED, kinds=MAIN_KINDS)
@pytest.mark.usefixtures("counts")
def test_gather_into_one_tensor(group: Group, dtype: torch.dtype, is_async: bool) -> None:
    for root in range(group.size):
        output = torch.empty(3 * group.size, dtype=dtype) if group.rank == root else None
        call_options = options("GatherOptions", is_async, rootRank=root)
        finish(group.handle.gather_single(output, of_rank(group.rank, 3, dtype), call_options))
        if output is not None:
            expected = torch.cat([of_rank(rank, 3, dtype) for rank in range(group.size)])
            assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8))


@WHEN
@on_groups(*MAIN_KINDS)
@pytest.mark.usefixtures("counts")
@pytest.mark.parametrize("is_even", [True, False], ids=["even", "uneven"])
def test_gather_and_scatter(group: Group, is_async: bool, is_even: bool) -> None:
    """Uneven: rank r has r elements; rank 0 has none."""
    lengths = [5 if is_even else rank for rank in range(group.size)]
    for root in range(group.size):
        gathered = [torch.empty(length) for length in lengths] if group.rank == root else None
        source = of_rank(group.rank, lengths[group.rank])
        finish(dist.gather(source, gathered, group_dst=root, group=group.handle, async_op=is_async))
        for rank, each in enumerate(gathered or []):
            assert torch.equal(each, of_rank(rank, lengths[rank]))
        mine = torch.empty(lengths[group.rank])
        finish(dist.scatter(mine, gathered, group_src=root, group=group.handle, async_op=is_async))
        assert torch.equal(mine, source)


@WHEN
@on_groups(*MAIN_KINDS)
@pytest.mark.usefixtures("counts")
def test_the_output_may_share_the_memory_of_the_input(group: Group, is_async: bool) -> None:
    flat = torch.zeros(2 * group.size)
    chunks = list(flat.chunk(group.size))
    chunks[group.rank].fill_(1 + group.rank)
    finish(dist.all_gather(chunks, chunks[group.rank], group=group.handle, async_op=is_async))
    assert torch.equal(flat, torch.cat([of_rank(rank, 2) for rank in range(group.size)]))
    is_root = group.rank == 0
    finish(
        dist.gather(chunks[group.rank], chunks if is_root else None, group_dst=0, group=group.handle, async_op=is_async)
    )
    finish(
        dist.scatter(
            chunks[group.rank], chunks if is_root else None, group_src=0, group=group.handle, async_op=is_async
        )
    )
    assert torch.equal(flat, torch.cat([of_rank(rank, 2) for rank in range(group.size)]))


@WHEN
@pytest.mark.usefixtures("counts")
def test_operations_that_the_limit_cuts_into_parts(group: Group, is_async: bool) -> None:
    tensor = torch.arange(7) if group.rank == 0 else torch.empty(7, dtype=torch.int64)
    finish(dist.broadcast(tensor, group_src=0, group=group.handle, async_op=is_async))
    assert torch.equal(tensor, torch.arange(7))
    flat = torch.empty(7 * group.size, dtype=torch.int64)
    finish(all_gather_single(flat, tensor + group.rank, group=group.handle, async_op=is_async))
    assert torch.equal(flat, torch.cat([torch.arange(7) + rank for rank in range(group.size)]))


@on_groups("world", "parity", "staged")
@pytest.mark.usefixtures("counts")
def test_a_message_that_is_one_element_of_a_long_datatype(group: Group) -> None:
    if group.size == 1:
        pytest.skip("a message needs two ranks")
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    received = torch.empty(7)
    work = dist.irecv(received, group_src=left, group=group.handle)
    dist.send(of_rank(group.rank, 7), group_dst=right, group=group.handle)
    work.wait()
    assert torch.equal(received, of_rank(left, 7))
    short = torch.empty(9)
    work = dist.irecv(short, group_src=left, group=group.handle)
    dist.send(of_rank(group.rank, 7), group_dst=right, group=group.handle)
    with pytest.raises(RuntimeError, match=r"expected 9 elements of float32 from rank .*, got 7"):
        work.wait()


# -- older signatures ------------------------------------------------------------------------------------------------


@on_groups("world")
def test_forms_without_options(group: Group) -> None:
    handle, size = group.handle, group.size
    total = size * (size + 1) / 2
    tensor = of_rank(group.rank, 3)
    handle.allreduce(tensor).wait()
    assert torch.equal(tensor, torch.full((3,), total))
    for call in (
        lambda each: handle.allreduce([each], dist.ReduceOp.MAX),
        lambda each: handle.allreduce(each, op=dist.ReduceOp.MAX, timeout=datetime.timedelta(seconds=20)),
        lambda each: handle.broadcast(each, size - 1),
        lambda each: handle.broadcast([each], root=size - 1),
    ):
        tensor = of_rank(group.rank, 3)
        call(tensor).wait()
        assert torch.equal(tensor, of_rank(size - 1, 3))
    tensor = of_rank(group.rank, 3)
    handle.reduce(tensor, 0, dist.ReduceOp.MIN).wait()
    handle.reduce(tensor, root=0).wait()
    assert torch.equal(tensor, torch.full((3,), total) if group.rank == 0 else of_rank(group.rank, 3))

    gathered = [torch.empty(3) for _ in range(size)]
    handle.allgather(gathered, of_rank(group.rank, 3)).wait()
    assert all(torch.equal(each, of_rank(rank, 3)) for rank, each in enumerate(gathered))
    mine = torch.empty(3)
    handle.reduce_scatter(mine, gathered, dist.ReduceOp.MAX).wait()
    assert torch.equal(mine, of_rank(group.rank, 3))
    handle.gather(gathered if group.rank == 0 else [], mine, 0).wait()
    handle.scatter(mine, gathered if group.rank == 0 else [], root=0).wait()
    assert torch.equal(mine, of_rank(group.rank, 3))
    handle.barrier(datetime.timedelta(seconds=20)).wait()
    handle.barrier(timeout=datetime.timedelta(seconds=20)).wait()


# -- subgroups and timeouts ------------------------------------------------------------------------------------------


def test_splitting_a_group(world: mpicomm.World, groups: dict[str, Group]) -> None:
    """Only members take part; their ranks refer to the parent group, and keep the given order."""
    parent = groups["copy"]
    members = list(range(world.size))[::-2]
    group = parent.handle.split_group(members, group_name=f"split-{world.size}", group_desc="every other rank")
    if world.rank not in members:
        assert group is None
        return
    assert group.size() == len(members)
    assert group.rank() == members.index(world.rank)
    assert (group.group_name, group.group_desc) == (f"split-{world.size}", "every other rank")
    tensor = of_rank(world.rank, 2)
    group.allreduce([tensor]).wait()
    assert torch.equal(tensor, torch.full((2,), float(sum(1 + rank for rank in members))))
    group.get_group_store().set(f"from-{group.rank()}", "here")
    assert group.get_group_store().get("from-0") == b"here"
    parts = [group.split_group([0]) for _ in range(2)]
    assert [part is not None for part in parts] == [group.rank() == 0] * 2
    if group.rank() == 0:
        assert parts[0].group_name != parts[1].group_name
        for part in parts:
            assert part.size() == 1
            part.shutdown()
    group.shutdown()


# -- the monitored barrier -------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=3)
def test_the_monitored_barrier_names_the_missing_ranks(world: mpicomm.World) -> None:
    group = dist.new_group(list(range(world.size)))
    short, long = datetime.timedelta(seconds=scaled(0.5)), datetime.timedelta(seconds=scaled(20))
    group.monitored_barrier(long)
    for missing in ([1, world.size - 1], [1]):  # a late arrival at the first barrier must not count for the second
        if world.rank == 0:
            ranks = ", ".join(map(str, missing))
            with pytest.raises(RuntimeError, match=f"Ranks {ranks} failed to pass monitoredBarrier"):
                group.monitored_barrier(short, wait_all_ranks=True)
        elif world.rank not in missing:
            with pytest.raises(RuntimeError, match=f"Rank {world.rank} successfully reached monitoredBarrier"):
                group.monitored_barrier(short, wait_all_ranks=True)
        dist.barrier()
        if world.rank in missing:
            with pytest.raises(RuntimeError, match="successfully reached monitoredBarrier"):
                group.monitored_barrier(short, wait_all_ranks=True)
        dist.barrier()
    group.monitored_barrier(long)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == world.size
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_the_monitored_barrier_does_not_wait_for_queued_operations(world: mpicomm.World) -> None:
    group = dist.new_group(list(range(world.size)))
    tensor = torch.ones(1)
    if world.rank == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
            group.monitored_barrier(datetime.timedelta(seconds=0.3))
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.all_reduce(tensor, group=group)
    assert tensor.item() == world.size
    dist.destroy_process_group(group)


# -- the profiler ----------------------------------------------------------------------------------------------------


@pytest.mark.each_torch("profiler")
@pytest.mark.skipif(
    torch_compatibility.torch_version() < (2, 12), reason="torch loses spans that end on another thread"
)
@WHEN
@on_groups("world", "parity")
def test_the_profiler_sees_operations_with_their_shapes(group: Group, is_async: bool) -> None:
    with torch.profiler.profile(record_shapes=True) as profiler:
        finish(dist.all_reduce(torch.ones(3, 2), group=group.handle, async_op=is_async))
        finish(dist.broadcast(torch.ones(5), group_src=0, group=group.handle, async_op=is_async))
        if group.size > 1 and group.rank == 0:
            dist.send(torch.ones(4), group_dst=1, group=group.handle)
        if group.size > 1 and group.rank == 1:
            dist.recv(torch.ones(4), group_src=0, group=group.handle)
    seen = {event.name: event.input_shapes for event in profiler.events() if event.name.startswith("mpicomm:")}
    expected = {"mpicomm:all_reduce": [[3, 2]], "mpicomm:broadcast": [[5]]}
    if group.size > 1 and group.rank < 2:
        expected["mpicomm:send" if group.rank == 0 else "mpicomm:recv"] = [[4]]
    assert seen == expected


@pytest.mark.each_torch("profiler")
def test_the_profiler_sees_a_synchronous_operation(world: mpicomm.World) -> None:
    """This works with older versions of torch, too: if the worker is idle, the operation runs on the calling thread."""
    group = dist.new_group()
    with torch.profiler.profile(record_shapes=True) as profiler:
        dist.all_reduce(torch.ones(3, 2), group=group)
        dist.scatter(torch.ones(5), [torch.ones(5)] * world.size if world.rank == 0 else None, group=group)
    seen = [(event.name, event.input_shapes) for event in profiler.events() if event.name.startswith("mpicomm:")]
    inputs_of_scatter = [[5]] * world.size if world.rank == 0 else []
    assert seen == [("mpicomm:all_reduce", [[3, 2]]), ("mpicomm:scatter", inputs_of_scatter)]
    dist.destroy_process_group(group)


@pytest.mark.each_torch("profiler")
@pytest.mark.mpi(min_size=2)
def test_the_profiler_keeps_nothing_of_messages_that_are_through(world: mpicomm.World) -> None:
    with torch.profiler.profile():
        for _ in range(10):
            works = [dist.isend(torch.ones(1), (world.rank + 1) % world.size)]
            works.append(dist.irecv(torch.ones(1), (world.rank - 1) % world.size))
            for work in works:
                work.wait()
    assert not dist.group.WORLD._executor.messages._spans
