"""Packing of tensors into dense memory, and unpacking.

The MPI calls need dense memory. A dense tensor is passed without a copy. The caller's thread packs any other tensor
into a dense buffer; if the operation writes the tensor, the thread that ran the operation unpacks the buffer. That
thread also joins lists of dense tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from mpicomm.devices import accelerator

Tensors = Sequence[torch.Tensor]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether MPI can read the tensor's memory directly: contiguous, no lazy conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def pack(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor with the content of `tensor`: `tensor` itself if it is dense, else a copy."""
    if is_dense(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the content of `tensor` as a flat tensor of bytes: a view if it is dense, else a copy."""
    dense = pack(tensor.detach())
    # Not view(-1): a contiguous tensor of one element may have any stride, with which it cannot be viewed as bytes.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def output_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor to receive the result for `tensor`: `tensor` itself if it is dense, else a new one."""
    if is_dense(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def unpack(dense: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy the result of an operation from the dense buffer into `tensor`, unless they are the same object."""
    if dense is tensor:
        return
    tensor.detach().copy_(dense)
    synchronize_stream(tensor)


def synchronize_stream(tensor: torch.Tensor) -> None:
    """Synchronise this thread's current stream on the tensor's GPU: MPI calls are not ordered by streams."""
    if not tensor.is_cpu:
        accelerator.current_stream(tensor.device).synchronize()


def mode_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the tensor may be written; inference mode is thread-local.

    The thread that finishes an operation may differ from the thread that called it.
    """
    return torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext()


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two dense tensors share memory."""
    start, second_start = first.data_ptr(), second.data_ptr()
    return start < second_start + second.nbytes and second_start < start + first.nbytes


def without_alias(dense: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    """Return `dense`, or a copy if it overlaps `other`: MPI forbids overlapping send and receive buffers."""
    return dense.detach().clone() if other is not None and overlap(dense, other) else dense


# -- several tensors as one flat tensor --------------------------------------------------------------------------------


def counts(tensors: Tensors) -> list[int]:
    """Return the number of elements of each tensor."""
    return [tensor.numel() for tensor in tensors]


def uneven_counts(tensors: Tensors) -> list[int] | None:
    """Return the tensors' numbers of elements, or None if all are equal: MPI has simpler calls for these."""
    sizes = counts(tensors)
    return None if all(size == sizes[0] for size in sizes) else sizes


def pack_all(tensors: Tensors) -> torch.Tensor:
    """Return the concatenated content of all tensors: a view if they are adjacent in one storage, else a copy."""
    flat = _common_memory(tensors)
    if flat is None:
        flat = _memory_for(tensors)
        for part, tensor in zip(flat.split(counts(tensors)), tensors, strict=True):
            part.view(tensor.shape).copy_(tensor.detach())
    return flat


def output_buffer_of_all(tensors: Tensors) -> torch.Tensor:
    """Return a flat tensor to receive the content of all tensors: a view if they are adjacent in one storage."""
    flat = _common_memory(tensors)
    return _memory_for(tensors) if flat is None else flat


def unpack_all(flat: torch.Tensor, tensors: Tensors) -> None:
    """Copy the result in the flat tensor of `output_buffer_of_all` into the tensors, unless it is a view of them."""
    if flat.data_ptr() == tensors[0].data_ptr():
        return
    for part, tensor in zip(flat.split(counts(tensors)), tensors, strict=True):
        unpack(part.view(tensor.shape), tensor)


def _memory_for(tensors: Tensors) -> torch.Tensor:
    return torch.empty(sum(counts(tensors)), dtype=tensors[0].dtype, device=tensors[0].device)


def _common_memory(tensors: Tensors) -> torch.Tensor | None:
    """Return a flat view of tensors that are adjacent in one storage (e.g. from `chunk`); None if they are not."""
    first = tensors[0]
    storage, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        if not is_dense(tensor) or tensor.storage_offset() != place or tensor.untyped_storage().data_ptr() != storage:
            return None
        place += tensor.numel()
    return first.detach().as_strided((place - first.storage_offset(),), (1,))
