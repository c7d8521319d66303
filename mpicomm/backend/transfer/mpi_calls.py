"""MPI calls on dense host memory, for any element count.

Before version 4 of the standard, MPI counts are 32-bit integers. With such an MPI, larger tensors use other calls:
reductions and broadcasts are split into parts, and a point-to-point message is sent as one element of a contiguous
datatype as long as the message. In operations with a block for each rank, a large block is such a message, and the
collective call moves the others. A block is large if its size times the number of ranks exceeds the limit:
both of its ranks know that, whatever the sizes of the other blocks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpicomm import mpi
from mpicomm.backend.transfer import buffers, dtypes

if TYPE_CHECKING:
    from mpi4py.MPI import Datatype, Intracomm, Op, Request

Spec = tuple[object, int, "Datatype"]

_INT_MAX = 2**31 - 1

_api = functools.cache(mpi.api)  # without a Python call: every operation needs its constants

_abandoned: list[object] = []
"""Requests of interrupted operations, and their tensors."""


@functools.cache
def largest_count() -> int:
    """Return the largest element count of one MPI call."""
    return 2**63 - 1 if _api().Get_version()[0] >= 4 else _INT_MAX


@functools.cache
def reduces_in_place() -> bool:
    """Return whether MPI_Reduce supports MPI_IN_PLACE on every root.

    In MPICH 4.0 another rank crashes if the root is not rank 0 and the tensor has more than 2 KiB (seen in 4.0.2, not
    in 5.0).
    """
    vendor, version = _api().get_vendor()
    return vendor != "MPICH" or version[:2] != (4, 0)


@functools.cache
def largest_tag() -> int:
    """Return the largest tag for user messages; the two larger ones are reserved for internal messages."""
    api = _api()
    return api.COMM_WORLD.Get_attr(api.TAG_UB) - 2


def tag_of_barrier() -> int:
    """Return the tag of the messages of monitored barriers."""
    return largest_tag() + 1


# -- reductions --------------------------------------------------------------------------------------------------------


def all_reduce(comm: Intracomm, dense: torch.Tensor, datatype: Datatype, op: Op) -> None:
    """Reduce in place, with the result on all ranks."""
    for part in _parts(dense):
        comm.Allreduce(_api().IN_PLACE, spec(part, datatype), op)


def reduce(comm: Intracomm, dense: torch.Tensor, datatype: Datatype, op: Op, root: int) -> None:
    """Reduce in place, with the result on the root."""
    for part in _parts(dense):
        if comm.rank == root:
            source = part.detach().clone() if root and not reduces_in_place() else None
            send_buffer = _api().IN_PLACE if source is None else spec(source, datatype)
            comm.Reduce(send_buffer, spec(part, datatype), op, root)
        else:
            comm.Reduce(spec(part, datatype), None, op, root)


def reduce_scatter(
    comm: Intracomm,
    dense: torch.Tensor,
    counts: Sequence[int] | None,
    result: torch.Tensor,
    datatype: Datatype,
    op: Op,
) -> None:
    """Reduce `dense`, which holds `counts[r]` elements for rank r; each rank receives its block in `result`.

    Args:
        counts: None if all are equal.
        result: Memory that does not overlap `dense`.
    """
    if dense.numel() > largest_count():
        # Each block is reduced to the rank that owns it, part by part.
        for root, block in _blocks(dense, counts, comm.size).items():
            output_buffers = _parts(result) if comm.rank == root else itertools.repeat(None)
            for part, output_buffer in zip(_parts(block), output_buffers, strict=False):
                comm.Reduce(
                    spec(part, datatype), None if output_buffer is None else spec(output_buffer, datatype), op, root
                )
    elif counts is None:
        comm.Reduce_scatter_block(_blocks_spec(dense, comm.size, datatype), spec(result, datatype), op)
    else:
        comm.Reduce_scatter(spec(dense, datatype), spec(result, datatype), list(counts), op)


# -- data movement -----------------------------------------------------------------------------------------------------


def broadcast(comm: Intracomm, dense: torch.Tensor, root: int) -> None:
    """Copy the root's memory to all ranks."""
    for part in _parts(dense):
        comm.Bcast(spec(part), root)


