"""From tensors to memory that MPI reads and writes, and back.

MPI wants dense memory on the host. A tensor that is that already is used as it is; any other is packed into a dense
host tensor by the caller's thread and, where the operation writes, unpacked by the thread that ran it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpicomm import mpi
from mpicomm.backend import dtypes

if TYPE_CHECKING:
    from mpi4py.MPI import Datatype

_INT_MAX = 2**31 - 1

Spec = tuple[object, int, "Datatype"]


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor's elements lie in host memory as MPI would read them."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def pack(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's content in dense host memory: the tensor itself where it is that already.

    From a GPU, the copy waits for the work queued on the current stream.
    """
    if is_dense(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def room(tensor: torch.Tensor) -> torch.Tensor:
    """Return dense host memory to receive the tensor's content: the tensor itself where it can."""
    if is_dense(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")  # whatever the user's default device is


def unpack(dense: torch.Tensor, tensor: torch.Tensor) -> None:
    """Bring back into `tensor` what an operation wrote into its dense stand-in."""
    if dense is tensor:
        return
    tensor.detach().copy_(dense)
    if tensor.is_cuda:
        # The stream of this thread need not be the one on which the caller reads the tensor.
        torch.cuda.current_stream(tensor.device).synchronize()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two dense tensors share memory."""
    start, other_start = one.data_ptr(), other.data_ptr()
    return start < other_start + other.nbytes and other_start < start + one.nbytes


def spec(dense: torch.Tensor, datatype: Datatype | None = None) -> Spec:
    """Return the buffer specification of a dense tensor for mpi4py; the tensor must outlive its use."""
    _check_count(dense)
    memory = mpi.api().memory.fromaddress(dense.data_ptr(), dense.nbytes)
    return (memory, dense.numel(), datatype or dtypes.carrier(dense.dtype))


def blocks_spec(dense: torch.Tensor, size: int, datatype: Datatype | None = None) -> Spec:
    """Return the specification of a dense tensor that holds one block per rank: mpi4py wants the count of a block."""
    memory, count, datatype = spec(dense, datatype)
    return (memory, count // size, datatype)


def vector_spec(dense: torch.Tensor, counts: Sequence[int]) -> tuple[object, Sequence[int], Datatype]:
    """Return the specification of a dense tensor that holds one run of elements per rank."""
    memory, _, datatype = spec(dense)
    return (memory, counts, datatype)


def _check_count(dense: torch.Tensor) -> None:
    if dense.numel() > _INT_MAX and not mpi.has_large_counts():
        raise ValueError(
            f"a tensor of {dense.numel()} elements is more than this MPI takes in one call ({_INT_MAX}).\n"
            f"Send it in parts, or use an MPI of version 4 of the standard, as MPICH 4 and later are."
        )
