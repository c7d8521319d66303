"""Python objects of several megabytes, batches of messages, coalesced collectives, and all ways to create a group."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import mpicomm
from tests.torches import all_gather_single, reduce_scatter_single
from tests.worlds import Group, on_groups

MEGABYTE = 2**20
SHAPES = [(5,), (2, 3), (0,), (1, 4, 1)]
ROUTES = on_groups("world", "staged")


def object_of(rank: int) -> dict[str, object]:
    """Return an object with a different size for each rank: almost empty for rank 0, `rank` megabytes for others."""
    return {"rank": rank, "bytes": random.Random(rank).randbytes(rank * MEGABYTE), "tensor": torch.arange(rank)}


def assert_is_of(received: object, rank: int) -> None:
    expected = object_of(rank)
    assert isinstance(received, dict)
    assert received.keys() == expected.keys()
    assert received["rank"] == rank
    assert received["bytes"] == expected["bytes"]
    assert torch.equal(received["tensor"], expected["tensor"])


def numbers(rank: int, *shape: int) -> torch.Tensor:
    """Return the numbers of a rank: integers, whose sums are exact in any order."""
    return torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(rank)).double()


# -- objects -----------------------------------------------------------------------------------------------------------


@on_groups("world", "parity")
def test_gathered_objects_of_all_ranks(group: Group) -> None:
    collected: list[object] = [None] * group.size
    dist.all_gather_object(collected, object_of(group.rank), group=group.handle)
    for rank, received in enumerate(collected):
        assert_is_of(received, rank)


@on_groups("world", "parity")
def test_objects_gathered_and_scattered(group: Group) -> None:
    last = group.size - 1
    gathered = [None] * group.size if group.rank == last else None
    dist.gather_object(object_of(group.rank), gathered, group_dst=last, group=group.handle)
    for rank, received in enumerate(gathered or []):
        assert_is_of(received, rank)
    mine: list[object] = [None]
    dist.scatter_object_list(mine, gathered, group_src=last, group=group.handle)
    assert_is_of(mine[0], group.rank)


@on_groups("world", "parity")
def test_objects_of_one_rank(group: Group) -> None:
    last = group.size - 1
    objects = [object_of(3), None, "text", object_of(1)] if group.rank == last else [None] * 4
    dist.broadcast_object_list(objects, group_src=last, group=group.handle)
    assert_is_of(objects[0], 3)
    assert objects[1:3] == [None, "text"]
    assert_is_of(objects[3], 1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("use_batch", [False, True])
def test_objects_passed_on(world: mpicomm.World, use_batch: bool) -> None:
    """Each rank appends to the objects that it received, and sends them to the next rank."""
    options = {"use_batch": use_batch}
    if "use_batch" not in inspect.signature(dist.send_object_list).parameters:
        if use_batch:
            pytest.skip("torch sends objects in no batch")
        options = {}
    objects: list[object] = [object_of(1), "from 0"]
    if world.rank:
        objects = [None, None]
        assert dist.recv_object_list(objects, world.rank - 1, **options) == world.rank - 1
    assert_is_of(objects[0], 1)
    assert objects[1] == "from " + ", ".join(map(str, range(world.rank or 1)))
    if world.rank < world.size - 1:
        sent = [objects[0], f"{objects[1]}, {world.rank}" if world.rank else objects[1]]
        dist.send_object_list(sent, world.rank + 1, **options)


# -- batches and coalescing --------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_a_batch_from_each_rank_to_each_rank(world: mpicomm.World) -> None:
    """Each rank sends two messages to each other rank: one whose size both ranks know, then a large one."""
    others = [rank for rank in range(world.size) if rank != world.rank]
    pairs = {rank: (torch.empty(rank + world.rank), torch.empty(MEGABYTE // 4)) for rank in others}
    operations = []
    for rank in others:
        small, large = torch.full((rank + world.rank,), float(rank)), torch.full((MEGABYTE // 4,), float(rank))
        operations += [dist.P2POp(dist.isend, each, rank) for each in (small, large)]
        operations += [dist.P2POp(dist.irecv, each, rank) for each in pairs[rank]]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for rank in others:
        assert all((each == world.rank).all() for each in pairs[rank])


@pytest.mark.mpi(min_size=2)
def test_a_batch_with_tags(world: mpicomm.World) -> None:
    """Messages with different tags may be sent and received in different orders."""
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    received = [torch.empty(2), torch.empty(2)]
    operations = [dist.P2POp(dist.irecv, received[tag], before, tag=tag) for tag in (0, 1)]
    operations += [dist.P2POp(dist.isend, torch.full((2,), 10.0 * tag), after, tag=tag) for tag in (1, 0)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert [each.tolist() for each in received] == [[0.0, 0.0], [10.0, 10.0]]


def run_coalesced(group: Group, is_async: bool, calls: list[Callable[[], object]]) -> None:
    with _coalescing_manager(group.handle, async_ops=is_async) as handle:
        for call in calls:
            call()
    if is_async:
        handle.wait()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("op", "reduced"), [("SUM", torch.sum), ("AVG", torch.mean)])
@ROUTES
def test_all_reduces_coalesced(group: Group, op: str, reduced: Callable, is_async: bool) -> None:
    tensors = [numbers(group.rank, *shape) for shape in SHAPES]
    expected = [reduced(torch.stack([numbers(rank, *shape) for rank in range(group.size)]), dim=0) for shape in SHAPES]
    reduce_op = getattr(dist.ReduceOp, op)
    run_coalesced(
        group, is_async, [lambda each=each: dist.all_reduce(each, reduce_op, group.handle) for each in tensors]
    )
    torch.testing.assert_close(tensors, expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("is_async", [False, True])
@ROUTES
def test_all_gathers_coalesced(group: Group, is_async: bool) -> None:
    inputs = [numbers(group.rank, *shape) for shape in SHAPES]
    outputs = [torch.empty(group.size * rows, *shape, dtype=torch.float64) for rows, *shape in SHAPES]
    calls = [
        lambda output=output, mine=mine: all_gather_single(output, mine, group.handle)
        for output, mine in zip(outputs, inputs, strict=True)
    ]
    run_coalesced(group, is_async, calls)
    for output, shape in zip(outputs, SHAPES, strict=True):
        assert torch.equal(output, torch.cat([numbers(rank, *shape) for rank in range(group.size)]))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("op", "reduced"), [("SUM", torch.sum), ("AVG", torch.mean)])
@ROUTES
def test_reduce_scatters_coalesced(group: Group, op: str, reduced: Callable, is_async: bool) -> None:
    shapes = [(group.size * rows, columns) for rows, columns in [(1, 3), (4, 2), (2, 0)]]
    outputs = [torch.empty(rows // group.size, columns, dtype=torch.float64) for rows, columns in shapes]
    reduce_op = getattr(dist.ReduceOp, op)
    calls = [
        lambda output=output, shape=shape: reduce_scatter_single(
            output, numbers(group.rank, *shape), reduce_op, group.handle
        )
        for output, shape in zip(outputs, shapes, strict=True)
    ]
    run_coalesced(group, is_async, calls)
    for output, shape in zip(outputs, shapes, strict=True):
        whole = reduced(torch.stack([numbers(rank, *shape) for rank in range(group.size)]), dim=0)
        torch.testing.assert_close(output, whole.chunk(group.size)[group.rank], rtol=1e-15, atol=0)


# -- groups ------------------------------------------------------------------------------------------------------------


def assert_works(group: dist.ProcessGroup, ranks: list[int]) -> None:
    """Check that the group has these members, in this order, and that they can communicate."""
    assert dist.get_process_group_ranks(group) == ranks
    assert dist.get_group_rank(group, dist.get_rank()) == ranks.index(dist.get_rank())
    gathered = torch.empty(len(ranks), dtype=torch.int64)
    all_gather_single(gathered, torch.tensor([dist.get_rank()]), group)
    assert gathered.tolist() == ranks


@pytest.mark.usefixtures("equal_numbers_of_groups")
def test_groups_made_by_their_members(world: mpicomm.World) -> None:
    """Pairs of ranks create their groups concurrently; then all ranks create two groups with equal members.

    torch derives the names from the members and from the number of groups that each member is in, which must be equal.
    """
    first = world.rank - world.rank % 2
    pair = [rank for rank in (first, first + 1) if rank < world.size]
    assert_works(dist.new_group(pair, use_local_synchronization=True), pair)
    everyone = list(range(world.size))
    twins = [dist.new_group(everyone, use_local_synchronization=True) for _ in range(2)]
    assert twins[0].group_name != twins[1].group_name
    for twin in reversed(twins):
        assert_works(twin, everyone)


def test_members_in_any_order(world: mpicomm.World) -> None:
    """torch sorts the members."""
    everyone = list(range(world.size))
    assert_works(dist.new_group(everyone[::-1]), everyone)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_subgroups_of_one_size(world: mpicomm.World, size: int) -> None:
    if world.size % size:
        pytest.skip(f"{world.size} ranks do not make groups of {size}")
    mine, subgroups = dist.new_subgroups(group_size=size)
    first = world.rank - world.rank % size
    assert len(subgroups) == world.size // size
    assert_works(mine, list(range(first, first + size)))


def test_subgroups_of_several_sizes(world: mpicomm.World) -> None:
    cut = (world.size + 2) // 3
    parts = [part for part in (list(range(cut)), list(range(cut, world.size))) if part]
    mine, _ = dist.new_subgroups_by_enumeration(parts)
    assert_works(mine, next(part for part in parts if world.rank in part))


@pytest.fixture
def bound_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bind the world to a device, as on a host with GPUs: torch only splits groups that are bound to a device."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(dist.group.WORLD, "bound_device_id", torch.device("cuda", 0))


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "split_group"), reason="torch splits off groups of NCCL alone")
@pytest.mark.usefixtures("bound_device", "equal_numbers_of_groups")
def test_groups_split_off(world: mpicomm.World) -> None:
    """torch numbers the ranks within the parent group, and returns no group on ranks that are in no part."""
    first = world.rank - world.rank % 2
    parts = [[rank for rank in (start, start + 1) if rank < world.size] for start in range(0, world.size, 2)]
    pair = dist.split_group(split_ranks=parts)
    assert_works(pair, parts[first // 2])
    alone = dist.split_group(pair, split_ranks=[[0]])
    if world.rank == first:
        assert_works(alone, [first])
    else:
        assert alone in (None, dist.GroupMember.NON_GROUP_MEMBER)  # None before torch 2.15, NON_GROUP_MEMBER since


@pytest.mark.usefixtures("bound_device")
def test_groups_and_meshes_on_a_bound_device(world: mpicomm.World) -> None:
    """If the world is bound to a device and supports splitting, torch also calls it on ranks outside a new group."""
    group = dist.new_group([0])
    if world.rank == 0:
        assert_works(group, [0])
    mesh = dist.init_device_mesh("cpu", (1, world.size), mesh_dim_names=("outer", "inner"))
    assert_works(mesh.get_group("outer"), [world.rank])
    assert_works(mesh.get_group("inner"), list(range(world.size)))


def test_groups_side_by_side(world: mpicomm.World) -> None:
    """The ranks start the collectives of different groups in different orders; no group waits for another one."""
    everyone = list(range(world.size))
    groups = [dist.new_group(everyone) for _ in range(3)]
    tensors = [torch.full((1000,), float(place)) for place in range(3)]
    order = range(3) if world.rank % 2 else reversed(range(3))
    works = [dist.all_reduce(tensors[place], group=groups[place], async_op=True) for place in order]
    for work in works:
        work.wait()
    for place, tensor in enumerate(tensors):
        assert (tensor == place * world.size).all()
