"""Collectives of ranks that share memory: in chunks that fit the cache, each copied in, reduced, and copied out.

    stage      0          1                2
    chunk 0    copy in    its owners add   copy out
    chunk 1               copy in          its owners add    copy out
    ...

Between two stages is a barrier of MPI's, which also makes visible to others what a rank has written. There is room for
two chunks at a time: what a stage writes was read in the stage before the last one.

Of each chunk, each rank owns a part, and adds up what all have for it in the order of ranks: all ranks get the same
bits, which depend on the number of ranks alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mpicomm.node.sums import Sum

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_CHUNK_BYTES = 2**20
_LEAST_CHUNK_BYTES = 2**16
_SEGMENT_BYTES = 2**26  # where more ranks share a node, chunks are smaller
_ROOMS = 2
_ALIGNMENT = 4096
_MOST_CUTS = 256

Slots = list[tuple[torch.Tensor, ...]]


def segment_bytes(size: int) -> int:
    """Return how much memory `size` ranks share."""
    return _ROOMS * (size + 1) * _chunk_bytes(size)


def _chunk_bytes(size: int) -> int:
    share = _SEGMENT_BYTES // (_ROOMS * (size + 1))
    return max(_LEAST_CHUNK_BYTES, min(_CHUNK_BYTES, share // _ALIGNMENT * _ALIGNMENT))


class BySegment:
    """The collectives of one communicator's ranks; tensors are flat, dense and on the host."""

    def __init__(self, comm: Intracomm, memory: torch.Tensor) -> None:
        """Use memory that the ranks share.

        Args:
            memory: `segment_bytes(comm.size)` bytes.
        """
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._chunk_bytes = _chunk_bytes(comm.size)
        self._rooms = memory.view(_ROOMS, comm.size + 1, self._chunk_bytes)
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._room = 0  # which the next chunk uses
        self._cuts: dict[tuple[torch.dtype, int, int], Slots] = {}

    def can_take(self, flat: torch.Tensor) -> bool:  # noqa: ARG002  all tensors can be copied
        """Tell that this rank's tensor can be copied in and out."""
        return True

    def reduce(self, flat: torch.Tensor, how: Sum, root: int | None = None) -> None:
        """Reduce in place, on one rank or on all."""
        writes = root in (None, self.rank)
        chunks = flat.split(self._elements(flat.dtype))
        parts = [chunk.tensor_split(self.size) for chunk in chunks]
        slots = [self._slots(flat.dtype, index, chunk.numel()) for index, chunk in enumerate(chunks)]

        def add(index: int) -> None:
            mine, total = parts[index][self.rank], slots[index][-1][self.rank]
            how.write(self._terms(mine, slots[index]), total)
            if writes:
                mine.copy_(total)

        def fetch(index: int) -> None:
            if writes:
                for owner in self._others:
                    parts[index][owner].copy_(slots[index][-1][owner])

        self._run(len(chunks), functools.partial(self._bring, parts, slots), add, fetch)

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: Sum) -> None:
        """Reduce a tensor that is split among the ranks, as torch.tensor_split does, and leave each its part."""
        blocks = flat.tensor_split(self.size)
        length = self._elements(blocks[0].dtype) // self.size
        count = -(-max(block.numel() for block in blocks) // length)
        parts = [[block[index * length : (index + 1) * length] for block in blocks] for index in range(count)]
        slots = [self._slots(blocks[0].dtype, index, length * self.size) for index in range(count)]

        def add(index: int) -> None:
            mine = parts[index][self.rank]
            how.write(self._terms(mine, slots[index]), out[index * length :][: mine.numel()])

        self._run(count, functools.partial(self._bring, parts, slots), add)

    def _bring(self, parts: Sequence[Sequence[torch.Tensor]], slots: Sequence[Slots], index: int) -> None:
        """Copy in what others add up."""
        for owner in self._others:
            part = parts[index][owner]
            slots[index][self.rank][owner][: part.numel()].copy_(part)

    def _terms(self, mine: torch.Tensor, slots: Slots) -> list[torch.Tensor]:
        """Return what this rank adds up, in the order of ranks."""
        return [mine if rank == self.rank else slots[rank][self.rank][: mine.numel()] for rank in range(self.size)]

    def all_gather(self, flat: torch.Tensor) -> None:
        """Fill a tensor, split among the ranks as torch.tensor_split does, from what each has of its part."""
        self._spread(dict(enumerate(flat.tensor_split(self.size))))

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to the others."""
        self._spread({root: flat})

    def _spread(self, blocks: dict[int, torch.Tensor]) -> None:
        """Copy the blocks of some ranks to all others."""
        dtype = next(iter(blocks.values())).dtype
        length = self._elements(dtype)
        count = -(-max(block.numel() for block in blocks.values()) // length)

        def of_chunk(owner: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            piece = blocks[owner][index * length : (index + 1) * length]
            return piece, self._slot(dtype, index, owner)[: piece.numel()]

        def bring(index: int) -> None:
            if self.rank in blocks:
                piece, slot = of_chunk(self.rank, index)
                slot.copy_(piece)

        def fetch(index: int) -> None:
            for owner in blocks:
                if owner != self.rank:
                    piece, slot = of_chunk(owner, index)
                    piece.copy_(slot)

        self._run(count, bring, fetch)

    def _run(self, count: int, *stages: Callable[[int], None]) -> None:
        """Take `count` chunks through all stages."""
        for moment in range(count + len(stages) - 1):
            if moment:
                self._comm.Barrier()
            for delay, stage in enumerate(stages):
                if 0 <= moment - delay < count:
                    stage(moment - delay)
        self._room = (self._room + count) % _ROOMS

    def _elements(self, dtype: torch.dtype) -> int:
        """Return how many elements a chunk has."""
        return self._chunk_bytes // dtype.itemsize

    def _slot(self, dtype: torch.dtype, index: int, rank: int) -> torch.Tensor:
        """Return where a rank puts what it has of a chunk; the last is for results."""
        return self._rooms[(self._room + index) % _ROOMS, rank].view(dtype)

    def _slots(self, dtype: torch.dtype, index: int, elements: int) -> Slots:
        """Return every rank's slot for a chunk, and the one for results, each in parts by owner."""
        key = (dtype, (self._room + index) % _ROOMS, elements)
        if key not in self._cuts:
            if len(self._cuts) >= _MOST_CUTS:
                self._cuts.clear()
            with torch.inference_mode(False):
                self._cuts[key] = [
                    self._slot(dtype, index, rank)[:elements].tensor_split(self.size) for rank in range(self.size + 1)
                ]
        return self._cuts[key]
