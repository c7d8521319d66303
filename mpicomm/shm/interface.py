"""The interface of collective operations of ranks that can access each other's memory, and their common reduction."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from mpicomm import agreement

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@dataclasses.dataclass(frozen=True)
class OrderedSum:
    """A sum of all ranks' contributions, in rank order."""

    wide: torch.dtype | None = None
    """The dtype of the computation if the contributions' own is too narrow; the result is rounded once."""

    divisor: int = 1
    """Divides the sum after the reduction."""

    def write(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the sum of the terms, in their order, to `out`, which may be one of the terms or of the wide dtype."""
        if out.is_complex():  # torch multiplies complex terms by 1+0j: infinity becomes not a number
            terms, out = [torch.view_as_real(term) for term in terms], torch.view_as_real(out)
        if len(terms) == 2 and self.divisor == 1 and out.dtype == terms[0].dtype:
            torch.add(*terms, out=out)  # torch adds two narrow numbers in float32 too
            return
        total = terms[0] + terms[1] if self.wide is None else terms[0].to(self.wide).add_(terms[1])
        for term in terms[2:]:
            total.add_(term)
        if self.divisor != 1:
            divide(total, self.divisor)
        out.copy_(total)


def divide(total: torch.Tensor, divisor: int) -> None:
    """Divide floating point or complex numbers in place; torch's own division of complex numbers is inexact."""
    real = torch.view_as_real(total) if total.is_complex() else total
    real.div_(_scalar(divisor, real.dtype))


@functools.cache
def _scalar(value: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as a tensor, by which torch divides three times as fast as by a Python number."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The tensors that the ranks pass to one operation."""

    all_can: bool
    """Whether all ranks can access all of them."""

    least_bytes: int
    most_bytes: int

    are_equal: bool
    """Whether they have the same size, and all ranks make the same call."""


def compare(comm: Intracomm, can_take: bool, nbytes: int, call: int) -> Comparison:
    """Compare the calls of a communicator's ranks (collective)."""
    all_can, least, most, lowest, highest = agreement.minimum(comm, [can_take, nbytes, -nbytes, call, -call])
    return Comparison(bool(all_can), least, -most, (least, lowest) == (-most, -highest))


def different(least_bytes: int, most_bytes: int) -> RuntimeError:
    """Return the error of ranks whose calls differ."""
    if least_bytes == most_bytes:
        return RuntimeError(
            "all ranks must call the same operation with tensors of the same dtype, got different calls.\n"
            "Set MPICOMM_DEBUG=1 to see each rank's call."
        )
    return RuntimeError(
        f"tensor sizes must be equal on all ranks, got {least_bytes} to {most_bytes} bytes.\n"
        f"Pass tensors of the same size on every rank."
    )


class ShmCollectives(Protocol):
    """The collective operations of one node's ranks; tensors are flat, dense and on the host.

    Before each operation, the ranks call `compare` with the tensor that they then pass.
    """

    rank: int
    size: int

    def compare(self, flat: torch.Tensor, call: int) -> Comparison:
        """Compare the tensors and calls of all ranks (collective); it also synchronises the ranks.

        Args:
            call: A number of operation, dtype, root and divisor (`native.call`).
        """

    def can_take(self, flat: torch.Tensor) -> bool:
        """Return whether this rank's tensor is in memory that the other ranks can access."""

    def reduce(self, flat: torch.Tensor, how: OrderedSum, root: int | None = None) -> None:
        """Reduce in place, with the result on the root, or on all ranks if it is None."""

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: OrderedSum) -> None:
        """Reduce a tensor, split among the ranks as by torch.tensor_split; `out` receives this rank's part."""

    def all_gather(self, flat: torch.Tensor) -> None:
        """Fill a tensor, split among the ranks as by torch.tensor_split, with each rank's own part."""

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to the other ranks."""
