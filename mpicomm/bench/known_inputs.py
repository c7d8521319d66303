"""Inputs whose results are known and exact in every dtype, in any order of summation.

The inputs repeat a table of small integers, with a different offset for each rank and each part of a buffer. So the
check detects data of another rank or of another part, and missing data.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

POISON = 7
"""Initial value of the receive buffers; no input contains it."""

_LARGEST = 256  # every dtype here represents all integers up to this one; bfloat16 is the narrowest
_PERIOD = 31  # a prime: neither sizes nor numbers of ranks are multiples of it
_BY_RANK, _BY_PART = 5, 11


def pattern(rank: int, part: int, size: int) -> torch.Tensor:
    """Return the pattern that a part of a rank's buffer repeats."""
    if rank >= _LARGEST:  # a sum of more ranks would not be exact
        return torch.zeros(_PERIOD, dtype=torch.int64)
    return _table(min(POISON, 1 + _LARGEST // size)).roll(-(_BY_RANK * rank + _BY_PART * part))


def summed(part: int, size: int) -> torch.Tensor:
    """Return the sum of the patterns of all ranks for a part."""
    return torch.stack([pattern(rank, part, size) for rank in range(size)]).sum(0)


def fill(tensor: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
    """Fill each part of a tensor with repetitions of its row."""
    for part, row in zip(tensor.view(len(rows), -1), rows, strict=True):
        whole = len(part) // len(row) * len(row)
        part[:whole].view(-1, len(row)).copy_(row)
        part[whole:].copy_(row[: len(part) - whole])


def wrong(tensor: torch.Tensor, rows: Sequence[torch.Tensor]) -> int:
    """Return the number of elements that differ from those that `fill` writes."""
    count = 0
    for part, row in zip(tensor.view(len(rows), -1), rows, strict=True):
        expected = row.to(part.device, part.dtype)
        whole = len(part) // len(row) * len(row)
        count += int((part[:whole].view(-1, len(row)) != expected).sum())
        count += int((part[whole:] != expected[: len(part) - whole]).sum())
    return count


@functools.cache
def _table(below: int) -> torch.Tensor:
    """Return pseudo-random integers below `below`, or below 2 if that is larger; always the same ones."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(max(2, below), (_PERIOD,), generator=generator)
