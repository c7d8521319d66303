"""Collective operations by cross-memory attach (CMA): ranks read and write each other's memory, and copy it only once.

This uses process_vm_readv and process_vm_writev. A reduction has these steps:

    all ranks compare their tensors, exchange addresses     (this also synchronises the ranks)
    each rank, chunk by chunk: reads the others' values of its part, adds them to its own, writes the sum to them
    barrier                                                 (after it, a tensor may change again)

Each rank owns a part of the tensor. Only the owner accesses this part, on all ranks, and it adds the contributions of
all ranks in rank order: all ranks receive the same bits, which depend only on the number of ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from mpicomm import agreement
from mpicomm.shm import process_memory
from mpicomm.shm.interface import Comparison, OrderedSum
from mpicomm.shm.process_memory import Vector

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_CHUNK_BYTES = 2**18  # added at a time; stays in the cache, with one chunk for each other rank
_SCRATCH_BYTES = 2**23
_ALIGNMENT = 4096
_COPIED_BYTES = 2**26  # by one system call, which signals do not interrupt


class _Peers:
    """The memory of the other ranks of a node."""

    def __init__(self, comm: Intracomm) -> None:
        """Exchange the process IDs (collective)."""
        self._comm = comm
        self._pids = comm.allgather(os.getpid())
        self._local, self._remote, self._byte = Vector(), Vector(), ctypes.c_char()
        self._library = process_memory.system_calls()

    def exchange(self, number: int) -> array[int]:
        """Return every rank's number, for example an address, in rank order (collective)."""
        mine, numbers = array("q", [number]), array("q", bytes(8 * self._comm.size))
        self._comm.Allgather(mine, numbers)
        return numbers

    def read(self, rank: int, address: int, output_buffer: torch.Tensor) -> None:
        """Fill `output_buffer` from an address in another rank's memory.

        Raises:
            OSError: If the memory cannot be read; ProcessLookupError if the rank's process has ended.
        """
        self._copy(self._library.process_vm_readv, rank, address, output_buffer)

    def can_read(self, rank: int, there: int) -> bool:
        """Return whether memory at an address can be read in a rank's process."""
        local, remote = self._local, self._remote
        local.start, remote.start = ctypes.addressof(self._byte), there
        local.length = remote.length = 1
        return self._library.process_vm_readv(self._pids[rank], local, 1, remote, 1, 0) == 1

    def write(self, rank: int, address: int, content: torch.Tensor) -> None:
        """Write `content` to an address in another rank's memory.

        Raises:
            OSError: If the memory cannot be written; ProcessLookupError if the rank's process has ended.
        """
        self._copy(self._library.process_vm_writev, rank, address, content)

    def _copy(self, call: Callable[..., int], rank: int, there: int, tensor: torch.Tensor) -> None:
        here, left = tensor.data_ptr(), tensor.nbytes
        local, remote = self._local, self._remote
        while left:
            local.start, remote.start = here, there
            local.length = remote.length = min(left, _COPIED_BYTES)
            done = call(self._pids[rank], local, 1, remote, 1, 0)
            if done <= 0:
                number = ctypes.get_errno()
                what = f"memory of rank {rank} of this node, process {self._pids[rank]}"
                raise OSError(number, f"{os.strerror(number)}: {what}")
            here, there, left = here + done, there + done, left - done


def is_available(comm: Intracomm) -> bool:
    """Return whether all ranks of `comm` can read and write each other's memory (collective)."""
    token = torch.tensor([secrets.randbits(62)], device="cpu")
    read, received = (torch.zeros(comm.size, dtype=torch.int64, device="cpu") for _ in range(2))
    try:
        peers = _Peers(comm)
    except AttributeError:  # a C library without process_vm_readv
        peers = None
    if not agreement.all_true(comm, peers is not None) or peers is None:
        return False
    # Read a random token of each rank, and write this rank's token back to it.
    tokens = peers.exchange(int(token.item())).tolist()
    sources, targets = peers.exchange(token.data_ptr()), peers.exchange(received.data_ptr())
    with contextlib.suppress(OSError):
        for rank in range(comm.size):
            peers.read(rank, sources[rank], read[rank : rank + 1])
            if read[rank] == tokens[rank]:  # the process ID does not belong to another process
                peers.write(rank, targets[rank] + received.element_size() * comm.rank, token)
    comm.Barrier()
    return agreement.all_true(comm, read.tolist() == tokens and received.tolist() == tokens)


