"""Groups: creation by all ranks or only by the members, destruction, and the world itself."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm import mpi, torch_internals

pytestmark = pytest.mark.each_torch("groups")


@pytest.mark.each_torch("bootstrap")
def test_the_world_agrees_with_mpi(world: mpicomm.World) -> None:
    comm = world.comm
    assert (world.rank, world.size) == (comm.rank, comm.size) == (dist.get_rank(), dist.get_world_size())
    assert world.local_size == world.size  # the tests run on one host
    assert world.local_rank == world.rank
    assert (world.node_rank, world.num_nodes) == (0, 1)
    assert world.hosts == (world.hostname,) * world.size
    assert world.device == torch.device("cpu")
    assert world.backend == "mpi"
    assert f"rank {world.rank} of {world.size} on {world.hostname}" in str(world)
    with pytest.raises(AttributeError):
        world.rank = 5


@pytest.mark.each_torch("bootstrap")
def test_the_environment_agrees_with_mpi(world: mpicomm.World) -> None:
    expected = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": world.master_port,
        "TORCHELASTIC_USE_AGENT_STORE": 1,
    }
    assert {name: os.environ[name] for name in expected} == {name: str(value) for name, value in expected.items()}


@pytest.mark.each_torch("bootstrap")
def test_the_backend_by_name(world: mpicomm.World) -> None:
    assert dist.get_backend() == "mpicomm"
    assert dist.is_backend_available("mpicomm")
    for name in ("mpicomm", "mpicomm_nccl"):
        expected = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        assert dist.Backend.backend_capability[name] == expected


@pytest.mark.each_torch("bootstrap")
def test_bootstrap_again_gives_the_same_world(world: mpicomm.World) -> None:
    assert mpicomm.bootstrap() is mpicomm.bootstrap("mpi", device=str(world.device)) is world
    assert mpicomm.current_world() is world


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "gloo"}, "before with backend='mpi', got backend='gloo'"),
        ({"timeout": 5}, "before with timeout=None, got timeout=5"),
        ({"device": "cuda:7"}, "before with device=None, got device='cuda:7'"),
    ],
)
def test_bootstrap_again_with_other_arguments(world: mpicomm.World, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mpicomm.bootstrap(**arguments)
    assert mpicomm.bootstrap() is world


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("equal_numbers_of_groups")
def test_a_group_made_by_its_members_alone(world: mpicomm.World) -> None:
    """The other ranks do not take part; creating a communicator over the world would require them."""
    if world.rank < 2:
        group = dist.new_group([0, 1], use_local_synchronization=True)
        tensor = torch.tensor([world.rank])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 1
        dist.destroy_process_group(group)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_destroyed_group_cannot_be_used(world: mpicomm.World, is_async: bool) -> None:
    group = dist.new_group(list(range(world.size)))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group, async_op=True)  # starts the worker of the group, which must end with the group
    dist.destroy_process_group(group)
    assert tensor.item() == world.size
    options = torch_internals.AllreduceOptions()
    options.asyncOp = is_async
    for call in (
        lambda: group.allreduce([torch.ones(1)], options),  # the fast path
        lambda: group.allreduce([torch.ones(3, 2)[:, 0]], options),
        lambda: group.allreduce(torch.ones(1)),
    ):
        with pytest.raises(mpicomm.MpicommError, match="destroyed"):
            call()
    with pytest.raises(TypeError, match="expected a tensor, got int"):
        group.allreduce([3], options)


def test_a_destroyed_group_frees_its_communicator(world: mpicomm.World) -> None:
    group = dist.new_group(list(range(world.size)))
    comm = group._executor.comm
    dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
    assert comm != mpi.api().COMM_NULL
    dist.destroy_process_group(group)
    assert comm == mpi.api().COMM_NULL


def test_names_and_descriptions(world: mpicomm.World) -> None:
    group = dist.new_group(list(range(world.size)), group_desc="all of them")
    assert group.group_desc == "all of them"
    assert group.group_name
    assert group.group_name != dist.group.WORLD.group_name
    dist.destroy_process_group(group)


def test_a_device_mesh(world: mpicomm.World) -> None:
    mesh = dist.init_device_mesh("cpu", (world.size,), mesh_dim_names=("data",))
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=mesh.get_group("data"))
    assert torch.equal(tensor, torch.full((2,), float(world.size)))
