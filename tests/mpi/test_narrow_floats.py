"""Sums of bf16 and fp16 are the float32 sum, rounded once: the error is at most half an ulp."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests import nodes
from tests.worlds import Group, on_groups

pytestmark = pytest.mark.each_torch("bf16")

COUNT = 100_003


def half_ulp(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return half the distance between adjacent values of `dtype` at each exact value."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(exact.abs().clamp(min=info.smallest_normal)))
    return torch.exp2(exponent) * info.eps / 2


@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_groups("world", "mpi", "staged", *nodes.KINDS)
def test_a_sum_is_rounded_once(group: Group, dtype: torch.dtype, op: str) -> None:
    values = torch.randn(group.size, COUNT, generator=torch.manual_seed(3)).to(dtype)
    tensor = values[group.rank].clone()
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group.handle)
    exact = values.to(torch.float64).sum(0) / (group.size if op == "AVG" else 1)
    error = (tensor.to(torch.float64) - exact).abs()
    assert bool((error <= half_ulp(exact, dtype)).all())


@on_groups("world", "mpi", *nodes.KINDS)
def test_a_sum_beyond_the_range_is_infinite_but_its_average_is_not(group: Group) -> None:
    total, mean = (torch.full((3,), 60000.0, dtype=torch.float16) for _ in range(2))
    dist.all_reduce(total, group=group.handle)
    assert torch.equal(total.isinf(), torch.full((3,), group.size > 1))
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group.handle)
    assert torch.equal(mean, torch.full((3,), 60000.0, dtype=torch.float16))
