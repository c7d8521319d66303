"""Large tensors through the shared memory of a node: conditions, results, and the fallback to MPI."""

from __future__ import annotations

import functools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm import mpi
from mpicomm.backend import shm_selector
from mpicomm.shm import cma, hierarchical, segment
from tests import nodes
from tests.torches import all_gather_single, reduce_scatter_single
from tests.worlds import Group

MIB = 2**20
LARGE = 2 * MIB  # float32 elements: large enough for shared memory with any number of ranks
CHUNK = 2**18  # bytes that are reduced at a time when ranks read each other's memory
Make = Callable[[], dist.ProcessGroup]


@pytest.fixture
def make(world: mpicomm.World) -> Iterator[Make]:
    """Create groups of all ranks without slots, and destroy them at the end of the test."""
    made: list[dist.ProcessGroup] = []

    def new() -> dist.ProcessGroup:
        made.append(dist.new_group(list(range(world.size))))
        nodes.without_slots(made[-1])
        return made[-1]

    yield new
    for handle in made:
        dist.destroy_process_group(handle)


@pytest.fixture(params=nodes.KINDS)
def by_node(request: pytest.FixtureRequest, groups: dict[str, Group]) -> Group:
    nodes.require(request.param)
    return groups[request.param]


def random(size: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the inputs of all ranks, equal on all ranks: (size, count)."""
    return torch.randn(size, count, generator=torch.manual_seed(7)).to(dtype)


def start_and_wait(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    work.wait()


def path_of(handle: dist.ProcessGroup) -> Any:
    return handle._operations.node  # type: ignore[attr-defined]


def watch(handle: dist.ProcessGroup) -> list[bool]:
    """Return a list to which each operation that tries shared memory appends whether it used it."""
    taken: list[bool] = []
    path = path_of(handle)
    go = path._go

    def noted(*arguments: Any) -> bool:
        taken.append(go(*arguments))
        return taken[-1]

    path._go = noted
    return taken


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["direct", "segment"])
@pytest.mark.parametrize("count", [1, 3, CHUNK // 4 - 1, 3 * CHUNK // 4 + 5, 2 * MIB + 1])
def test_the_sum_is_made_in_the_order_of_ranks(groups: dict[str, Group], kind: str, count: int) -> None:
    nodes.require(kind)
    group = groups[kind]
    values = random(group.size, count)
    tensor = values[group.rank].clone()
    dist.all_reduce(tensor, group=group.handle)
    assert torch.equal(tensor, functools.reduce(torch.add, values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_many_chunks(by_node: Group, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(hierarchical, "_PIECE_BYTES", 2**20)  # otherwise, each tensor here has a single piece
    size, rank = by_node.size, by_node.rank
    block = 5 * CHUNK // dtype.itemsize + 3
    table = torch.arange(13)
    rows = [table.roll(3 * each).repeat(size * block // 13 + 1)[: size * block].to(dtype) for each in range(size)]
    total = functools.reduce(torch.add, rows)

    tensor = rows[rank].clone()
    dist.all_reduce(tensor, group=by_node.handle)
    assert torch.equal(tensor, total)

    tensor = rows[rank].clone()
    dist.reduce(tensor, group_dst=size - 1, group=by_node.handle)
    assert torch.equal(tensor, total if rank == size - 1 else rows[rank])

    out = torch.empty(block, dtype=dtype)
    reduce_scatter_single(out, rows[rank], group=by_node.handle)
    assert torch.equal(out, total.view(size, block)[rank])

    whole = torch.empty(size * block, dtype=dtype)
    all_gather_single(whole, rows[rank][:block].clone(), group=by_node.handle)
    assert torch.equal(whole, torch.cat([row[:block] for row in rows]))

    tensor = rows[rank].clone()
    dist.broadcast(tensor, group_src=0, group=by_node.handle)
    assert torch.equal(tensor, rows[0])


def test_parameters_and_tensors_of_inference(by_node: Group) -> None:
    expected = torch.full((50_000,), float(by_node.size))
    parameter = torch.nn.Parameter(torch.ones(50_000))
    dist.all_reduce(parameter, group=by_node.handle)
    with torch.inference_mode():
        tensor = torch.ones(50_000)
        dist.all_reduce(tensor, group=by_node.handle)
    assert torch.equal(parameter, expected)
    assert torch.equal(tensor, expected)
    work = dist.all_reduce(tensor, dist.ReduceOp.AVG, group=by_node.handle, async_op=True)
    assert work is not None
    work.wait()
    assert torch.equal(tensor, expected)


def test_a_tensor_of_inference_outside_of_that_mode(world: mpicomm.World) -> None:
    with torch.inference_mode():
        tensor = torch.ones(LARGE)
    dist.all_reduce(tensor)
    assert bool((tensor == world.size).all())


def test_narrow_integers_wrap_around(by_node: Group) -> None:
    for dtype in (torch.uint8, torch.int8, torch.int16):
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        values = torch.randint(low, high + 1, (by_node.size, 40_000), generator=torch.manual_seed(7))
        tensor, expected = values[by_node.rank].to(dtype), values.sum(0).to(dtype)
        dist.all_reduce(tensor, group=by_node.handle)
        assert torch.equal(tensor, expected)


def test_successive_operations_do_not_overlap(by_node: Group) -> None:
    """A rank may start the next operation while others still read the memory of the previous one."""
    size, rank = by_node.size, by_node.rank
    for turn in range(40):
        count = 1 + 997 * turn
        tensor = torch.full((count,), float(rank + turn))
        dist.all_reduce(tensor, group=by_node.handle)
        assert bool((tensor == sum(range(size)) + size * turn).all())
        whole = torch.empty(size * count)
        all_gather_single(whole, torch.full((count,), float(rank - turn)), group=by_node.handle)
        assert torch.equal(whole, (torch.arange(size) - float(turn)).repeat_interleave(count))
        tensor.fill_(-1.0)
        whole.fill_(-1.0)


@pytest.mark.mpi(min_size=2)
def test_all_gather_waits_for_ranks_that_are_still_reading(
    groups: dict[str, Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 reads late; the other ranks would overwrite their tensors if they did not wait for it."""
    nodes.require("direct")
    group = groups["direct"]
    size, rank = group.size, group.rank
    dist.all_reduce(torch.ones(1), group=group.handle)  # opens the shared memory
    peers = path_of(group.handle)._node._peers
    read = peers.read

    def late(*arguments: Any) -> None:
        time.sleep(0.3 / size)
        read(*arguments)

    if rank == 0:
        monkeypatch.setattr(peers, "read", late)
    whole = torch.empty(1000 * size)
    all_gather_single(whole, torch.full((1000,), float(rank)), group=group.handle)
    got = whole.clone()
    whole.fill_(-1.0)
    assert torch.equal(got, torch.arange(float(size)).repeat_interleave(1000))


@pytest.mark.parametrize("kind", ["direct", "segment"])
def test_the_average_of_two_ranks(world: mpicomm.World, kind: str) -> None:
    nodes.require(kind)
    first = world.rank // 2 * 2
    pairs = [[rank, rank + 1][: world.size - rank] for rank in range(0, world.size, 2)]
    handle = dist.new_subgroups_by_enumeration(pairs)[0]
    nodes.lead_by(kind, handle)
    tensor = torch.full((1000,), float(world.rank))
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=handle)
    assert torch.equal(tensor, torch.full((1000,), first + (0.5 if first + 1 < world.size else 0.0)))
    dist.destroy_process_group(handle)


