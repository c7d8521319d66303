"""The collectives of ranks that can access each other's memory, and the reduction that all of them do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch


@dataclasses.dataclass(frozen=True)
class OrderedSum:
    """A sum of all ranks' contributions, in the order of ranks."""

    wide: torch.dtype | None = None
    """The dtype in which it is made, if their own is too narrow; the result is rounded once."""

    divisor: int = 1

    def write(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the sum of the terms, in their order, to `out`, which may be one of them or of the wide dtype."""
        if len(terms) == 2 and self.divisor == 1 and out.dtype == terms[0].dtype:
            torch.add(*terms, out=out)  # two narrow numbers, too, are added in float32
            return
        total = terms[0] + terms[1] if self.wide is None else terms[0].to(self.wide).add_(terms[1])
        for term in terms[2:]:
            total.add_(term)
        if self.divisor != 1:
            divide(total, self.divisor)
        out.copy_(total)


def divide(total: torch.Tensor, divisor: int) -> None:
    """Divide floating point or complex numbers in place; torch's own division of complex ones is not quite right."""
    (torch.view_as_real(total) if total.is_complex() else total).div_(divisor)


class ShmCollectives(Protocol):
    """The collectives of ranks of one node; tensors are flat, dense and on the host."""

    rank: int
    size: int

    def can_take(self, flat: torch.Tensor) -> bool:
        """Tell whether this rank's tensor is in memory that the others can get at."""

    def reduce(self, flat: torch.Tensor, how: OrderedSum, root: int | None = None) -> None:
        """Reduce in place, on one rank or on all."""

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: OrderedSum) -> None:
        """Reduce a tensor that is split among the ranks, as torch.tensor_split does, and leave each its part."""

    def all_gather(self, flat: torch.Tensor) -> None:
        """Fill a tensor, split among the ranks as torch.tensor_split does, from what each has of its part."""

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to the others."""
