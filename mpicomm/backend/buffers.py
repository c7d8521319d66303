"""From tensors to dense memory, and back.

MPI wants dense memory. A tensor that is dense already is used as it is; any other is packed into a dense one by the
caller's thread and, where the operation writes, unpacked by the thread that ran it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

Tensors = Sequence[torch.Tensor]


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor's elements lie in memory as MPI would read them."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def pack(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's content in dense memory: the tensor itself where it is dense already."""
    if is_dense(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def output_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return dense memory to receive the tensor's content: the tensor itself where it can."""
    if is_dense(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def unpack(dense: torch.Tensor, tensor: torch.Tensor) -> None:
    """Bring back into `tensor` what an operation wrote into its dense stand-in."""
    if dense is tensor:
        return
    tensor.detach().copy_(dense)
    settle(tensor)


def settle(tensor: torch.Tensor) -> None:
    """Wait until what this thread has queued on the tensor's GPU is done: MPI knows nothing of streams."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def mode_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Return the mode in which a tensor may be written: whoever finishes its operation may be in another."""
    return torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two dense tensors share memory."""
    start, other_start = one.data_ptr(), other.data_ptr()
    return start < other_start + other.nbytes and other_start < start + one.nbytes


def without_alias(dense: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    """Return a dense tensor's content in memory that `other` does not touch: MPI forbids to read what it writes."""
    return dense.detach().clone() if other is not None and overlap(dense, other) else dense


# -- many tensors as one -----------------------------------------------------------------------------------------------


def counts(tensors: Tensors) -> list[int]:
    """Return how many elements each tensor has."""
    return [each.numel() for each in tensors]


def pack_all(tensors: Tensors) -> torch.Tensor:
    """Return all tensors' content one after the other in dense memory: their own where it lies so."""
    flat = _common_memory(tensors)
    if flat is None:
        flat = _memory_for(tensors)
        for part, tensor in zip(flat.split(counts(tensors)), tensors, strict=True):
            part.view(tensor.shape).copy_(tensor.detach())
    return flat


def room_for_all(tensors: Tensors) -> torch.Tensor:
    """Return dense memory to receive all tensors' content: their own where they lie one after the other."""
    flat = _common_memory(tensors)
    return _memory_for(tensors) if flat is None else flat


def unpack_all(flat: torch.Tensor, tensors: Tensors) -> None:
    """Bring what an operation wrote into `room_for_all` into the tensors."""
    if flat.data_ptr() == tensors[0].data_ptr():
        return
    for part, tensor in zip(flat.split(counts(tensors)), tensors, strict=True):
        unpack(part.view(tensor.shape), tensor)


def _memory_for(tensors: Tensors) -> torch.Tensor:
    return torch.empty(sum(counts(tensors)), dtype=tensors[0].dtype, device=tensors[0].device)


def _common_memory(tensors: Tensors) -> torch.Tensor | None:
    """Return the memory in which the tensors lie one after the other, as the chunks of one tensor do."""
    first = tensors[0]
    storage, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for each in tensors:
        if not is_dense(each) or each.storage_offset() != place or each.untyped_storage().data_ptr() != storage:
            return None
        place += each.numel()
    return first.detach().as_strided((place - first.storage_offset(),), (1,))
