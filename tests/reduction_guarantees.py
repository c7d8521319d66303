"""What reductions of floating-point numbers promise with shared memory and without it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist


def check(lengths: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
    """Check the all_reduce of a group, of tensors of some lengths (collective).

    Raises:
        AssertionError: If a promise does not hold.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for length in lengths:
        generator = torch.manual_seed(length)
        # 1. all ranks get equal bits, also where the sum depends on its order
        tensor = torch.randn(size, length, generator=generator)[rank].clone()
        dist.all_reduce(tensor, group=group)
        sums = [None] * size
        dist.all_gather_object(sums, zlib.crc32(tensor.numpy()), group=group)
        assert len(set(sums)) == 1, f"the bits of {length} sums differ: {sums}"
        # 2. NaN wins
        for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            tensor = torch.full((length,), float(rank))
            tensor[rank % length] = torch.nan
            dist.all_reduce(tensor, op, group=group)
            is_nan = torch.zeros(length, dtype=torch.bool)
            is_nan[: min(size, length)] = True
            assert torch.equal(tensor.isnan(), is_nan), f"{op} of {length} numbers: {tensor}"
        # 3. narrow floats are added in float32, in which the sums of these are exact, and rounded once
        quarters = torch.randint(-200, 200, (size, length), generator=generator) / 4
        for dtype in (torch.bfloat16, torch.float16):
            of_ranks = quarters.to(dtype)
            for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, size)):
                tensor = of_ranks[rank].clone()
                dist.all_reduce(tensor, op, group=group)
                expected = (of_ranks.float().sum(0) / divisor).to(dtype)
                assert torch.equal(tensor, expected), f"{op} of {length} numbers of {dtype}"
