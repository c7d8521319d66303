"""Sums of bf16 and fp16 are the float32 sum, rounded once: the error is at most half an ulp."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests import nodes
from tests.torches import reduce_scatter_single
from tests.worlds import Group, on_groups

pytestmark = pytest.mark.each_torch("bf16")

COUNT = 100_003
NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
ALL_WAYS = on_groups("world", "mpi", *nodes.KINDS)


def inputs(group: Group, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return the inputs of all ranks, equal on all ranks: (size, COUNT)."""
    return torch.randn(group.size, COUNT, generator=torch.manual_seed(seed)).to(dtype)


def half_ulp(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return half the distance between adjacent values of `dtype` at each exact value."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(exact.abs().clamp(min=info.smallest_normal)))
    return torch.exp2(exponent) * info.eps / 2


def assert_rounded_once(got: torch.Tensor, exact: torch.Tensor) -> None:
    error = (got.to(torch.float64) - exact).abs()
    assert bool((error <= half_ulp(exact, got.dtype)).all())


@NARROW
@on_groups("world", "mpi", "staged", *nodes.KINDS)
def test_all_reduce(group: Group, dtype: torch.dtype) -> None:
    values = inputs(group, dtype, seed=3)
    tensor = values[group.rank].clone()
    dist.all_reduce(tensor, group=group.handle)
    assert_rounded_once(tensor, values.to(torch.float64).sum(0))


@NARROW
@ALL_WAYS
def test_average(group: Group, dtype: torch.dtype) -> None:
    values = inputs(group, dtype, seed=4)
    tensor = values[group.rank].clone()
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group.handle)
    assert_rounded_once(tensor, values.to(torch.float64).mean(0))


@NARROW
@ALL_WAYS
def test_reduce(group: Group, dtype: torch.dtype) -> None:
    values = inputs(group, dtype, seed=5)
    tensor = values[group.rank].clone()
    dist.reduce(tensor, group_dst=0, group=group.handle)
    if group.rank == 0:
        assert_rounded_once(tensor, values.to(torch.float64).sum(0))
    else:
        assert torch.equal(tensor, values[group.rank])


@NARROW
@ALL_WAYS
def test_reduce_scatter(group: Group, dtype: torch.dtype) -> None:
    values = torch.stack([inputs(group, dtype, seed=6 + block) for block in range(group.size)], dim=1)
    block = torch.empty(COUNT, dtype=dtype)
    reduce_scatter_single(block, values[group.rank].reshape(-1), group=group.handle)
    assert_rounded_once(block, values[:, group.rank].to(torch.float64).sum(0))


@ALL_WAYS
def test_a_sum_beyond_the_range_is_infinite_and_not_wrapped(group: Group) -> None:
    tensor = torch.full((3,), 60000.0, dtype=torch.float16)
    dist.all_reduce(tensor, group=group.handle)
    assert torch.equal(tensor.isinf(), torch.full((3,), group.size > 1))


@ALL_WAYS
def test_an_average_whose_sum_is_beyond_the_range(group: Group) -> None:
    tensor = torch.full((3,), 60000.0, dtype=torch.float16)
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group.handle)
    assert torch.equal(tensor, torch.full((3,), 60000.0, dtype=torch.float16))
