"""Python objects of several megabytes, and groups that torch splits off."""

from __future__ import annotations

import inspect
import random

import pytest
import torch
import torch.distributed as dist

import mpicomm
from tests.torches import all_gather_single

# -- objects -----------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("use_batch", [False, True])
def test_objects_passed_on(world: mpicomm.World, use_batch: bool) -> None:
    """Each rank appends to the objects that it received, and sends them to the next rank."""
    options = {"use_batch": use_batch}
    if "use_batch" not in inspect.signature(dist.send_object_list).parameters:
        if use_batch:
            pytest.skip("torch sends objects in no batch")
        options = {}
    large = random.Random(1).randbytes(2**20)
    objects: list[object] = [large, "from 0"]
    if world.rank:
        objects = [None, None]
        assert dist.recv_object_list(objects, world.rank - 1, **options) == world.rank - 1
    assert objects[0] == large
    assert objects[1] == "from " + ", ".join(map(str, range(world.rank or 1)))
    if world.rank < world.size - 1:
        sent = [objects[0], f"{objects[1]}, {world.rank}" if world.rank else objects[1]]
        dist.send_object_list(sent, world.rank + 1, **options)


# -- groups ------------------------------------------------------------------------------------------------------------


def assert_works(group: dist.ProcessGroup, ranks: list[int]) -> None:
    """Check that the group has these members, in this order, and that they can communicate."""
    assert dist.get_process_group_ranks(group) == ranks
    assert dist.get_group_rank(group, dist.get_rank()) == ranks.index(dist.get_rank())
    gathered = torch.empty(len(ranks), dtype=torch.int64)
    all_gather_single(gathered, torch.tensor([dist.get_rank()]), group)
    assert gathered.tolist() == ranks


@pytest.fixture
def bound_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bind the world to a device, as on a host with GPUs: torch only splits groups that are bound to a device."""
    monkeypatch.setattr(dist.Backend, "backend_capability", dict(dist.Backend.backend_capability))
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