class CMACollectives:
    """The collective operations of one communicator's ranks; tensors are flat, dense and on the host."""

    def __init__(self, comm: Intracomm) -> None:
        """Exchange the process IDs and allocate scratch memory (collective)."""
        self.rank, self.size = comm.rank, comm.size
        self._comm = comm
        self._peers = _Peers(comm)
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        share = _SCRATCH_BYTES // comm.size // _ALIGNMENT * _ALIGNMENT
        self._chunk_bytes = max(_ALIGNMENT, min(_CHUNK_BYTES, share))
        self._scratch = torch.empty(comm.size, self._chunk_bytes, dtype=torch.uint8, device="cpu")
        self._addresses = array("q")  # of the ranks' tensors, since the last call of `compare`
        self._scratch_views: dict[torch.dtype, tuple[torch.Tensor, ...]] = {}

    def compare(self, flat: torch.Tensor, call: int) -> Comparison:
        """Compare the tensors and calls of all ranks, and store the tensors' addresses (collective)."""
        mine = array("q", [self.can_take(flat), flat.nbytes, call, flat.data_ptr()])
        of_all = array("q", bytes(len(mine) * 8 * self.size))
        self._comm.Allgather(mine, of_all)
        can_take, sizes, calls, self._addresses = (of_all[each::4] for each in range(4))
        least, most = min(sizes), max(sizes)
        return Comparison(all(can_take), least, most, least == most and len(set(calls)) == 1)

    def can_take(self, flat: torch.Tensor) -> bool:
        """Return whether other ranks can read this rank's tensor; memory mapped by a GPU driver cannot be read."""
        return flat.is_cpu and self._peers.can_read(self.rank, flat.data_ptr())

    def reduce(self, flat: torch.Tensor, how: OrderedSum, root: int | None = None) -> None:
        """Reduce in place, with the result on the root, or on all ranks if it is None."""
        mine, places = self._owned(flat)
        receivers = range(self.size) if root is None else (root,)
        self._add(mine, places, how, mine if self.rank in receivers else None, set(receivers) - {self.rank})
        self._comm.Barrier()

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: OrderedSum) -> None:
        """Reduce a tensor, split among the ranks as by torch.tensor_split; `out` receives this rank's part."""
        mine, places = self._owned(flat)
        self._add(mine, places, how, out)
        self._comm.Barrier()

    def all_gather(self, flat: torch.Tensor) -> None:
        """Fill a tensor, split among the ranks as by torch.tensor_split, with each rank's own part."""
        for owner, part in enumerate(flat.tensor_split(self.size)):
            if owner != self.rank:
                self._peers.read(owner, self._addresses[owner] + _offset(flat, part), part)
        self._comm.Barrier()

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to the other ranks."""
        if self.rank != root:
            self._peers.read(root, self._addresses[root], flat)
        self._comm.Barrier()

    def _owned(self, flat: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Return this rank's part of a tensor, and the address of that part on every rank."""
        mine = flat.tensor_split(self.size)[self.rank]
        offset = _offset(flat, mine)
        return mine, [address + offset for address in self._addresses]

    def _add(
        self,
        mine: torch.Tensor,
        places: Sequence[int],
        how: OrderedSum,
        out: torch.Tensor | None,
        receivers: Iterable[int] = (),
    ) -> None:
        """Add this rank's part and the same part at the other ranks' addresses.

        Args:
            mine: This rank's part.
            places: The address of that part on every rank.
            out: Receives the sum; None to leave this rank's memory unchanged.
            receivers: Ranks whose tensors receive the sum.
        """
        output_buffers = self._buffers_for(mine.dtype)
        count = -(-mine.nbytes // self._chunk_bytes) or 1
        pieces = mine.chunk(count)
        results = pieces if out is mine else itertools.repeat(None) if out is None else out.chunk(count)
        there = 0
        for piece, result in zip(pieces, results, strict=False):
            terms = [output_buffer[: piece.numel()] for output_buffer in output_buffers]
            if how.wide is None:
                terms[self.rank] = piece
            else:  # the widening kernels are memory-bound; a copy moves four times as much in the same time
                terms[self.rank].copy_(piece)
            for rank in self._others:
                self._peers.read(rank, places[rank] + there, terms[rank])
            total = terms[self._others[0]] if result is None else result
            how.write(terms, total)
            for rank in receivers:
                self._peers.write(rank, places[rank] + there, total)
            there += piece.nbytes

    def _buffers_for(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return this rank's scratch memory, with a chunk for each rank."""
        if dtype not in self._scratch_views:
            with torch.inference_mode(False):
                self._scratch_views[dtype] = self._scratch.view(dtype).unbind()
        return self._scratch_views[dtype]


def _offset(whole: torch.Tensor, part: torch.Tensor) -> int:
    """Return the offset of a part in a tensor, in bytes."""
    return part.data_ptr() - whole.data_ptr()
