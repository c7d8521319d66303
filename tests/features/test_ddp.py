"""DistributedDataParallel on the backend gives the gradients of the same computation in one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpicomm
from tests.features.problem import (
    BATCH,
    FEATURES,
    SMALL_BUCKETS,
    Weight,
    assert_identical_on_all_ranks,
    assert_same,
    assert_same_gradients,
    batches,
    dense_model,
    loss_of,
    numbers_of,
    sgd,
    train,
    train_alone,
)

pytestmark = pytest.mark.each_torch("DDP")


class Branches(torch.nn.Module):
    """A network with two branches, of which each step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(FEATURES, 16)
        self.branches = torch.nn.ModuleList([torch.nn.Linear(16, 1), torch.nn.Linear(16, 1)])

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](torch.tanh(self.trunk(inputs)))


class TwoDtypes(torch.nn.Module):
    """A network whose gradients cannot share a bucket, because their dtypes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, 16, dtype=torch.float32)
        self.second = torch.nn.Linear(16, 1, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs.float())).double())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": SMALL_BUCKETS},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=["plain", "many-buckets", "bucket-views", "static-graph", "find-unused"],
)
def test_training_equals_training_alone(world: mpicomm.World, options: dict) -> None:
    data = batches(world, steps=5)
    model = dense_model()
    alone = copy.deepcopy(model)
    train_alone(alone, data)

    parallel = DistributedDataParallel(model, **options)
    train(parallel, sgd(parallel), data[:, world.rank])
    assert_same(model, alone)
    assert_identical_on_all_ranks(model)


def test_buckets_in_flight_give_the_same_bits_as_one_after_the_other(world: mpicomm.World) -> None:
    def in_the_call(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        averaged = bucket.buffer().div_(world.size)
        dist.all_reduce(averaged)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(averaged)
        return done

    in_the_call.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]})
    data = batches(world, steps=10).float()
    torch.manual_seed(0)
    deep = torch.nn.Sequential(*[torch.nn.Linear(FEATURES, FEATURES) for _ in range(40)])
    in_flight, one_by_one = (
        DistributedDataParallel(copy.deepcopy(deep), bucket_cap_mb=SMALL_BUCKETS) for _ in range(2)
    )
    one_by_one.register_comm_hook(None, in_the_call)
    for parallel in (in_flight, one_by_one):
        train(parallel, sgd(parallel), data[:, world.rank])
    for mine, right in zip(in_flight.parameters(), one_by_one.parameters(), strict=True):
        assert torch.equal(mine, right)


def test_the_start_is_rank_0s(world: mpicomm.World) -> None:
    torch.manual_seed(world.rank)
    parallel = DistributedDataParallel(torch.nn.Linear(3, 3))
    torch.manual_seed(0)
    expected = torch.nn.Linear(3, 3)
    assert torch.equal(parallel.module.weight, expected.weight)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "bucket-views"])
def test_no_sync_accumulates(world: mpicomm.World, views: bool) -> None:
    data = batches(world, steps=2)
    alone = dense_model()
    for step in data:
        loss_of(alone, step.flatten(0, 1)).backward()

    parallel = DistributedDataParallel(dense_model(), gradient_as_bucket_view=views)
    with parallel.no_sync():
        loss_of(parallel, data[0, world.rank]).backward()
    loss_of(parallel, data[1, world.rank]).backward()
    assert_same_gradients(parallel, alone)


def test_unused_parameters(world: mpicomm.World) -> None:
    """Even and odd ranks use different branches; the mean gradient of a branch includes zeros of the other ranks."""
    torch.manual_seed(0)
    model = Branches().double()
    alone = copy.deepcopy(model)
    data = batches(world, steps=1)[0]
    sum(loss_of(alone, data[rank], rank % 2) for rank in range(world.size)).backward()

    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    loss_of(parallel, data[world.rank], world.rank % 2).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        if theirs.grad is not None:  # None with one rank, for the branch that no rank used
            torch.testing.assert_close(mine.grad, theirs.grad / world.size, rtol=1e-9, atol=1e-11)


def test_two_dtypes(world: mpicomm.World) -> None:
    data = batches(world, steps=1)[0]
    torch.manual_seed(0)
    model = TwoDtypes()
    alone = copy.deepcopy(model)
    loss_of(alone, data.flatten(0, 1)).backward()

    parallel = DistributedDataParallel(model)
    loss_of(parallel, data[world.rank]).backward()
    # The second layer is as exact as its inputs, which are computed in float32 with different batch sizes.
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_sums_of_bfloat16_are_rounded_once(world: mpicomm.World) -> None:
    """DDP multiplies the gradients by 1 / size before the reduction, and rounds the products."""
    parallel = DistributedDataParallel(Weight(1000).bfloat16())
    parallel(numbers_of(world.rank).bfloat16()).backward()
    addends = [numbers_of(rank).bfloat16() * (1 / world.size) for rank in range(world.size)]
    expected = torch.stack(addends).float().sum(0).bfloat16()
    assert torch.equal(parallel.module.weight.grad, expected)


def test_buffers_follow_rank_0(world: mpicomm.World) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.BatchNorm1d(8)).double()
    parallel = DistributedDataParallel(model)
    alone = copy.deepcopy(model)
    data = batches(world, steps=3)
    for step in data:
        parallel(step[world.rank]).sum().backward()
        alone(step[0])
    parallel.eval()(torch.zeros(BATCH, FEATURES, dtype=torch.float64))  # copies rank 0's buffers without updating them
    for mine, rank_0s in zip(model.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(mine, rank_0s, rtol=1e-9, atol=1e-11)


def test_on_a_part_of_the_world(world: mpicomm.World) -> None:
    evens = [rank for rank in range(world.size) if rank % 2 == 0]
    group = dist.new_group(evens)
    if world.rank in evens:
        data = batches(world, steps=1)[0]
        alone = dense_model()
        loss_of(alone, data[evens].flatten(0, 1)).backward()
        parallel = DistributedDataParallel(dense_model(), process_group=group)
        loss_of(parallel, data[world.rank]).backward()
        assert_same_gradients(parallel, alone)
        dist.destroy_process_group(group)