def all_gather(comm: Intracomm, result: torch.Tensor, counts: Sequence[int] | None) -> None:
    """Gather into `result`, which holds `counts[r]` elements of rank r; this rank's block is already in its place.

    Args:
        counts: None if all are equal.
    """
    if result.numel() > largest_count():
        for root, block in _blocks(result, counts, comm.size).items():
            broadcast(comm, block, root)
    elif counts is None:
        comm.Allgather(_api().IN_PLACE, _blocks_spec(result, comm.size))
    else:
        comm.Allgatherv(_api().IN_PLACE, _vector_spec(result, counts))


def gather(comm: Intracomm, dense: torch.Tensor, result: torch.Tensor | None, counts: Sequence[int], root: int) -> None:
    """Gather `dense` of all ranks into the root's `result`, which holds `counts[r]` elements of rank r."""
    if max((dense.numel(), *counts)) <= _most_in_block(comm):
        comm.Gatherv(spec(dense), None if result is None else _vector_spec(result, counts), root)
        return
    sent = _Blocks(dense, {root: dense.numel()}, comm)
    received = None if result is None else _Blocks(result, dict(enumerate(counts)), comm)
    output = None if received is None else _vector_spec(received.others, received.counts)
    with _messages(comm, sent.large, received.large if received else {}):
        comm.Gatherv(spec(sent.others), output, root)
    if received is not None:
        received.fill()


def scatter(
    comm: Intracomm, dense: torch.Tensor | None, counts: Sequence[int], result: torch.Tensor, root: int
) -> None:
    """Scatter the root's `dense`: rank r receives `counts[r]` elements in `result`."""
    if max((result.numel(), *counts)) <= _most_in_block(comm):
        comm.Scatterv(None if dense is None else _vector_spec(dense, counts), spec(result), root)
        return
    sent = None if dense is None else _Blocks(dense, dict(enumerate(counts)), comm)
    received = _Blocks(result, {root: result.numel()}, comm)
    source = None if sent is None else _vector_spec(sent.others, sent.counts)
    with _messages(comm, sent.large if sent else {}, received.large):
        comm.Scatterv(source, spec(received.others), root)
    received.fill()


