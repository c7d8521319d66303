"""MPI calls on dense host memory, for any element count.

Before version 4 of the standard, MPI counts are 32-bit integers. With such an MPI, larger tensors use other calls:
reductions and broadcasts are split into parts, a point-to-point message is sent as one element of a contiguous datatype
as long as the message, and operations with a block for each rank use such messages. All ranks must select the same
method. For most operations a rank derives it from its own arguments; where sizes differ between ranks, the ranks agree
on it first.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpicomm import mpi
from mpicomm.backend import buffers, dtypes

if TYPE_CHECKING:
    from mpi4py.MPI import Datatype, Intracomm, Op, Request

Spec = tuple[object, int, "Datatype"]

_INT_MAX = 2**31 - 1


@functools.cache
def largest_count() -> int:
    """Return the largest element count of one MPI call."""
    return 2**63 - 1 if mpi.api().Get_version()[0] >= 4 else _INT_MAX


@functools.cache
def reduces_in_place() -> bool:
    """Return whether MPI_Reduce supports MPI_IN_PLACE on every root.

    In MPICH 4.0 another rank crashes if the root is not rank 0 and the tensor has more than 2 KiB (seen in 4.0.2, not
    in 5.0).
    """
    vendor, version = mpi.api().get_vendor()
    return vendor != "MPICH" or version[:2] != (4, 0)


@functools.cache
def largest_tag() -> int:
    """Return the largest tag for user messages; the two larger ones are reserved for internal messages."""
    api = mpi.api()
    return api.COMM_WORLD.Get_attr(api.TAG_UB) - 2


def tag_of_barrier() -> int:
    """Return the tag of the messages of monitored barriers."""
    return largest_tag() + 1


# -- reductions --------------------------------------------------------------------------------------------------------


def all_reduce(comm: Intracomm, dense: torch.Tensor, datatype: Datatype, op: Op) -> None:
    """Reduce in place, with the result on all ranks."""
    for part in _parts(dense):
        comm.Allreduce(mpi.api().IN_PLACE, _spec(part, datatype), op)


def reduce(comm: Intracomm, dense: torch.Tensor, datatype: Datatype, op: Op, root: int) -> None:
    """Reduce in place, with the result on the root."""
    for part in _parts(dense):
        if comm.rank == root:
            source = part.detach().clone() if root and not reduces_in_place() else None
            send_buffer = mpi.api().IN_PLACE if source is None else _spec(source, datatype)
            comm.Reduce(send_buffer, _spec(part, datatype), op, root)
        else:
            comm.Reduce(_spec(part, datatype), None, op, root)


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
                    _spec(part, datatype), None if output_buffer is None else _spec(output_buffer, datatype), op, root
                )
    elif counts is None:
        comm.Reduce_scatter_block(_blocks_spec(dense, comm.size, datatype), _spec(result, datatype), op)
    else:
        comm.Reduce_scatter(_spec(dense, datatype), _spec(result, datatype), list(counts), op)


# -- data movement -----------------------------------------------------------------------------------------------------


def broadcast(comm: Intracomm, dense: torch.Tensor, root: int) -> None:
    """Copy the root's memory to all ranks."""
    for part in _parts(dense):
        comm.Bcast(_spec(part), root)


def all_gather(comm: Intracomm, result: torch.Tensor, counts: Sequence[int] | None) -> None:
    """Gather into `result`, which holds `counts[r]` elements of rank r; this rank's block is already in its place.

    Args:
        counts: None if all are equal.
    """
    if result.numel() > largest_count():
        for root, block in _blocks(result, counts, comm.size).items():
            broadcast(comm, block, root)
    elif counts is None:
        comm.Allgather(mpi.api().IN_PLACE, _blocks_spec(result, comm.size))
    else:
        comm.Allgatherv(mpi.api().IN_PLACE, _vector_spec(result, counts))


def gather(comm: Intracomm, dense: torch.Tensor, result: torch.Tensor | None, counts: Sequence[int], root: int) -> None:
    """Gather `dense` of all ranks into the root's `result`, which holds `counts[r]` elements of rank r."""
    if root_sees_more(comm, result, root):
        receives = {} if result is None else _blocks(result, counts, comm.size)
        _exchange(comm, {root: dense}, receives)
    elif result is None:
        comm.Gatherv(_spec(dense), None, root)
    else:
        comm.Gatherv(_spec(dense), _vector_spec(result, counts), root)