@pytest.mark.mpi(min_size=4)
def test_two_nodes_that_share_memory(make: Make, world: mpicomm.World) -> None:
    """Within a node, reduce_scatter and all_gather alternate between the halves of the shared memory."""
    handle = make()
    nodes.lead_by("two nodes", handle)
    path_of(handle).connect = nodes.by_segment
    taken = watch(handle)
    sizes = (1, 1000, 50_000, 3, 1_000_000)
    for count in sizes:
        tensor = torch.arange(float(count)) + world.rank
        dist.all_reduce(tensor, group=handle)
        assert torch.equal(tensor, torch.arange(float(count)) * world.size + sum(range(world.size)))
    assert taken == [True] * (len(sizes) if world.size % 2 == 0 else 0)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("is_by_node", [True, False], ids=["consecutive", "alternating"])
def test_all_operations_by_two_levels(make: Make, world: mpicomm.World, is_by_node: bool) -> None:
    handle, size, rank = make(), world.size, world.rank
    nodes.lead_by("two nodes", handle)
    if not is_by_node:  # e.g. srun --distribution=cyclic
        path_of(handle).split_by_node = lambda comm: comm.Split(comm.rank % (size // 2), comm.rank)
    taken = watch(handle)
    whole = torch.arange(float(1000 * size)).view(size, 1000)

    tensor = whole.flatten() + rank
    dist.all_reduce(tensor, group=handle)
    assert torch.equal(tensor, whole.flatten() * size + sum(range(size)))
    out = torch.empty(1000)
    reduce_scatter_single(out, whole.flatten() + 2 * rank, op=dist.ReduceOp.AVG, group=handle)
    assert torch.equal(out, whole[rank] + size - 1)
    gathered = torch.empty(size * 1000)
    all_gather_single(gathered, whole[rank].clone(), group=handle)
    assert torch.equal(gathered, whole.flatten())
    for root in range(size):
        tensor = whole[rank].clone()
        dist.broadcast(tensor, group_src=root, group=handle)
        assert torch.equal(tensor, whole[root])
    number = 3 + size if is_by_node else 1
    assert taken == [True] * (number if size % 2 == 0 else 0)


@pytest.mark.mpi(min_size=2)
def test_views_of_shared_memory_do_not_pile_up(groups: dict[str, Group], monkeypatch: pytest.MonkeyPatch) -> None:
    group = groups["segment"]
    monkeypatch.setattr(segment, "_MAX_SLOTS", 4)
    for count in range(1, 12):
        tensor = torch.full((count,), float(group.rank))
        dist.all_reduce(tensor, group=group.handle)
        assert torch.equal(tensor, torch.full((count,), float(sum(range(group.size)))))
    assert len(path_of(group.handle)._node._cached_slots) <= 4


# -- conditions --------------------------------------------------------------------------------------------------------


def test_large_tensors_take_it_and_small_ones_do_not(make: Make, world: mpicomm.World) -> None:
    handle = make()
    taken = watch(handle)
    dist.all_reduce(torch.ones(1000), group=handle)
    assert not taken
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor, group=handle)
    assert taken == [True] * (world.size > 1)
    assert bool((tensor == world.size).all())


@pytest.mark.parametrize("op", ["MAX", "MIN", "PRODUCT"])
def test_reductions_that_torch_computes_differently_use_mpi(make: Make, world: mpicomm.World, op: str) -> None:
    handle = make()
    taken = watch(handle)
    tensor = torch.full((LARGE,), 1.0 + world.rank)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=handle)
    assert not taken
    expected = {"MAX": world.size, "MIN": 1, "PRODUCT": math.factorial(world.size)}[op]
    assert torch.equal(tensor, torch.full((LARGE,), float(expected)))


