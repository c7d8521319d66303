"""Communication hooks of DistributedDataParallel: torch's hooks, and this package's hook for bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import mpicomm
from tests.features.problem import (
    FEATURES,
    SMALL_BUCKETS,
    Weight,
    assert_identical_on_all_ranks,
    assert_same_gradients,
    batches,
    dense_model,
    loss_of,
    numbers_of,
    sgd,
)


def hooked(model: torch.nn.Module, hook: Callable, state: object = None, **options: object) -> DistributedDataParallel:
    parallel = DistributedDataParallel(model, **options)
    parallel.register_comm_hook(state, hook)
    return parallel


def test_plain_average(world: mpicomm.World) -> None:
    data = batches(world, steps=1)[0]
    alone = dense_model()
    loss_of(alone, data.flatten(0, 1)).backward()
    parallel = hooked(dense_model(), default_hooks.allreduce_hook)
    loss_of(parallel, data[world.rank]).backward()
    assert_same_gradients(parallel, alone)


def test_fp16_compression(world: mpicomm.World) -> None:
    """torch rounds the quotients to fp16; their float32 sum is rounded once more."""
    parallel = hooked(Weight(1000), default_hooks.fp16_compress_hook)
    parallel(numbers_of(world.rank)).backward()
    quotients = [numbers_of(rank).half().div_(world.size) for rank in range(world.size)]
    expected = torch.stack(quotients).float().sum(0).half().float()
    assert torch.equal(parallel.module.weight.grad, expected)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "bucket-views"])
def test_bf16_compression_rounds_the_mean_once(world: mpicomm.World, views: bool) -> None:
    parallel = hooked(Weight(1000), mpicomm.bf16_compression_hook, gradient_as_bucket_view=views)
    compressed = torch.stack([numbers_of(rank).bfloat16() for rank in range(world.size)])
    expected = compressed.float().sum(0).div_(world.size).bfloat16().float()
    for _ in range(3):  # the first step, the step that rebuilds the buckets, and the step after it
        parallel.zero_grad()
        parallel(numbers_of(world.rank)).backward()
        assert torch.equal(parallel.module.weight.grad, expected)


def test_bf16_compression_averages_over_its_group(world: mpicomm.World) -> None:
    evens = list(range(0, world.size, 2))
    group = dist.new_group(evens)
    if world.rank in evens:
        options = {"process_group": group, "gradient_as_bucket_view": True}
        parallel = hooked(Weight(1000), mpicomm.bf16_compression_hook, group, **options)
        parallel(numbers_of(world.rank)).backward()
        compressed = torch.stack([numbers_of(rank).bfloat16() for rank in evens])
        expected = compressed.float().sum(0).div_(len(evens)).bfloat16().float()
        assert torch.equal(parallel.module.weight.grad, expected)
        dist.destroy_process_group(group)


def test_bf16_compression_keeps_the_range_of_float32(world: mpicomm.World) -> None:
    """Values far outside the range of fp16 are preserved."""
    parallel = hooked(Weight(2), mpicomm.bf16_compression_hook)
    parallel(torch.tensor([2.0**100, 2.0**-100])).backward()
    assert parallel.module.weight.grad.tolist() == [2.0**100, 2.0**-100]


@pytest.mark.parametrize("views", [False, True], ids=["copies", "bucket-views"])
def test_bf16_compression_converges_like_float32(world: mpicomm.World, views: bool) -> None:
    data = batches(world, steps=1).float()[0]
    model = dense_model().float()
    alone = copy.deepcopy(model)
    parallel = hooked(model, mpicomm.bf16_compression_hook, gradient_as_bucket_view=views, bucket_cap_mb=SMALL_BUCKETS)
    optimizers = [sgd(parallel), sgd(alone)]
    first = loss_of(alone, data.flatten(0, 1)).item()
    for _ in range(30):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(parallel, data[world.rank]).backward()
        loss_of(alone, data.flatten(0, 1)).backward()
        for optimizer in optimizers:
            optimizer.step()
    compressed, exact = (loss_of(each, data.flatten(0, 1)).item() for each in (model, alone))
    assert exact < first / 4
    assert compressed == pytest.approx(exact, rel=0.02, abs=0.002 * first)
    assert_identical_on_all_ranks(model)


def test_powersgd(world: mpicomm.World) -> None:
    """The hook waits for an operation inside a callback. With a full-rank matrix, PowerSGD is exact."""
    state = PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=0.1)
    torch.manual_seed(0)
    model = torch.nn.Linear(FEATURES, 8).double()
    parallel = hooked(model, powerSGD_hook, state)
    data = batches(world, steps=4)
    for step in data:
        parallel.zero_grad()
        parallel(step[world.rank]).pow(2).mean().backward()
    alone = copy.deepcopy(model)
    alone.zero_grad()
    alone(data[-1].flatten(0, 1)).pow(2).mean().backward()
    assert_same_gradients(model, alone)
    assert_identical_on_all_ranks(model)
