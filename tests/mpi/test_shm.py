"""Groups whose ranks share the memory of their nodes: results, conditions, and the fallback to MPI."""

from __future__ import annotations

import functools
import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm import mpi
from mpicomm.backend.transfer import hierarchical, reductions, slots
from mpicomm.backend.transfer.hierarchical import HierarchicalAllReduce
from tests import nodes, reduction_guarantees
from tests.mpi.conftest import Make
from tests.mpi.test_collectives import finish
from tests.worlds import Group

MIB = 2**20
LARGE = 2 * MIB  # float32 elements: enough for the hierarchical all-reduce

needs_two_nodes = pytest.mark.mpi(min_size=4)


@pytest.fixture
def two_nodes(make: Make, world: mpicomm.World) -> dist.ProcessGroup:
    """A group on two nodes or more of two ranks each."""
    if world.size % 2:
        pytest.skip("requires nodes of equally many ranks")
    return make("two nodes")


@pytest.fixture(params=nodes.KINDS)
def by_node(request: pytest.FixtureRequest, groups: dict[str, Group]) -> Group:
    nodes.require(request.param)
    return groups[request.param]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The hierarchical all-reduces of the test: whether each ran."""
    of_test: list[bool] = []
    run = HierarchicalAllReduce.run

    def noted(self: HierarchicalAllReduce, *arguments: Any) -> bool:
        of_test.append(run(self, *arguments))
        return of_test[-1]

    monkeypatch.setattr(HierarchicalAllReduce, "run", noted)
    return of_test


def path_of(handle: dist.ProcessGroup) -> Any:
    return handle._executor.algorithms  # type: ignore[attr-defined]


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_many_steps(by_node: Group, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(hierarchical, "_PIECE_BYTES", 2**20)  # otherwise, each tensor here has a single piece
    count = by_node.size * (5 * 2**18 // dtype.itemsize + 3)
    rows = [torch.arange(13).roll(3 * rank).repeat(count // 13 + 1)[:count].to(dtype) for rank in range(by_node.size)]
    tensor = rows[by_node.rank].clone()
    dist.all_reduce(tensor, group=by_node.handle)
    assert torch.equal(tensor, functools.reduce(torch.add, rows))


def test_narrow_integers_wrap_around(by_node: Group) -> None:
    for dtype in (torch.uint8, torch.int8, torch.int16):
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        values = torch.randint(low, high + 1, (by_node.size, 40_000), generator=torch.manual_seed(7))
        tensor, expected = values[by_node.rank].to(dtype), values.sum(0).to(dtype)
        dist.all_reduce(tensor, group=by_node.handle)
        assert torch.equal(tensor, expected)


@needs_two_nodes
@pytest.mark.parametrize("is_by_node", [True, False], ids=["consecutive", "alternating"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.complex64], ids=str)
def test_two_levels(make: Make, world: mpicomm.World, taken: list[bool], is_by_node: bool, dtype: torch.dtype) -> None:
    handle, size, rank = make("two nodes"), world.size, world.rank
    if not is_by_node:  # e.g. srun --distribution=cyclic
        path_of(handle).split_by_node = lambda comm: comm.Split(comm.rank % (size // 2), comm.rank)
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.AVG) if dtype.is_floating_point else (dist.ReduceOp.SUM,)
    counts = (0, 1, 2, 1000, 50_001)  # of which some do not divide by the ranks of a node
    for count in counts:
        for op in ops:
            tensor = torch.arange(count).remainder_(11).add_(rank).to(dtype)
            dist.all_reduce(tensor, op, group=handle)
            total = torch.arange(count).remainder_(11).mul_(size).add_(sum(range(size)))
            expected = total.to(dtype) if op == dist.ReduceOp.SUM else (total.float() / size).to(dtype)
            assert torch.equal(tensor, expected)
    assert taken == [True] * (len(counts) * len(ops) if size % 2 == 0 else 0)


@needs_two_nodes
def test_sums_of_nodes_are_rounded_once(two_nodes: dist.ProcessGroup, world: mpicomm.World) -> None:
    """The sum of the first node, 1 + 2**-8, is no bfloat16 number, but the sum of all ranks is one."""
    of_ranks = [1.0, 2.0**-8, 2.0**-8]
    value = of_ranks[world.rank] if world.rank < len(of_ranks) else 0.0
    tensor = torch.full((1000,), value, dtype=torch.bfloat16)
    dist.all_reduce(tensor, group=two_nodes)
    assert torch.equal(tensor, torch.full((1000,), 1 + 2.0**-7, dtype=torch.bfloat16))


@needs_two_nodes
def test_nodes_are_added_in_one_order_in_all_blocks(two_nodes: dist.ProcessGroup, world: mpicomm.World) -> None:
    path, count = path_of(two_nodes), world.size // 2
    path.split_by_node = lambda comm: comm.Split(min(comm.rank, 2 * count - 1 - comm.rank), comm.rank)
    dist.all_reduce(torch.ones(1000), group=two_nodes)
    assert path.hierarchical._across.rank == min(world.rank, 2 * count - 1 - world.rank)


@pytest.mark.parametrize("setting", ["", "MPICOMM_NATIVE", "MPICOMM_SHARED_MEMORY"])
def test_promises_with_and_without_the_library(
    make: Make, world: mpicomm.World, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """The setting of one rank counts for all."""
    if setting and world.rank == world.size - 1:
        monkeypatch.setenv(setting, "0")
    handle = make()
    reduction_guarantees.check([3, 5000], handle)
    uses_slots = path_of(handle).slots is not None
    assert uses_slots == (not setting and world.size > 1 and nodes.has_library())


# -- conditions --------------------------------------------------------------------------------------------------------


@needs_two_nodes
def test_only_large_tensors_take_two_levels(make: Make, world: mpicomm.World, taken: list[bool]) -> None:
    nodes.require("two nodes")
    handle = make()
    path_of(handle).split_by_node = lambda comm: comm.Split(comm.rank // 2, comm.rank)
    dist.all_reduce(torch.ones(LARGE - 1), group=handle)
    assert not taken
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor, group=handle)
    for op, expected in ((dist.ReduceOp.MAX, 1.0), (dist.ReduceOp.PRODUCT, 1.0)):
        other = torch.ones(LARGE)
        dist.all_reduce(other, op, group=handle)
        assert bool((other == expected).all())
    assert taken == [True] * (world.size % 2 == 0)
    assert bool((tensor == world.size).all())


@needs_two_nodes
def test_memory_that_one_rank_cannot_offer(two_nodes: dist.ProcessGroup, world: mpicomm.World) -> None:
    """For example, the memory of a GPU: all ranks leave the operation to MPI."""
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, group=two_nodes)
    run = path_of(two_nodes).hierarchical.run
    plan = reductions.reduction_for(dist.ReduceOp.SUM, torch.float32, world.size, "all_reduce")
    assert not run(torch.ones(1000, device="meta") if world.rank == 0 else tensor, plan)
    assert bool((tensor == world.size).all())
    assert run(tensor, plan)
    assert bool((tensor == world.size**2).all())


@needs_two_nodes
@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "by the worker"])
@pytest.mark.parametrize("difference", ["size", "dtype", "op"])
def test_different_calls_are_refused_on_all_ranks(
    two_nodes: dist.ProcessGroup, world: mpicomm.World, is_async: bool, difference: str
) -> None:
    """The last rank is on another node than the first one."""
    is_odd = world.rank == world.size - 1
    tensor = torch.ones(1000 + (is_odd and difference == "size"))
    if is_odd and difference == "dtype":
        tensor = tensor.view(torch.int32)
    before, op = tensor.clone(), dist.ReduceOp.AVG if is_odd and difference == "op" else dist.ReduceOp.SUM
    with pytest.raises(RuntimeError, match="4000 to 4004 bytes" if difference == "size" else "got different calls"):
        finish(dist.all_reduce(tensor, op, group=two_nodes, async_op=is_async))
    assert torch.equal(tensor, before)
    with pytest.raises(mpicomm.MpicommError, match="cannot be used any more"):
        dist.all_reduce(tensor, group=two_nodes)


@needs_two_nodes
def test_an_exception_within_an_operation_breaks_the_group(
    two_nodes: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:

    def interrupted(_tensor: torch.Tensor) -> bool:
        raise KeyboardInterrupt

    dist.all_reduce(torch.ones(1000), group=two_nodes)
    monkeypatch.setattr(path_of(two_nodes).hierarchical._node_slots, "all_gather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(torch.ones(1000), group=two_nodes)
    with pytest.raises(mpicomm.MpicommError, match="was interrupted by KeyboardInterrupt"):
        dist.all_reduce(torch.ones(1000), group=two_nodes)


# -- ranks that cannot share memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, -1], ids=["creating rank", "opening rank"])
def test_where_there_is_no_memory_either_mpi_is_enough(
    make: Make, world: mpicomm.World, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    nodes.require("slots")
    failing = rank % world.size
    if world.rank == failing:
        monkeypatch.setattr(slots, "_create_memory" if failing == 0 else "_open_memory", refuse)
    handle = make()
    tensor = torch.ones(LARGE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.all_reduce(tensor, group=handle)
        dist.all_reduce(tensor, group=handle)
    assert bool((tensor == world.size**2).all())
    messages = [str(each.message) for each in caught if "cannot share memory" in str(each.message)]
    assert len(messages) == (world.rank == 0 and world.size > 1)
    assert all("No space left on device" in each for each in messages)


class SplitAlone:
    """A communicator whose `Split` does not wait for other ranks."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Split(self, _color: int, _key: int) -> Any:  # noqa: N802  mpi4py's name
        return mpi.api().COMM_SELF.Dup()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("why", ["unequal nodes", "no memory on one node"])
