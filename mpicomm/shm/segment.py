"""Collective operations through a shared memory segment, in chunks that fit the cache: copy in, reduce, copy out.

    stage      0          1                2
    chunk 0    copy in    its owners add   copy out
    chunk 1               copy in          its owners add    copy out
    ...

An MPI barrier separates the stages; it also makes a rank's writes visible to the other ranks. The segment holds two
chunks at a time: the memory that a stage writes was read in the stage before the last one.

Each rank owns a part of each chunk and adds the contributions of all ranks to it in rank order: all ranks receive the
same bits, which depend only on the number of ranks.

The segment has no name in any file system, and is freed with the last process that maps it: one rank creates a file in
memory (memfd_create) and reserves its pages; the other ranks open it through that rank's entry in /proc, which requires
the same user and the same PID namespace. The size of /dev/shm does not limit it.
"""

from __future__ import annotations

import functools
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mpicomm import agreement
from mpicomm.errors import MpicommError
from mpicomm.shm.interface import Comparison, OrderedSum, compare

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_CHUNK_BYTES = 2**20
_LEAST_CHUNK_BYTES = 2**16
_SEGMENT_BYTES = 2**26  # with more ranks on a node, chunks are smaller
_BUFFERS = 2  # chunks in the segment
_ALIGNMENT = 4096
_MAX_SLOTS = 256
_TOKEN_BYTES = 16

Slots = list[tuple[torch.Tensor, ...]]


class NoSharedMemoryError(MpicommError):
    """The ranks of a node cannot share memory."""


def make(comm: Intracomm, nbytes: int) -> torch.Tensor:
    """Return memory, as bytes, that all ranks of `comm` share (collective). It is mapped as long as the tensor lives.

    Raises:
        NoSharedMemoryError: On all ranks, if one of them cannot share the memory.
    """
    memory: torch.Tensor | None = None
    descriptor: int | None = None

    def create() -> tuple[int, int, bytes]:
        nonlocal descriptor, memory
        try:
            descriptor, memory = _create(nbytes)
        except Exception as error:
            raise NoSharedMemoryError(f"failed to reserve {nbytes >> 20} MiB: {error}") from error
        return os.getpid(), descriptor, _token(memory)

    def open_() -> None:
        nonlocal memory
        memory = _open(offer, nbytes) if memory is None else memory

    def failed(_rank: int, why: str) -> NoSharedMemoryError:
        return NoSharedMemoryError(f"failed to open the memory of another rank: {why}")

    offer = agreement.run_on_rank_0(comm, create)
    try:
        agreement.run_on_all_ranks(comm.allgather, open_, Exception, failed)
    finally:
        if descriptor is not None:
            os.close(descriptor)  # all ranks have mapped it, or have failed to
    assert memory is not None
    return memory


