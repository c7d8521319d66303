"""How the ranks of a node get at each other's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from mpicomm.node import bysegment, direct, segment
from mpicomm.node.sums import Sum

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class Collectives(Protocol):
    """The collectives of ranks of one node; tensors are flat, dense and on the host."""

    rank: int
    size: int

    def can_take(self, flat: torch.Tensor) -> bool:
        """Tell whether this rank's tensor is in memory that the others can get at."""

    def reduce(self, flat: torch.Tensor, how: Sum, root: int | None = None) -> None:
        """Reduce in place, on one rank or on all."""

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: Sum) -> None:
        """Reduce a tensor that is split among the ranks, as torch.tensor_split does, and leave each its part."""

    def all_gather(self, flat: torch.Tensor) -> None:
        """Fill a tensor, split among the ranks as torch.tensor_split does, from what each has of its part."""

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to the others."""


def connect(comm: Intracomm) -> Collectives:
    """Let the ranks of a node get at each other's tensors (collective): directly, or else by shared memory.

    Raises:
        NoSharedMemoryError: On all ranks, if there is no way.
    """
    if direct.are_possible(comm):
        return direct.Direct(comm)
    return bysegment.BySegment(comm, segment.make(comm, bysegment.segment_bytes(comm.size)))