def test_nodes_that_cannot_make_two_levels(make: Make, world: mpicomm.World, taken: list[bool], why: str) -> None:
    """All ranks must detect it; otherwise some ranks would wait for the others."""
    handle = make("two nodes")
    path = path_of(handle)
    if why == "unequal nodes":
        path.split_by_node = lambda comm: comm.Split(comm.rank == 0, comm.rank)
    elif world.rank < 2:
        path._connect = lambda _node_comm: None
    node_comm = path.split_by_node(path._comm)
    path.split_by_node = lambda _comm: node_comm
    comm = path._comm
    path._comm = SplitAlone(comm)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        path._open()
    path._comm = comm
    assert world.comm.allgather(path.hierarchical is None) == [True] * world.size
    tensor = torch.full((1000,), float(world.rank))
    dist.all_reduce(tensor, group=handle)
    assert torch.equal(tensor, torch.full((1000,), float(sum(range(world.size)))))
    assert not taken


def test_shared_memory_is_reserved(world: mpicomm.World) -> None:
    """Without the reservation, accessing the memory could terminate a rank if too little is available."""
    descriptor, _memory = slots._create_memory(MIB)
    assert 512 * os.fstat(descriptor).st_blocks >= MIB
    os.close(descriptor)


def test_another_process_of_that_number_is_no_rank(world: mpicomm.World) -> None:
    descriptor, memory = slots._create_memory(MIB)
    with pytest.raises(OSError, match="different process"):
        slots._open_memory((os.getpid(), descriptor, b"somebody else's"), MIB)
    with pytest.raises(OSError, match="different process"):
        slots._open_memory((os.getpid(), descriptor, slots._token(memory)), 2 * MIB)
    os.close(descriptor)