def scatter(
    comm: Intracomm, dense: torch.Tensor | None, counts: Sequence[int], result: torch.Tensor, root: int
) -> None:
    """Scatter the root's `dense`: rank r receives `counts[r]` elements in `result`."""
    if root_sees_more(comm, dense, root):
        sends = {} if dense is None else _blocks(dense, counts, comm.size)
        _exchange(comm, sends, {root: result})
    elif dense is None:
        comm.Scatterv(None, _spec(result), root)
    else:
        comm.Scatterv(_vector_spec(dense, counts), _spec(result), root)


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
    most = max(dense.numel(), result.numel())
    is_large = most > largest_count() if counts is None else _any_rank_sees_more(comm, most)
    if is_large:
        _exchange(comm, _blocks(dense, counts, comm.size), _blocks(result, result_counts, comm.size))
    elif counts is None or result_counts is None:
        comm.Alltoall(_blocks_spec(dense, comm.size), _blocks_spec(result, comm.size))
    else:
        comm.Alltoallv(_vector_spec(dense, counts), _vector_spec(result, result_counts))


# -- point-to-point ----------------------------------------------------------------------------------------------------


def send(comm: Intracomm, dense: torch.Tensor, dst: int, tag: int) -> Request:
    """Start a non-blocking send."""
    return _post(comm.Isend, dense, dst, tag)


def receive(comm: Intracomm, dense: torch.Tensor, src: int, tag: int) -> Request:
    """Start a non-blocking receive."""
    return _post(comm.Irecv, dense, src, tag)


def received(status: Any, dtype: torch.dtype) -> int:
    """Return the number of elements in a received message."""
    return status.Get_elements(dtypes.carrier(dtype))


def _post(call: Callable[..., Request], dense: torch.Tensor, peer: int, tag: int) -> Request:
    memory, count, datatype = _spec(dense)
    if count <= largest_count():
        return call((memory, count, datatype), peer, tag)
    whole = datatype.Create_contiguous(count).Commit()
    try:
        return call((memory, 1, whole), peer, tag)
    finally:
        whole.Free()  # MPI defers the release until the message completes


def _exchange(comm: Intracomm, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> None:
    """Send one tensor to each rank in `sends` and receive one from each rank in `receives`; both may name this rank."""
    mine, here = sends.pop(comm.rank, None), receives.pop(comm.rank, None)
    tag = largest_tag() + 2
    requests = [receive(comm, output_buffer, src, tag) for src, output_buffer in receives.items()]
    requests += [send(comm, part, dst, tag) for dst, part in sends.items()]
    if here is not None and mine is not None:
        here.view(-1).detach().copy_(mine.detach().view(-1))
    mpi.api().Request.Waitall(requests)


# -- counts above MPI's limit ------------------------------------------------------------------------------------------


def root_sees_more(comm: Intracomm, memory: torch.Tensor | None, root: int) -> bool:
    """Return whether the root's tensor exceeds MPI's largest count (collective if that is 32-bit)."""
    if largest_count() > _INT_MAX:
        return False
    answer = array("i", [memory is not None and memory.numel() > largest_count()])
    comm.Bcast(answer, root)
    return bool(answer[0])


def _any_rank_sees_more(comm: Intracomm, count: int) -> bool:
    """Return whether any rank's count exceeds MPI's largest count (collective if that is 32-bit)."""
    if largest_count() > _INT_MAX:
        return False
    answer = array("i", [count > largest_count()])
    comm.Allreduce(mpi.api().IN_PLACE, answer, mpi.api().MAX)
    return bool(answer[0])


# -- buffer specifications ---------------------------------------------------------------------------------------------


def _spec(dense: torch.Tensor, datatype: Datatype | None = None) -> Spec:
    """Return mpi4py's buffer specification of a dense tensor; the tensor must outlive its use."""
    if dense.is_cuda:
        buffers.settle(dense)
    memory = mpi.api().memory.fromaddress(dense.data_ptr(), dense.nbytes)
    return memory, dense.numel(), dtypes.carrier(dense.dtype) if datatype is None else datatype


def _blocks_spec(dense: torch.Tensor, size: int, datatype: Datatype | None = None) -> Spec:
    """Return the specification of a dense tensor with one block per rank; mpi4py expects the count of one block."""
    memory, count, datatype = _spec(dense, datatype)
    return (memory, count // size, datatype)


def _vector_spec(dense: torch.Tensor, counts: Sequence[int]) -> tuple[object, Sequence[int], Datatype]:
    """Return the specification of a dense tensor with `counts[r]` consecutive elements for each rank r."""
    memory, _, datatype = _spec(dense)
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
