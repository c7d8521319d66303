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
    sgd,
    train,
    train_alone,
)

pytestmark = pytest.mark.each_torch("DDP")


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