def test_nothing_is_left(world: mpicomm.World) -> None:
    """A destroyed group leaves no memory and no descriptors, and never creates files."""
    nodes.require("slots")
    before = files_in("/dev/shm")
    gc.collect()  # frees the memory of groups that earlier tests aborted
    dist.barrier()
    for _ in range(2):  # in the first iteration, other code may fill its caches
        mapped, opened = shared_mappings(), len(files_in("/proc/self/fd"))
        handle = dist.new_group(list(range(world.size)))
        nodes.lead_by("slots", handle)
        dist.all_reduce(torch.ones(MIB), group=handle)
        assert shared_mappings() == mapped + (world.size > 1)
        dist.destroy_process_group(handle)
        assert shared_mappings() == mapped
        found = len(files_in("/proc/self/fd"))
    assert found <= opened
    assert not [name for name in files_in("/dev/shm") - before if "mpicomm" in name]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", nodes.KINDS)
def test_communicators_are_freed(world: mpicomm.World, kind: str) -> None:
    nodes.require(kind)
    handle = dist.new_group(list(range(world.size)))
    nodes.lead_by(kind, handle)
    dist.all_reduce(torch.ones(1), group=handle)
    comms = list(path_of(handle)._comms)
    assert len(comms) == (2 if kind == "two nodes" and world.size > 2 and world.size % 2 == 0 else 1)
    dist.destroy_process_group(handle)
    assert all(comm == mpi.api().COMM_NULL for comm in comms)


def files_in(directory: str) -> set[str]:
    return {path.name for path in Path(directory).iterdir()}


def shared_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:mpicomm")
