"""Collective operations through slots: each rank has a slot for its contribution in memory that all ranks share.

    each rank: copies its contribution into its slot, and publishes the number of this step
    each rank: waits until all ranks have published that number, and computes its result from all slots

There are two buffers of slots, which alternate. A rank writes to a buffer again two steps later. By then it has seen
that all ranks have published the step between, for which they had finished reading this buffer: no second
synchronisation is needed. Reductions of larger tensors have one: each rank reduces a part of the slots, and then copies
the other parts. A tensor that is larger than a slot takes several steps.

With each number, a rank publishes its operation, and the dtype and size of its tensor: all ranks detect a difference.

Reductions are made in rank order: all ranks receive the same bits, which depend only on the number of ranks.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mpicomm import agreement, host_info
from mpicomm.errors import MpicommError
from mpicomm.native import c_library
from mpicomm.recorder import rank_text

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_LARGEST_SLOT_BYTES = 2**19  # the slots of a few ranks then stay in the cache
_MEMORY_BYTES = 2**26  # of all slots of a node: with more ranks, slots are smaller
_SMALLEST_REGION_BYTES = 2**8  # of a slot for each rank: the header of scatter and three cache lines
_NUM_BUFFERS = 2  # of slots, which alternate
_PAGE_BYTES = 4096  # alignment of the slots
_SPLIT_BYTES = 2**16  # from this size on, each rank reduces a part: below, the second synchronisation costs more
_POLLS_BEFORE_YIELD = 2000  # of a waiting rank, before it offers its core to other processes
_POLLS_BEFORE_YIELD_IF_CROWDED = 20  # the rank that it waits for may need this core
_NOTED_BYTES = 2**17  # from this size on, autograd is notified of a write; it takes about a microsecond
_PAUSE_NS = 1_000_000  # how long the C library waits until it returns to Python
_SOON_NS = 50_000  # the same in asynchronous calls: waking the worker's thread, and taking the GIL, takes longer
_EAGER_BYTES = 2**18  # up to this size, asynchronous calls begin in the call: the copy takes less than waking a thread
_TOKEN_BYTES = 16  # at the start of the memory: shows that a process ID in /proc is that of the rank


def memory_bytes(size: int) -> int:
    """Return the size in bytes of the shared memory of `size` ranks."""
    return _head_bytes(size) + _NUM_BUFFERS * size * _slot_bytes(size)


def _head_bytes(size: int) -> int:
    """Return the size in bytes of the unused first line, which has the memory's token, and of the ranks' lines."""
    return -(-(1 + _NUM_BUFFERS * size) * c_library.LINE_BYTES // _PAGE_BYTES) * _PAGE_BYTES


def _slot_bytes(size: int) -> int:
    share = _MEMORY_BYTES // (_NUM_BUFFERS * size) // _PAGE_BYTES * _PAGE_BYTES
    return max(_SMALLEST_REGION_BYTES * size, min(_LARGEST_SLOT_BYTES, share))


class NativeSlots:
    """The operations by the C library: one call for each operation, which releases the GIL.

    Tensors are dense. Each operation returns whether it ran: it does not if a rank's tensor is not on the host.

    Raises:
        RuntimeError: If the ranks call different operations, or with tensors of different sizes: on all ranks, but in
            gather only on the root, and in scatter on the root and the ranks with wrong sizes.
    """

    def __init__(self, comm: Intracomm, memory: torch.Tensor, on_wait: Callable[[], None]) -> None:
        """Use memory that the ranks share (collective).

        Args:
            memory: The shared memory, of `memory_bytes(comm.size)` bytes.
            on_wait: Called every millisecond while other ranks are late; may raise an exception.
        """
        library = c_library.load()
        assert library is not None
        self._start, self._continue = library.mpicomm_start, library.mpicomm_continue
        self._memory = memory  # mapped as long as the tensor lives
        self.rank, self.size = comm.rank, comm.size
        self._on_wait = on_wait
        cores = _gather_cores_per_rank(comm)
        is_crowded = cores < 1
        # Without a second core, the worker's thread would only interrupt the caller.
        self._eager_bytes = sys.maxsize if cores < 2 else _EAGER_BYTES
        address, slot_bytes = memory.data_ptr(), _slot_bytes(comm.size)
        self.step_bytes = slot_bytes // comm.size // 64 * 64 - c_library.HEADER
        """Blocks of at most this size move in one step, in which a source may overlap the other blocks."""
        self._state = c_library.SlotState(
            lines=address + c_library.LINE_BYTES,
            slots=address + _head_bytes(comm.size),
            slot_bytes=slot_bytes,
            split_bytes=_SPLIT_BYTES,
            pause_ns=_PAUSE_NS,
            soon_ns=-1 if is_crowded else _SOON_NS,
            rank=comm.rank,
            size=comm.size,
            spins=_POLLS_BEFORE_YIELD_IF_CROWDED if is_crowded else _POLLS_BEFORE_YIELD,
        )
        self._address = ctypes.addressof(self._state)

    def reduce(
        self, tensor: torch.Tensor, root: int | None = None, *, divisor: int = 1, extreme: int = c_library.NO_EXTREME
    ) -> bool:
        """Reduce in place: add and divide, or keep an extreme; the root has the result, or all ranks if it is None."""
        operation = c_library.ALL_REDUCE if root is None else c_library.REDUCE
        address = tensor.data_ptr() if tensor.is_cpu else None
        call = c_library.reducing(operation, tensor.dtype, root or 0, divisor, extreme)
        ran = self._run(call, address, address, c_library.KINDS[tensor.dtype][1] * tensor.numel())
        if root in (None, self.rank):
            _note_write(tensor)
        return ran

    def reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, *, divisor: int = 1, extreme: int = c_library.NO_EXTREME
    ) -> bool:
        """Reduce a tensor with a block for each rank, as `reduce`.

        Args:
            out: Receives this rank's block, and may be that block. For a tensor of bfloat16 or float16, it may be
                in float32, and then receives the sums before they are rounded.
        """
        address = tensor.data_ptr() if tensor.is_cpu and out.is_cpu else None
        call = c_library.reducing(c_library.REDUCE_SCATTER, tensor.dtype, divisor=divisor, extreme=extreme)
        if out.dtype != tensor.dtype:
            call |= c_library.IS_WIDE
        ran = self._run(call, address, out.data_ptr(), c_library.KINDS[tensor.dtype][1] * out.numel())
        _note_write(out)
        return ran

    def all_gather(self, tensor: torch.Tensor, source: torch.Tensor | None = None) -> bool:
        """Fill a tensor that has a block for each rank with each rank's source, or the block in its place if None."""
        address, nbytes = tensor.data_ptr(), tensor.nbytes // self.size
        own_block = address + nbytes * self.rank if source is None else source.data_ptr()
        are_on_host = tensor.is_cpu and (source is None or source.is_cpu)
        ran = self._run(
            c_library.moving(c_library.ALL_GATHER, tensor.dtype), own_block if are_on_host else None, address, nbytes
        )
        _note_write(tensor)
        return ran

    def all_gather_list(self, tensors: Sequence[torch.Tensor], source: torch.Tensor) -> bool:
        """Fill a list of tensors of one size with each rank's source."""
        return self._fill_list(c_library.moving(c_library.ALL_GATHER, source.dtype), tensors, source)

    def broadcast(self, tensor: torch.Tensor, root: int) -> bool:
        """Copy the root's tensor to the other ranks."""
        address = tensor.data_ptr() if tensor.is_cpu else None
        ran = self._run(c_library.moving(c_library.BROADCAST, tensor.dtype, root), address, address, tensor.nbytes)
        if self.rank != root:
            _note_write(tensor)
        return ran

    def all_to_all(self, tensor: torch.Tensor, source: torch.Tensor) -> bool:
        """Send each rank its block of the source, and receive one from each rank in separate memory of that size."""
        address = source.data_ptr() if source.is_cpu and tensor.is_cpu else None
        ran = self._run(
            c_library.moving(c_library.ALL_TO_ALL, tensor.dtype), address, tensor.data_ptr(), tensor.nbytes // self.size
        )
        _note_write(tensor)
        return ran

    def barrier(self, check: Callable[[], None]) -> None:
        """Wait for all ranks; while they are late, `check` is called, which may sleep or raise an exception."""
        status = self._start(self._address, c_library.BARRIER_CALL, self._address, None, 0)  # NULL: not on the host
        self._finish(status, check)

    def gather(self, tensors: Sequence[torch.Tensor], source: torch.Tensor, root: int) -> bool:
        """Fill the root's list with each rank's source, of the size of its tensor; it is empty on other ranks."""
        return self._fill_list(c_library.moving(c_library.GATHER, source.dtype, root), tensors, source)

    def scatter(self, tensor: torch.Tensor, sources: Sequence[torch.Tensor], root: int) -> bool:
        """Copy each tensor of the root's list to a rank's tensor of its size; it is empty on other ranks."""
        blocks, are_on_host = _blocks(sources)
        memory = blocks.buffer_info()[0] if sources else tensor.data_ptr()  # NULL would mean: not on the host
        address = memory if are_on_host and tensor.is_cpu else None
        call = c_library.moving(c_library.SCATTER, tensor.dtype, root) | c_library.IS_LIST
        ran = self._run(call, address, tensor.data_ptr(), tensor.nbytes)
        _note_write(tensor)
        return ran

    def _fill_list(self, call: int, tensors: Sequence[torch.Tensor], source: torch.Tensor) -> bool:
        blocks, are_on_host = _blocks(tensors)
        address = source.data_ptr() if are_on_host and source.is_cpu else None
        ran = self._run(call | c_library.IS_LIST, address, blocks.buffer_info()[0], source.nbytes)
        note_writes(tensors)
        return ran

    def _run(self, call: int, source: int | None, out: int | None, count: int) -> bool:
        return self._finish(self._start(self._address, call, source, out, count))

    def _finish(self, status: int, check: Callable[[], None] | None = None) -> bool:
        while status == c_library.WAITING:
            if check is not None:
                check()
            self._on_wait()
            status = self._continue(self._address)
        if status == c_library.DIFFERENT:
            self._explain()
        return status == c_library.DONE

    def parts_of_plain_calls(self) -> tuple[int, int, int, Callable[[], None], Callable[[], None]]:
        """Return what the extension module needs to run plain calls in these slots, in turn with this object."""
        return self._address, self.step_bytes, self._eager_bytes, self._on_wait, self._explain

    def _explain(self) -> None:
        """Raise the error of ranks that call different operations, or with tensors of different sizes."""
        signatures, sizes = self._published()
        if len(set(signatures)) > 1:
            raise different_calls([c_library.describe(signature) for signature in signatures])
        are_blocks = self._state.operation in (c_library.GATHER, c_library.SCATTER)
        raise _different_blocks(sizes) if are_blocks else different_sizes(min(sizes), max(sizes))

    def _published(self) -> tuple[list[int], list[int]]:
        """Return the calls and the numbers of bytes that the ranks have published for the current step."""
        lines = self._memory[: _head_bytes(self.size)].view(torch.int64).view(-1, c_library.LINE_BYTES // 8)
        first = 1 + self._state.number % _NUM_BUFFERS * self.size
        return tuple(lines[first : first + self.size, 1:3].t().tolist())


def _blocks(tensors: Sequence[torch.Tensor]) -> tuple[array[int], bool]:
    """Return the addresses and sizes of tensors for the library, and whether all are on the host."""
    blocks = array("Q", [number for tensor in tensors for number in (tensor.data_ptr(), tensor.nbytes)])
    return blocks, all([tensor.is_cpu for tensor in tensors])  # noqa: C419  faster


def _note_write(tensor: torch.Tensor) -> None:
    """Let autograd detect that a tensor that it needs was overwritten."""
    if tensor.nbytes >= _NOTED_BYTES and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def note_writes(tensors: Sequence[torch.Tensor]) -> None:
    """Do the same for several tensors."""
    for tensor in tensors:
        _note_write(tensor)


def _gather_cores_per_rank(comm: Intracomm) -> float:
    """Return how many cores the ranks of this node have, on average (collective)."""
    return len(set().union(*comm.allgather(os.sched_getaffinity(0)))) / comm.size


def different_calls(calls: Sequence[str] = ()) -> RuntimeError:
    """Return the error of ranks whose calls differ; they are given as text by rank in the group, if they are known."""
    by_call = agreement.ranks_by_value(calls, range(len(calls)))
    shown = "".join(f"\n  {rank_text.name_ranks(ranks)} of the group: {call}" for call, ranks in by_call.items())
    return RuntimeError(
        f"all ranks must call the same operation with tensors of the same dtype, got different calls"
        f"{':' if shown else '.'}{shown}\nSet MPICOMM_DEBUG=1 to see the line of each rank's call."
    )


def different_sizes(least_bytes: int, most_bytes: int) -> RuntimeError:
    """Return the error of ranks the sizes of whose tensors differ."""
    return RuntimeError(
        f"tensor sizes must be equal on all ranks, got {least_bytes} to {most_bytes} bytes.\n"
        f"Pass tensors of the same size on every rank."
    )


def _different_blocks(sizes: Sequence[int]) -> RuntimeError:
    return RuntimeError(
        f"the tensors of the root's list must have the sizes of the ranks' tensors, which have "
        f"{', '.join(map(str, sizes))} bytes in rank order.\nPass a list of tensors of these sizes on the root."
    )


# -- the shared memory -------------------------------------------------------------------------------------------------


class NoSharedMemoryError(MpicommError):
    """The ranks of a node cannot share memory."""


def share_memory(comm: Intracomm, nbytes: int) -> torch.Tensor:
    """Return memory, as bytes, that all ranks of `comm` share (collective). It is mapped as long as the tensor lives.

    It has no name in any file system, and is freed with the last process that maps it: one rank creates a file in
    memory (memfd_create) and reserves its pages; the other ranks open it through that rank's entry in /proc, which
    requires the same user and the same PID namespace. The size of /dev/shm does not limit it.

    Raises:
        NoSharedMemoryError: On all ranks, if one of them cannot share the memory.
    """
    memory: torch.Tensor | None = None
    descriptor: int | None = None

    def create() -> tuple[int, int, bytes]:
        nonlocal descriptor, memory
        try:
            descriptor, memory = _create_memory(nbytes)
        except Exception as error:
            raise NoSharedMemoryError(f"failed to reserve {nbytes >> 20} MiB: {error}") from error
        return os.getpid(), descriptor, _token(memory)

    def open_() -> None:
        nonlocal memory
        memory = _open_memory(offer, nbytes) if memory is None else memory

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


def _create_memory(nbytes: int) -> tuple[int, torch.Tensor]:
    """Create a file in memory; return its descriptor and its memory, which begins with a random token."""
    descriptor = host_info.memory_file("mpicomm")
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # otherwise access to a page could kill the process
        memory = _map(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    memory[:_TOKEN_BYTES] = torch.frombuffer(bytearray(secrets.token_bytes(_TOKEN_BYTES)), dtype=torch.uint8)
    return descriptor, memory


def _open_memory(offer: tuple[int, int, bytes], nbytes: int) -> torch.Tensor:
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
