"""Training with different numbers of batches per rank, under Join, equals the same computation in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import mpicomm
from tests.features.problem import (
    SMALL_BUCKETS,
    assert_identical_on_all_ranks,
    assert_same,
    batches,
    dense_model,
    loss_of,
    sgd,
    train,
)

FEWEST = 2  # number of batches of rank 0; each further rank has one batch more than the previous rank


def batches_of(rank: int) -> int:
    return FEWEST + rank


def own(data: torch.Tensor, rank: int) -> torch.Tensor:
    return data[: batches_of(rank), rank]


def ranks_at(step: int, size: int) -> list[int]:
    """Return the ranks that still have a batch at this step."""
    return [rank for rank in range(size) if step < batches_of(rank)]


def train_alone(model: torch.nn.Module, data: torch.Tensor, optimizer: torch.optim.Optimizer, *, by_all: bool) -> None:
    """Train with the gradients of the ranks that still have a batch, divided by the number of all or of these ranks."""
    size = data.shape[1]
    for step, samples in enumerate(data):
        present = ranks_at(step, size)
        optimizer.zero_grad()
        loss = sum(loss_of(model, samples[rank]) for rank in present)
        (loss / (size if by_all else len(present))).backward()
        optimizer.step()


@pytest.fixture
def data(world: mpicomm.World) -> torch.Tensor:
    return batches(world, steps=batches_of(world.size - 1))


@pytest.mark.parametrize("views", [False, True], ids=["copies", "bucket-views"])
@pytest.mark.parametrize("by_all", [True, False], ids=["by-all", "by-those-present"])
def test_ddp(world: mpicomm.World, data: torch.Tensor, by_all: bool, views: bool) -> None:
    model = dense_model()
    alone = copy.deepcopy(model)
    train_alone(alone, data, sgd(alone), by_all=by_all)

    parallel = DistributedDataParallel(model, gradient_as_bucket_view=views, bucket_cap_mb=SMALL_BUCKETS)
    with parallel.join(divide_by_initial_world_size=by_all):
        train(parallel, sgd(parallel), own(data, world.rank))
    assert_same(model, alone)
    assert_identical_on_all_ranks(model)


def test_ddp_through_our_hook(world: mpicomm.World, data: torch.Tensor) -> None:
    """A rank without batches contributes zeros to each mean; the bfloat16 mean is close enough to the exact one."""
    model = dense_model().float()
    alone = copy.deepcopy(model)
    train_alone(alone, data.float(), sgd(alone), by_all=True)

    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(None, mpicomm.bf16_compression_hook)
    with parallel.join():
        train(parallel, sgd(parallel), own(data.float(), world.rank))
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.01, atol=0.01)
    assert_identical_on_all_ranks(model)
