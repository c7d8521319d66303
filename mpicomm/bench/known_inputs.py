"""Inputs whose results are known and exact in every format, in whatever order they are added up.

They are read from a table of small integers, which begins elsewhere for each rank and each part of a buffer: what comes
from another rank, belongs to another part, or does not come at all is seen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

POISON = 7
"""What lies where something is to be received: it is in no input."""

_LARGEST = 256  # up to which every format here, bfloat16 the narrowest, has all integers
_PERIOD = 31  # a prime: neither sizes nor numbers of ranks are multiples of it
_BY_RANK, _BY_PART = 5, 11


def pattern(rank: int, part: int, size: int) -> torch.Tensor:
    """Return with what a part of a rank's buffer begins, and what repeats there."""
    if rank >= _LARGEST:  # a sum of more ranks would not be exact
        return torch.zeros(_PERIOD, dtype=torch.int64)
    return _table(min(POISON, 1 + _LARGEST // size)).roll(-(_BY_RANK * rank + _BY_PART * part))


def summed(part: int, size: int) -> torch.Tensor:
    """Return the sum of what all ranks have there."""
    return torch.stack([pattern(rank, part, size) for rank in range(size)]).sum(0)


def fill(tensor: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
    """Write each row, again and again, into its part of a tensor."""
    for part, row in zip(tensor.view(len(rows), -1), rows, strict=True):
        whole = len(part) // len(row) * len(row)
        part[:whole].view(-1, len(row)).copy_(row)
        part[whole:].copy_(row[: len(part) - whole])


def wrong(tensor: torch.Tensor, rows: Sequence[torch.Tensor]) -> int:
    """Return how many elements are not what `fill` would write."""
    found = 0
    for part, row in zip(tensor.view(len(rows), -1), rows, strict=True):
        expected = row.to(part.device, part.dtype)
        whole = len(part) // len(row) * len(row)
        found += int((part[:whole].view(-1, len(row)) != expected).sum())
        found += int((part[whole:] != expected[: len(part) - whole]).sum())
    return found


@functools.cache
def _table(below: int) -> torch.Tensor:
    """Return integers below a number, 2 at the least, in no order, but always the same."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(max(2, below), (_PERIOD,), generator=generator)