def test_one_rank_that_does_not_want_it_keeps_all_from_it(
    make: Make, world: mpicomm.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.rank == world.size - 1:
        monkeypatch.setenv("MPICOMM_SHARED_MEMORY", "0")
    handle = make()
    taken = watch(handle)
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor, group=handle)
    assert not taken
    assert bool((tensor == world.size).all())


@pytest.mark.mpi(min_size=2)
def test_memory_that_one_rank_cannot_offer(make: Make, world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, memory that a GPU driver has mapped."""
    handle = make()
    taken = watch(handle)
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor, group=handle)
    if world.rank == 0:
        monkeypatch.setattr(path_of(handle)._node, "can_take", lambda _flat: False)
    dist.all_reduce(tensor, group=handle)
    monkeypatch.undo()
    dist.all_reduce(tensor, group=handle)
    assert taken == [True, False, True]
    assert bool((tensor == world.size**3).all())


def test_an_address_that_cannot_be_read_is_noticed(world: mpicomm.World) -> None:
    nodes.require("direct")
    peers, tensor = cma._Peers(world.comm), torch.ones(1)
    assert peers.can_read(world.rank, tensor.data_ptr())
    assert not peers.can_read(world.rank, 8)


@pytest.mark.parametrize("takes_turns", [True, False], ids=["at once", "by the worker"])
def test_unequal_sizes_are_refused_on_all_ranks(make: Make, world: mpicomm.World, takes_turns: bool) -> None:
    handle = make()
    tensor = torch.ones(LARGE + world.rank)
    if world.size == 1:
        return
    call = dist.all_reduce if takes_turns else start_and_wait
    with pytest.raises(RuntimeError, match=f"{4 * LARGE} to {4 * (LARGE + world.size - 1)} bytes"):
        call(tensor, group=handle)
    assert bool((tensor == 1).all())
    with pytest.raises(mpicomm.MpicommError, match="cannot be used any more"):
        dist.all_reduce(tensor, group=handle)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["direct", "segment", "two nodes"])
@pytest.mark.parametrize("difference", ["dtype", "operation", "root"])
def test_different_calls_are_refused_on_all_ranks(make: Make, world: mpicomm.World, kind: str, difference: str) -> None:
    nodes.require(kind)
    if kind == "two nodes" and world.size % 4:
        pytest.skip("requires nodes of equally many ranks")
    handle, is_odd = make(), world.rank == world.size - 1
    nodes.lead_by(kind, handle)
    tensor = torch.ones(1000).view(torch.int32 if is_odd and difference == "dtype" else torch.float32)
    before = tensor.clone()
    root = int(is_odd and difference == "root")
    call = functools.partial(dist.broadcast, group_src=root)
    if is_odd and difference == "operation":
        call = functools.partial(all_gather_single, before)
    with pytest.raises(RuntimeError, match="got different calls"):
        call(tensor[: 1000 // world.size] if is_odd and difference == "operation" else tensor, group=handle)
    assert torch.equal(tensor, before)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("part", ["compare", "reduce"])
def test_an_exception_within_an_operation_breaks_the_group(
    make: Make, world: mpicomm.World, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Other ranks may still write into its tensor, whose memory must be kept."""

    handle = make()
    dist.all_reduce(torch.ones(LARGE), group=handle)
    kind = type(path_of(handle)._node)
    compare = kind.compare

    def interrupted(*arguments: object) -> None:
        if part == "compare":  # an interrupt is handled when the ranks have met
            compare(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(kind, part, interrupted)
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(torch.ones(LARGE), group=handle)
    monkeypatch.undo()
    with pytest.raises(mpicomm.MpicommError, match="was interrupted by KeyboardInterrupt"):
        dist.all_reduce(torch.ones(LARGE), group=handle)
    assert shm_selector._abandoned.pop().numel() == LARGE


@pytest.mark.mpi(min_size=2)
def test_ranks_read_each_others_memory_where_the_kernel_allows_it(make: Make, world: mpicomm.World) -> None:
    assert cma.is_available(world.comm) == nodes.may_read()
    handle = make()
    dist.all_reduce(torch.ones(LARGE), group=handle)
    assert type(path_of(handle)._node) is (cma.CMACollectives if nodes.may_read() else segment.SegmentCollectives)


# -- ranks that cannot access each other's memory ----------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_where_reading_is_not_allowed_memory_is_shared(
    make: Make, world: mpicomm.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    nodes.require("direct")
    if world.rank == 0:
        monkeypatch.setattr(cma._Peers, "read", refuse)
    handle = make()
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor, group=handle)
    assert bool((tensor == world.size).all())
    assert isinstance(path_of(handle)._node, segment.SegmentCollectives)


@pytest.mark.parametrize("rank", [0, -1], ids=["creating rank", "opening rank"])
def test_where_there_is_no_memory_either_mpi_is_enough(
    make: Make, world: mpicomm.World, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cma, "is_available", lambda _comm: False)
    failing = rank % world.size
    if world.rank == failing:
        monkeypatch.setattr(segment, "_create" if failing == 0 else "_open", refuse)
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
def test_nodes_that_cannot_make_two_levels(make: Make, world: mpicomm.World, why: str) -> None:
    """All ranks must detect it; otherwise some ranks would wait for the others."""

    def refuse(_comm: Any) -> None:
        raise segment.NoSharedMemoryError("there is none")

    handle = make()
    nodes.lead_by("two nodes", handle)
    taken, path = watch(handle), path_of(handle)
    if why == "unequal nodes":
        path.split_by_node = lambda comm: comm.Split(comm.rank == 0, comm.rank)
    elif world.size % 2 == 0:
        path.connect = refuse if world.rank < 2 else nodes.by_segment
    node_comm = path.split_by_node(path._comm)
    path.split_by_node = lambda _comm: node_comm
    comm = path._comm
    path._comm = SplitAlone(comm)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        path._open()
    path._comm = comm
    assert world.comm.allgather(path._hierarchical is None) == [True] * world.size
    tensor = torch.full((1000,), float(world.rank))
    dist.all_reduce(tensor, group=handle)
    assert torch.equal(tensor, torch.full((1000,), float(sum(range(world.size)))))
    assert not taken


def test_shared_memory_is_reserved(world: mpicomm.World) -> None:
    """Without the reservation, accessing the memory could terminate a rank if too little is available."""
    descriptor, _memory = segment._create(MIB)
    assert 512 * os.fstat(descriptor).st_blocks >= MIB
    os.close(descriptor)


def test_another_process_of_that_number_is_no_rank(world: mpicomm.World) -> None:
    descriptor, memory = segment._create(MIB)
    with pytest.raises(OSError, match="different process"):
        segment._open((os.getpid(), descriptor, b"somebody else's"), MIB)
    with pytest.raises(OSError, match="different process"):
        segment._open((os.getpid(), descriptor, segment._token(memory)), 2 * MIB)
    os.close(descriptor)


def test_nothing_is_left(world: mpicomm.World) -> None:
    """A destroyed group leaves no memory and no descriptors, and never creates files."""
    before = files_in("/dev/shm")
    dist.barrier()
    for _ in range(2):  # in the first iteration, other code may fill its caches
        mapped, opened = shared_mappings(), len(files_in("/proc/self/fd"))
        handle = dist.new_group(list(range(world.size)))
        nodes.lead_by("segment", handle)
        dist.all_reduce(torch.ones(MIB), group=handle)
        assert shared_mappings() == mapped + (world.size > 1)
        dist.destroy_process_group(handle)
        assert shared_mappings() == mapped
        found = len(files_in("/proc/self/fd"))
    assert found <= opened
    assert not [name for name in files_in("/dev/shm") - before if "mpicomm" in name]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["segment", "two nodes"])
def test_communicators_are_freed(world: mpicomm.World, kind: str) -> None:
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
