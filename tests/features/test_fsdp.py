"""Fully sharded training on the backend gives the parameters of the same training in one process.

FSDP2 averages float32 and bf16 gradients with AVG, and float64 gradients with SUM and divisions before and after it.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import mpicomm
from tests.features.problem import FEATURES, batches, loss_of, sgd
from tests.features.sharding import shard_of

pytestmark = pytest.mark.each_torch("FSDP2")

TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.float64: {"rtol": 1e-10, "atol": 1e-12}}
BF16_STEP = {"rtol": 2**-8, "atol": 0.0}  # relative distance between adjacent bf16 numbers


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """Return a network whose sizes are not divisible by the number of ranks; some shards of the last bias are empty."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 17), torch.nn.Tanh(), torch.nn.Linear(17, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
    ).to(dtype)


def sharded(model: torch.nn.Sequential, mesh: dist.DeviceMesh, **options: object) -> torch.nn.Sequential:
    """Shard a copy of the model, in several groups of parameters."""
    model = copy.deepcopy(model)
    fully_shard(model[0], mesh=mesh, **options)
    fully_shard([model[2], model[4]], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model: torch.nn.Module, data: torch.Tensor) -> None:
    optimizer = sgd(model)
    for step in data:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def assert_shards(mine: list[torch.Tensor], whole: list[torch.Tensor], mesh: dist.DeviceMesh, **close: float) -> None:
    """Check this rank's shard of each tensor, on a one-dimensional mesh."""
    rank, size = mesh.get_local_rank(), mesh.size()
    for shard, tensor in zip(mine, whole, strict=True):
        torch.testing.assert_close(shard.to_local().detach(), shard_of(tensor, rank, size), **close)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_training_equals_training_alone(world: mpicomm.World, mesh: dist.DeviceMesh, dtype: torch.dtype) -> None:
    alone, data = network(dtype), batches(world, steps=3).to(dtype)
    model = sharded(alone, mesh)
    train(model, data[:, world.rank])
    train(alone, data.flatten(1, 2))
    assert_shards(list(model.parameters()), list(alone.parameters()), mesh, **TOLERANCES[dtype])


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_allocate_memory_from_process_group_for_comm"), reason="this torch does not ask for it"
)
def test_memory_that_the_group_may_allocate(world: mpicomm.World, mesh: dist.DeviceMesh) -> None:
    alone, data = network(), batches(world, steps=1).float()
    model = sharded(alone, mesh)
    for part in (model[0], model[2], model):
        part.set_allocate_memory_from_process_group_for_comm(True)
    train(model, data[:, world.rank])
    train(alone, data.flatten(1, 2))
    assert_shards(list(model.parameters()), list(alone.parameters()), mesh, **TOLERANCES[torch.float32])


@pytest.mark.parametrize("reduce_dtype", [torch.float32, None], ids=["reduced in float32", "reduced in bf16"])
def test_mixed_precision(world: mpicomm.World, mesh: dist.DeviceMesh, reduce_dtype: torch.dtype | None) -> None:
    """The gradients of all ranks are bf16; their mean is rounded at most once."""
    data = batches(world, steps=1)[0].float()
    means = [torch.zeros_like(parameter) for parameter in network().parameters()]
    for inputs in data.bfloat16():
        narrow = network(torch.bfloat16)
        loss_of(narrow, inputs).backward()
        for mean, gradient in zip(means, gradients(narrow), strict=True):
            mean.add_(gradient.float() / world.size)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model = sharded(network(), mesh, mp_policy=policy)
    loss_of(model, data[world.rank].bfloat16()).backward()
    close = BF16_STEP if reduce_dtype is None else TOLERANCES[torch.float32]
    assert_shards(gradients(model), means, mesh, **close)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_shards_within_replicas(world: mpicomm.World, replicas: int) -> None:
    """HSDP averages over the shards, then over the replicas."""
    if world.size % replicas:
        pytest.skip(f"{world.size} ranks do not make {replicas} replicas")
    shape = (replicas, world.size // replicas)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    alone, data = network(), batches(world, steps=3).float()
    model = sharded(alone, mesh)
    train(model, data[:, world.rank])
    train(alone, data.flatten(1, 2))
    parameters, expected = list(model.parameters()), list(alone.parameters())
    assert_shards(parameters, expected, mesh["shard"], **TOLERANCES[torch.float32])


def test_the_older_fsdp(world: mpicomm.World) -> None:
    alone, data = network(torch.float64), batches(world, steps=3)
    model = FullyShardedDataParallel(copy.deepcopy(alone), device_id=torch.device("cpu"), use_orig_params=True)
    train(model, data[:, world.rank])
    train(alone, data.flatten(1, 2))
    with FullyShardedDataParallel.summon_full_params(model):
        for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, **TOLERANCES[torch.float64])
