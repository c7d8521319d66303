"""Tensors through slots in the memory of one node."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm import mpi
from mpicomm.backend.transfer import slots
from mpicomm.backend.transfer.slots import NativeSlots
from mpicomm.recorder import flight_recorder
from tests import nodes
from tests.mpi.conftest import Make
from tests.ordered_sum import ordered_sum
from tests.time_limits import wait_until
from tests.torches import all_gather_single, reduce_scatter_single

KIB = 2**10
SLOT = 2**19  # bytes
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int8, torch.int64]

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def library() -> None:
    nodes.require("slots")


def selector_of(handle: dist.ProcessGroup) -> Any:
    return handle._executor.algorithms  # type: ignore[attr-defined]


def slots_of(comm: Any) -> NativeSlots:
    return NativeSlots(comm, slots.share_memory(comm, slots.memory_bytes(comm.size)), comm.Iprobe)


def values(size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the inputs of all ranks, equal on all ranks."""
    random = 50 * torch.randn(size, count, generator=torch.manual_seed(count))
    return random.to(torch.int64).to(dtype) if not dtype.is_floating_point else random.to(dtype)


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_made_in_rank_order(world: mpicomm.World, dtype: torch.dtype) -> None:
    size, rank = world.size, world.rank
    way = slots_of(world.comm)
    for count in (1, 15, 1024, 1025, 5000, SLOT // dtype.itemsize // size):
        for divisor in (1, size) if dtype.is_floating_point or dtype.is_complex else (1,):
            whole = values(size, size * count, dtype)
            expected = ordered_sum(list(whole), divisor)
            tensor = whole[rank].clone()
            assert way.reduce(tensor, divisor=divisor)
            assert torch.equal(tensor, expected)
            tensor = whole[rank].clone()
            assert way.reduce(tensor, size - 1, divisor=divisor)
            assert torch.equal(tensor, expected if rank == size - 1 else whole[rank])
            out = torch.empty(count, dtype=dtype)
            assert way.reduce_scatter(whole[rank].clone(), out, divisor=divisor)
            assert torch.equal(out, expected.view(size, count)[rank])


@pytest.mark.parametrize("nbytes", [8, SLOT - 8, SLOT, SLOT + 8, 3 * SLOT + 40])
@pytest.mark.parametrize("is_split", [True, False], ids=["in parts", "whole"])
def test_tensors_of_several_slots(world: mpicomm.World, nbytes: int, is_split: bool) -> None:
    way = slots_of(world.comm)
    way._state.split_bytes = 0 if is_split else 2**62
    size, rank, count = world.size, world.rank, nbytes // 4
    whole = values(size, size * count, torch.float32)
    total = functools.reduce(torch.add, whole)
    for root in (None, 0, size - 1):
        tensor = whole[rank, :count].clone()
        assert way.reduce(tensor, root)
        assert torch.equal(tensor, total[:count] if root in (None, rank) else whole[rank, :count])
    out = torch.empty(count)
    assert way.reduce_scatter(whole[rank], out)
    assert torch.equal(out, total.view(size, count)[rank])
    gathered = torch.full((size, count), -1.0)
    gathered[rank] = whole[rank, :count]
    assert way.all_gather(gathered)
    assert torch.equal(gathered, whole[:, :count])
    assert way.all_gather(gathered.fill_(-1.0), whole[rank, :count])
    assert torch.equal(gathered, whole[:, :count])
    for root in range(size):
        tensor = whole[rank, :count].clone()
        assert way.broadcast(tensor, root)
        assert torch.equal(tensor, whole[root, :count])


@pytest.mark.parametrize("nbytes", [8, SLOT // 4, SLOT, SLOT + 8])
def test_blocks_and_lists_of_several_slots(world: mpicomm.World, nbytes: int) -> None:
    way = slots_of(world.comm)
    size, rank, count = world.size, world.rank, nbytes // 4
    whole = values(size, size * count, torch.float32).view(size, size, count)
    out = torch.empty(size, count)
    assert way.all_to_all(out, whole[rank].clone())
    assert torch.equal(out, whole[:, rank])
    outputs = [torch.empty(count) for _ in range(size)]
    assert way.all_gather_list(outputs, whole[rank, 0].clone())
    assert torch.equal(torch.stack(outputs), whole[:, 0])
    for root in range(size):
        at_root = rank == root
        outputs = [torch.empty(count) for _ in range(size)] if at_root else []
        assert way.gather(outputs, whole[rank, root].clone(), root)
        assert not at_root or torch.equal(torch.stack(outputs), whole[:, root])
        block = torch.empty(count)
        assert way.scatter(block, [each.clone() for each in whole[root]] if at_root else [], root)
        assert torch.equal(block, whole[root, rank])


@pytest.mark.parametrize("counts", [(3, 1), (1, 200_000), (200_000, 80_001), (8192, 150_001)])
def test_blocks_of_different_sizes(world: mpicomm.World, counts: tuple[int, int]) -> None:
    way = slots_of(world.comm)
    size, rank = world.size, world.rank
    lengths = [counts[each % 2] + each for each in range(size)]
    blocks = [torch.arange(float(length)) + each for each, length in enumerate(lengths)]
    for root in range(size):
        outputs = [torch.empty(length) for length in lengths] if rank == root else []
        assert way.gather(outputs, blocks[rank], root)
        assert all(map(torch.equal, outputs, blocks))
        block = torch.empty(lengths[rank])
        assert way.scatter(block, blocks if rank == root else [], root)
        assert torch.equal(block, blocks[rank])


@pytest.mark.parametrize("operation", ["gather", "scatter", "all_gather", "all_gather_single"])
def test_a_block_may_overlap_two_others(make: Make, world: mpicomm.World, operation: str) -> None:
    handle, size, rank = make(), world.size, world.rank
    count = SLOT // 4 + 1  # two steps
    memory = torch.arange(float(size * count)) + rank
    part = memory[count // 2 :][:count]
    expected = [torch.arange(float(count)) + count // 2 + each for each in range(size)]
    outputs = list(memory.split(count))
    if operation == "gather":
        dist.gather(part, outputs if rank == 0 else None, group_dst=0, group=handle)
        assert rank or torch.equal(memory, torch.cat(expected))
    elif operation == "all_gather":
        dist.all_gather(outputs, part, group=handle)
        assert torch.equal(memory, torch.cat(expected))
    elif operation == "all_gather_single":
        all_gather_single(memory, part, group=handle)
        assert torch.equal(memory, torch.cat(expected))
    else:
        dist.scatter(part, outputs if rank == 0 else None, group_src=0, group=handle)
        assert torch.equal(part, torch.arange(float(count)) + rank * count)


@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_a_list_of_wrong_sizes_is_refused(make: Make, world: mpicomm.World, operation: str) -> None:
    handle, rank = make(), world.rank
    tensors = [torch.zeros(5 + (each == 1)) for each in range(world.size)] if rank == 0 else None
    refuses = rank == 0 or (operation == "scatter" and rank == 1)
    with pytest.raises(RuntimeError, match="20, 20") if refuses else contextlib.nullcontext():
        getattr(dist, operation)(torch.zeros(5), tensors, 0, group=handle)


@pytest.mark.parametrize("kind", ["", *nodes.KINDS])
def test_operations_of_ranks_at_different_speeds(make: Make, world: mpicomm.World, kind: str) -> None:
    """A rank may be an operation ahead of another rank, which still reads the slots of the previous one."""
    handle, size, rank = make(kind), world.size, world.rank
    generator = torch.manual_seed(rank)
    for turn in range(60):
        if torch.rand(1, generator=generator) < 0.2:
            time.sleep(0.002)
        count = size * (1024 + 997 * turn)
        tensor = torch.full((count,), float(rank + turn))
        dist.all_reduce(tensor, group=handle)
        assert bool((tensor == sum(range(size)) + size * turn).all())
        dist.broadcast(tensor.fill_(rank), group_src=turn % size, group=handle)
        assert bool((tensor == turn % size).all())
        whole = torch.empty(size * count)
        all_gather_single(whole, torch.full((count,), float(rank - turn)), group=handle)
        assert torch.equal(whole, (torch.arange(size) - float(turn)).repeat_interleave(count))
        out = torch.empty(count)
        reduce_scatter_single(out, whole, group=handle)
        assert torch.equal(out, torch.full((count,), float(size * (rank - turn))))
        dist.reduce(tensor.fill_(1.0), group_dst=0, group=handle)
        assert bool((tensor == (size if rank == 0 else 1)).all())


def test_infinite_complex_numbers(make: Make, world: mpicomm.World) -> None:
    handle, tensor = make("slots"), torch.full((4 * KIB,), complex(math.inf, 1.0))
    handle.allreduce([tensor]).wait()  # dist.all_reduce passes a view of real numbers
    assert torch.equal(tensor, torch.full_like(tensor, complex(math.inf, world.size)))


def test_autograd_detects_an_overwritten_tensor(make: Make) -> None:
    handle, weight = make(), torch.ones(64 * KIB, requires_grad=True)
    tensor = torch.ones(64 * KIB)
    loss = (tensor * weight).sum()
    dist.all_reduce(tensor, group=handle)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        tensor = torch.ones(64 * KIB)
    dist.all_reduce(tensor, group=handle)
    assert bool((tensor == handle.size()).all())


# -- conditions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "queued"])
def test_which_tensors_take_slots(
    make: Make, monkeypatch: pytest.MonkeyPatch, world: mpicomm.World, is_async: bool
) -> None:
    taken: list[int] = []
    reduce = NativeSlots.reduce

    def noted(self: NativeSlots, tensor: torch.Tensor, *arguments: Any, **options: Any) -> bool:
        taken.append(tensor.nbytes)
        return reduce(self, tensor, *arguments, **options)

    monkeypatch.setattr(NativeSlots, "reduce", noted)
    handle = make()
    monkeypatch.setattr(handle, "_plain", None)  # plain calls use the slots without this class
    sizes = [4, 4 * KIB, 64 * KIB, 1024 * KIB]
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        for nbytes in sizes:
            tensor = torch.ones(nbytes // 4)
            work = dist.all_reduce(tensor, op, group=handle, async_op=is_async)
            if is_async:
                work.wait()  # type: ignore[union-attr]
            assert bool((tensor == (world.size if op == dist.ReduceOp.SUM else 1)).all())
    assert taken == 2 * sizes


def test_memory_that_one_rank_cannot_offer(world: mpicomm.World) -> None:
    """For example, the memory of a GPU: all ranks leave the operation to MPI."""
    way, tensor = slots_of(world.comm), torch.ones(KIB)
    assert not way.reduce(torch.ones(KIB, device="meta") if world.rank == 0 else tensor)
    assert bool((tensor == 1).all())
    assert way.reduce(tensor)
    assert bool((tensor == world.size).all())


def test_tensors_of_one_call_on_different_devices(world: mpicomm.World) -> None:
    way = slots_of(world.comm)
    tensor, block = torch.ones(KIB * world.size), torch.ones(KIB)
    passed = torch.ones(KIB, device="meta") if world.rank == 0 else block
    assert not way.reduce_scatter(tensor, passed)
    assert not way.all_gather(tensor, passed)
    assert bool((tensor == 1).all())


DIFFERENT_CALLS = {
    "size": "262144 to 262148 bytes",
    "dtype": "rank LAST of the group: all_reduce SUM of int32",
    "operation": "rank LAST of the group: reduce SUM to rank 0 of float32",
    "reduction": "rank LAST of the group: all_reduce MAX of float32",
}


@pytest.mark.parametrize("difference", DIFFERENT_CALLS)
def test_different_calls_are_refused_on_all_ranks(make: Make, world: mpicomm.World, difference: str) -> None:
    handle = make()
    is_odd = world.rank == world.size - 1
    count = 64 * KIB
    tensor = torch.ones(count + (is_odd and difference == "size"))
    if is_odd and difference == "dtype":
        tensor = tensor.to(torch.int32)
    calls = {
        "operation": functools.partial(dist.reduce, group_dst=0),
        "reduction": functools.partial(dist.all_reduce, op=dist.ReduceOp.MAX),
    }
    call = calls.get(difference, dist.all_reduce) if is_odd else dist.all_reduce
    with pytest.raises(RuntimeError, match=DIFFERENT_CALLS[difference].replace("LAST", str(world.size - 1))):
        call(tensor, group=handle)
    assert bool((tensor == 1).all())
    with pytest.raises(mpicomm.MpicommError, match="cannot be used any more"):
        dist.all_reduce(tensor, group=handle)


@pytest.mark.parametrize("operation", ["broadcast", "all_gather_single", "all_to_all_single", "reduce", "gather"])
def test_different_dtypes_of_one_size_are_refused_on_all_ranks(
    make: Make, world: mpicomm.World, operation: str
) -> None:
    handle = make()
    tensor = torch.ones(world.size * KIB)
    if world.rank == world.size - 1:
        tensor = tensor.view(torch.int32)
    calls: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(tensor, group_src=0, group=handle),
        "all_gather_single": lambda: all_gather_single(tensor.repeat(world.size), tensor, group=handle),
        "all_to_all_single": lambda: dist.all_to_all_single(tensor.clone(), tensor, group=handle),
        "reduce": lambda: dist.reduce(tensor, group_dst=0, group=handle),
        "gather": lambda: dist.gather(
            tensor, [tensor.clone() for _ in range(world.size)] if world.rank == 0 else None, group_dst=0, group=handle
        ),
    }
    with pytest.raises(RuntimeError, match="tensors of the same dtype, got different calls:\n"):
        calls[operation]()


# -- waiting -----------------------------------------------------------------------------------------------------------


either_path = pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "general"])


def make_for(make: Make, *, is_plain: bool) -> Any:
    """Return a group whose calls on plain tensors take the extension module, or the general path."""
    handle: Any = make()
    if not is_plain:
        handle._plain = None
    return handle


@either_path
def test_mpi_progresses_while_a_rank_waits(make: Make, world: mpicomm.World, is_plain: bool) -> None:
    """Rank 1 arrives only after it has received a message that rank 0 must send in its wait."""
    handle = make_for(make, is_plain=is_plain)
    tensor = torch.ones(16 * KIB)
    dist.all_reduce(tensor, group=handle)
    comm = mpi.job_comm()
    message = bytearray(2**22)
    request = None
    if world.rank == 0:
        request = comm.Isend(message, 1, 5)
    elif world.rank == 1:
        time.sleep(0.05)
        comm.Recv(message, 0, 5)
    dist.all_reduce(tensor, group=handle)
    if request is not None:
        request.Wait()
    assert bool((tensor == world.size**2).all())


def test_a_wait_releases_the_gil(make: Make, world: mpicomm.World) -> None:
    """Rank 0 arrives after the other ranks, while they wait, have run Python code on another thread."""
    handle, store = make(), dist.distributed_c10d._get_default_store()
    key = f"ranks that have taken the GIL, in {handle.group_name}"
    dist.all_reduce(torch.ones(16 * KIB), group=handle)

    def take_the_gil() -> None:
        wait_until(flight_recorder.running, "this rank waits for rank 0")
        for _ in range(20):
            time.sleep(0.001)
        store.add(key, 1)

    thread = threading.Thread(target=take_the_gil)
    if world.rank == 0:
        wait_until(lambda: store.add(key, 0) == world.size - 1, "the other ranks have taken the GIL")
    else:
        thread.start()
    tensor = torch.ones(16 * KIB)
    dist.all_reduce(tensor, group=handle)
    assert bool((tensor == world.size).all())
    if world.rank != 0:
        thread.join()


@either_path
def test_a_group_that_breaks_ends_a_wait(make: Make, world: mpicomm.World, is_plain: bool) -> None:
    handle = make_for(make, is_plain=is_plain)
    dist.all_reduce(torch.ones(16 * KIB), group=handle)
    if world.rank == 0:
        time.sleep(0.3)
        handle.abort()
        return
    with pytest.raises(mpicomm.MpicommError, match="aborted on rank 0"):
        dist.all_reduce(torch.ones(16 * KIB), group=handle)