def all_to_all(
    comm: Intracomm,
    dense: torch.Tensor,
    counts: Sequence[int] | None,
    result: torch.Tensor,
    result_counts: Sequence[int] | None,
) -> None:
    """Send `counts[r]` elements to rank r and receive `result_counts[r]` elements from it.

    Args:
        counts: None, like `result_counts`, if all blocks of all ranks have the same size and all ranks know that.
    """
    if counts is None or result_counts is None:
        if dense.numel() > largest_count():
            even = [dense.numel() // comm.size] * comm.size
            all_to_all(comm, dense, even, result, even)
        else:
            comm.Alltoall(_blocks_spec(dense, comm.size), _blocks_spec(result, comm.size))
        return
    if max((*counts, *result_counts)) <= _most_in_block(comm):
        comm.Alltoallv(_vector_spec(dense, counts), _vector_spec(result, result_counts))
        return
    sent = _Blocks(dense, dict(enumerate(counts)), comm)
    received = _Blocks(result, dict(enumerate(result_counts)), comm)
    with _messages(comm, sent.large, received.large):
        comm.Alltoallv(_vector_spec(sent.others, sent.counts), _vector_spec(received.others, received.counts))
    received.fill()


# -- point-to-point ----------------------------------------------------------------------------------------------------


def send(comm: Intracomm, dense: torch.Tensor, dst: int, tag: int) -> Request:
    """Start a non-blocking send; if `dense` is on a GPU, the GPU has written it."""
    return _post(comm.Isend, dense, dst, tag)


def receive(comm: Intracomm, dense: torch.Tensor, src: int, tag: int) -> Request:
    """Start a non-blocking receive; if `dense` is on a GPU, the GPU no longer uses it."""
    return _post(comm.Irecv, dense, src, tag)


def received_count(status: Any, dtype: torch.dtype) -> int:
    """Return the number of elements in a received message."""
    return status.Get_elements(dtypes.carrier(dtype))


def _post(call: Callable[..., Request], dense: torch.Tensor, peer: int, tag: int) -> Request:
    memory, count = _api().memory.fromaddress(dense.data_ptr(), dense.nbytes), dense.numel()
    datatype = dtypes.carrier(dense.dtype)
    if count <= largest_count():
        return call((memory, count, datatype), peer, tag)
    whole = datatype.Create_contiguous(count).Commit()
    try:
        return call((memory, 1, whole), peer, tag)
    finally:
        whole.Free()  # MPI defers the release until the message completes


# -- blocks above MPI's limit ------------------------------------------------------------------------------------------


def _most_in_block(comm: Intracomm) -> int:
    """Return the largest element count of a block that the collective call moves with those of the other ranks."""
    return largest_count() // comm.size


class _Blocks:
    """A dense tensor with a block for each of some ranks: the large blocks by rank, and the others together."""

    def __init__(self, dense: torch.Tensor, counts: dict[int, int], comm: Intracomm) -> None:
        """Separate the large blocks.

        Args:
            counts: The number of elements of each rank's block.
        """
        flat, most = dense.detach().view(-1), _most_in_block(comm)
        blocks = dict(zip(counts, flat.split(list(counts.values())), strict=True))
        self.large = {rank: block for rank, block in blocks.items() if block.numel() > most}
        self.counts = [0 if rank in self.large else count for rank, count in counts.items()]
        self._places = [block for rank, block in blocks.items() if rank not in self.large]
        self.others = torch.cat([*self._places, flat[:0]])

    def fill(self) -> None:
        """Copy received blocks to their places in the tensor."""
        for block, got in zip(self._places, self.others.split(buffers.counts(self._places)), strict=True):
            block.copy_(got)


@contextlib.contextmanager
def _messages(comm: Intracomm, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> Iterator[None]:
    """Start messages to and from other ranks, and wait for them at the end; both may have a block of this rank.

    After an exception, for example of a signal handler, MPI may still read and write the blocks.
    """
    tag = largest_tag() + 2
    for block in (*sends.values(), *receives.values()):
        buffers.synchronize_stream(block)
    requests = [receive(comm, block, src, tag) for src, block in receives.items() if src != comm.rank]
    requests += [send(comm, block, dst, tag) for dst, block in sends.items() if dst != comm.rank]
    if comm.rank in sends:
        receives[comm.rank].copy_(sends[comm.rank].detach().view(-1))
    try:
        yield
        _api().Request.Waitall(requests)
    except BaseException:
        _abandoned.append((requests, sends, receives))
        raise


# -- buffer specifications ---------------------------------------------------------------------------------------------


def spec(dense: torch.Tensor, datatype: Datatype | None = None) -> Spec:
    """Return mpi4py's buffer specification of a dense tensor; the tensor must outlive its use."""
    if not dense.is_cpu:
        buffers.synchronize_stream(dense)
    memory = _api().memory.fromaddress(dense.data_ptr(), dense.nbytes)
    return memory, dense.numel(), dtypes.carrier(dense.dtype) if datatype is None else datatype


def _blocks_spec(dense: torch.Tensor, size: int, datatype: Datatype | None = None) -> Spec:
    """Return the specification of a dense tensor with one block per rank; mpi4py expects the count of one block."""
    memory, count, datatype = spec(dense, datatype)
    return (memory, count // size, datatype)


def _vector_spec(dense: torch.Tensor, counts: Sequence[int]) -> tuple[object, Sequence[int], Datatype]:
    """Return the specification of a dense tensor with `counts[r]` consecutive elements for each rank r."""
    memory, _, datatype = spec(dense)
    return (memory, counts, datatype)


def _parts(dense: torch.Tensor) -> Iterable[torch.Tensor]:
    """Split a tensor into parts of at most MPI's largest count."""
    if dense.numel() <= largest_count():
        return (dense,)
    return dense.detach().view(-1).split(largest_count())


def _blocks(dense: torch.Tensor, counts: Sequence[int] | None, size: int) -> dict[int, torch.Tensor]:
    """Return each rank's block of a dense tensor, by rank."""
    flat = dense.detach().view(-1)
    sizes = flat.numel() // size if counts is None else list(counts)
    return dict(enumerate(flat.split(sizes)))