def _create(nbytes: int) -> tuple[int, torch.Tensor]:
    """Create a file in memory; return its descriptor and its memory, which begins with a random token."""
    descriptor = os.memfd_create("mpicomm", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # otherwise access to a page could kill the process
        memory = _map(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    memory[:_TOKEN_BYTES] = torch.frombuffer(bytearray(secrets.token_bytes(_TOKEN_BYTES)), dtype=torch.uint8)
    return descriptor, memory


def _open(offer: tuple[int, int, bytes], nbytes: int) -> torch.Tensor:
    """Open the memory that another rank has created.

    Raises:
        OSError: If it cannot be opened, or if the process ID belongs to another process in this rank's PID namespace.
    """
    pid, descriptor, token = offer
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != nbytes:
            raise OSError(f"process {pid} is a different process in this rank's PID namespace")
        memory = _map(opened, nbytes)
    finally:
        os.close(opened)
    if _token(memory) != token:
        raise OSError(f"process {pid} is a different process in this rank's PID namespace")
    return memory


def _token(memory: torch.Tensor) -> bytes:
    return bytes(memory[:_TOKEN_BYTES].numpy())


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


def segment_bytes(size: int) -> int:
    """Return the size in bytes of the segment of `size` ranks."""
    return _BUFFERS * (size + 1) * _chunk_bytes(size)


def _chunk_bytes(size: int) -> int:
    share = _SEGMENT_BYTES // (_BUFFERS * (size + 1))
    return max(_LEAST_CHUNK_BYTES, min(_CHUNK_BYTES, share // _ALIGNMENT * _ALIGNMENT))


class SegmentCollectives:
    """The collective operations of one communicator's ranks; tensors are flat, dense and on the host."""

    def __init__(self, comm: Intracomm, memory: torch.Tensor) -> None:
        """Use memory that the ranks share.

        Args:
            memory: The shared memory, of `segment_bytes(comm.size)` bytes.
        """
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._chunk_bytes = _chunk_bytes(comm.size)
        self._buffers = memory.view(_BUFFERS, comm.size + 1, self._chunk_bytes)
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._current = 0  # index of the buffer for the next chunk
        self._cached_slots: dict[tuple[torch.dtype, int, int], Slots] = {}

    def compare(self, flat: torch.Tensor, call: int) -> Comparison:
        """Compare the tensors and calls of all ranks (collective)."""
        return compare(self._comm, self.can_take(flat), flat.nbytes, call)

    def can_take(self, flat: torch.Tensor) -> bool:
        """Return whether this rank's tensor can be copied in and out: any tensor on the host."""
        return flat.is_cpu

    def reduce(self, flat: torch.Tensor, how: OrderedSum, root: int | None = None) -> None:
        """Reduce in place, with the result on the root, or on all ranks if it is None."""
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

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: OrderedSum) -> None:
        """Reduce a tensor, split among the ranks as by torch.tensor_split; `out` receives this rank's part."""
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
        """Copy in this rank's contributions to the parts that other ranks own."""
        for owner in self._others:
            part = parts[index][owner]
            slots[index][self.rank][owner][: part.numel()].copy_(part)

    def _terms(self, mine: torch.Tensor, slots: Slots) -> list[torch.Tensor]:
        """Return all ranks' contributions to this rank's part, in rank order."""
        return [mine if rank == self.rank else slots[rank][self.rank][: mine.numel()] for rank in range(self.size)]

    def all_gather(self, flat: torch.Tensor) -> None:
        """Fill a tensor, split among the ranks as by torch.tensor_split, with each rank's own part."""
        self._spread(dict(enumerate(flat.tensor_split(self.size))))

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to the other ranks."""
        self._spread({root: flat})

    def _spread(self, blocks: dict[int, torch.Tensor]) -> None:
        """Copy the blocks of some ranks to all other ranks."""
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
        """Run `count` chunks through all stages; a chunk enters a stage when the previous chunk has left it."""
        for moment in range(count + len(stages) - 1):
            if moment:
                self._comm.Barrier()
            for delay, stage in enumerate(stages):
                if 0 <= moment - delay < count:
                    stage(moment - delay)
        self._current = (self._current + count) % _BUFFERS

    def _elements(self, dtype: torch.dtype) -> int:
        """Return the number of elements in a chunk."""
        return self._chunk_bytes // dtype.itemsize

    def _slot(self, dtype: torch.dtype, index: int, rank: int) -> torch.Tensor:
        """Return a rank's memory for its contributions to a chunk; rank `size` stands for the results."""
        return self._buffers[(self._current + index) % _BUFFERS, rank].view(dtype)

    def _slots(self, dtype: torch.dtype, index: int, elements: int) -> Slots:
        """Return every rank's slot for a chunk and the slot for results, each split into parts by owner."""
        key = (dtype, (self._current + index) % _BUFFERS, elements)
        if key not in self._cached_slots:
            if len(self._cached_slots) >= _MAX_SLOTS:
                self._cached_slots.clear()
            with torch.inference_mode(False):
                self._cached_slots[key] = [
                    self._slot(dtype, index, rank)[:elements].tensor_split(self.size) for rank in range(self.size + 1)
                ]
        return self._cached_slots[key]
