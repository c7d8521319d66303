"""DistributedDataParallel on the backend gives the gradients of the same computation in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import mpicomm
from tests.features.problem import (
    BATCH,
    FEATURES,
    SMALL_BUCKETS,
    assert_identical_on_all_ranks,
    assert_same,
    batches,
    dense_model,
    loss_of,
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
