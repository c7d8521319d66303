"""From tensors to memory that MPI reads and writes, and back.

MPI wants dense memory on the host. A tensor that is that already is used as it is; any other is packed into a dense
host tensor by the caller's thread and, where the operation writes, unpacked by the thread that ran it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

Tensors = Sequence[torch.Tensor]


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


def mode_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Return the mode in which a tensor may be written: whoever finishes its operation may be in another."""
    return torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two dense tensors share memory."""
    start, other_start = one.data_ptr(), other.data_ptr()
    return start < other_start + other.nbytes and other_start < start + one.nbytes


def apart(dense: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    """Return a dense tensor's content in memory that `other` does not touch: MPI forbids to read what it writes."""
    return dense.detach().clone() if other is not None and overlap(dense, other) else dense


# -- many tensors as one -----------------------------------------------------------------------------------------------


def counts(tensors: Tensors) -> list[int]:
    """Return how many elements each tensor has."""
    return [each.numel() for each in tensors]


def pack_all(tensors: Tensors) -> torch.Tensor:
    """Return all tensors' content one after the other in dense host memory: their own where it lies so."""
    flat = _common_memory(tensors)
    if flat is None:
        flat = _memory_for(tensors)
        for part, tensor in zip(flat.split(counts(tensors)), tensors, strict=True):
            part.view(tensor.shape).copy_(tensor.detach())
    return flat


def room_for_all(tensors: Tensors) -> torch.Tensor:
    """Return dense host memory to receive all tensors' content: their own where they lie one after the other."""
    flat = _common_memory(tensors)
    return _memory_for(tensors) if flat is None else flat


def unpack_all(flat: torch.Tensor, tensors: Tensors) -> None:
    """Bring what an operation wrote into `room_for_all` into the tensors."""
    if flat.data_ptr() == tensors[0].data_ptr():
        return
    for part, tensor in zip(flat.split(counts(tensors)), tensors, strict=True):
        unpack(part.view(tensor.shape), tensor)


def _memory_for(tensors: Tensors) -> torch.Tensor:
    return torch.empty(sum(counts(tensors)), dtype=tensors[0].dtype, device="cpu")


def _common_memory(tensors: Tensors) -> torch.Tensor | None:
    """Return the memory in which the tensors lie one after the other, as the chunks of one tensor do."""
    first = tensors[0]
    if not first.is_cpu:
        return None
    storage, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for each in tensors:
        if not is_dense(each) or each.storage_offset() != place or each.untyped_storage().data_ptr() != storage:
            return None
        place += each.numel()
    return first.detach().as_strided((place - first.storage_offset(),), (1,))
