"""This package's communication hook for DistributedDataParallel, which averages in bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpicomm
from tests.features.problem import Weight, numbers_of


def hooked(model: torch.nn.Module, hook: Callable, state: object = None, **options: object) -> DistributedDataParallel:
    parallel = DistributedDataParallel(model, **options)
    parallel.register_comm_hook(state, hook)
    return parallel


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
