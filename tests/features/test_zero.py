"""ZeroRedundancyOptimizer shards the optimizer state over the ranks: its updates equal those of the plain optimizer."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import mpicomm
from tests.features.problem import (
    SMALL_BUCKETS,
    assert_identical_on_all_ranks,
    assert_same,
    batches,
    dense_model,
    loss_of,
    train,
)

STEPS = 4
ADAM = {"lr": 0.01, "weight_decay": 0.1}
UPDATES_MISSED = 2  # overlapping starts after DDP has rebuilt its buckets and the optimizer has recorded them


def train_alone(model: torch.nn.Module, data: torch.Tensor) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    train(model, optimizer, data.flatten(1, 2))
    return optimizer


def sharded(model: torch.nn.Module, **options: bool) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options, **ADAM)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "bucket-views"])
def test_training_equals_training_alone(world: mpicomm.World, views: bool) -> None:
    data = batches(world, STEPS)
    model = dense_model()
    alone = copy.deepcopy(model)
    train_alone(alone, data)

    parallel = DistributedDataParallel(model)
    train(parallel, sharded(parallel, parameters_as_bucket_view=views), data[:, world.rank])
    assert_same(model, alone)
    assert_identical_on_all_ranks(model)


def test_each_state_is_on_one_rank(world: mpicomm.World) -> None:
    parallel = DistributedDataParallel(dense_model())
    optimizer = sharded(parallel)
    train(parallel, optimizer, batches(world, steps=1)[:, world.rank])
    owners = torch.tensor([parameter in optimizer.optim.state for parameter in parallel.parameters()]).int()
    dist.all_reduce(owners)
    assert owners.tolist() == [1] * len(owners)


@pytest.mark.parametrize("root", [0, -1])
def test_the_state_is_put_together_on_one_rank(world: mpicomm.World, root: int) -> None:
    data = batches(world, STEPS)
    model = dense_model()
    alone = copy.deepcopy(model)
    expected = train_alone(alone, data).state_dict()

    parallel = DistributedDataParallel(model)
    optimizer = sharded(parallel)
    train(parallel, optimizer, data[:, world.rank])
    optimizer.consolidate_state_dict(to=root % world.size)
    if world.rank == root % world.size:
        state = optimizer.state_dict()["state"]
        torch.testing.assert_close(state, expected["state"], rtol=1e-9, atol=1e-11)


def test_training_continues_from_a_saved_state(world: mpicomm.World) -> None:
    """The state is that of the plain optimizer after two steps; each rank loads its part of it."""
    data = batches(world, STEPS)
    alone = dense_model()
    plain = train_alone(alone, data[:2])
    model = copy.deepcopy(alone)
    state = copy.deepcopy(plain.state_dict())
    train(alone, plain, data[2:].flatten(1, 2))

    parallel = DistributedDataParallel(model)
    optimizer = sharded(parallel)
    optimizer.load_state_dict(state)
    train(parallel, optimizer, data[2:, world.rank])
    assert_same(model, alone)


@pytest.mark.filterwarnings("ignore:.*TorchScript:DeprecationWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("shard_buckets", [False, True], ids=["whole-buckets", "split-buckets"])
@pytest.mark.parametrize("hook", [hook_with_zero_step, hook_with_zero_step_interleaved])
def test_updates_during_the_backward_pass(world: mpicomm.World, hook: Callable, shard_buckets: bool) -> None:
    """Each rank updates its buckets and broadcasts them in DDP's hook; if interleaved, in callbacks of the reductions.

    Rank 0 delays each gradient: its callbacks run before it starts the next reduction, those of other ranks afterwards.
    """
    if "requires NCCL" in " ".join(inspect.getsource(hook).replace('"', "").split()):
        pytest.skip("torch's hook is for NCCL alone")
    data = batches(world, UPDATES_MISSED + STEPS)
    model = dense_model()
    alone = copy.deepcopy(model)
    train_alone(alone, data[UPDATES_MISSED:])

    parallel = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS)
    optimizer = sharded(parallel, overlap_with_ddp=True)
    parallel.register_comm_hook(None, hook(allreduce_hook, parallel, optimizer, shard_buckets))
    for parameter in parallel.parameters():
        parameter.register_hook(lambda _gradient: time.sleep(0.005 * (world.rank == 0)))
    for samples in data[:, world.rank]:
        parallel.zero_grad()
        loss_of(parallel, samples).backward()
    assert_same(model, alone)
    assert_identical_on_all_ranks(model)
