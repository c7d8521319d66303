"""Argument checks of the operations; each error names the operation and the argument, with got and expected."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mpicomm import torch_internals
from mpicomm.backend.transfer import buffers, dtypes, mpi_calls
from mpicomm.devices import vendor_backends, vendors
from mpicomm.errors import MpicommError

T = TypeVar("T")


def require_single_tensor(tensors: Any, operation: str) -> torch.Tensor:
    """Return a tensor that can be sent, given alone or as a list of one."""
    return require_tensor(
        tensors if isinstance(tensors, torch.Tensor) else require_single(tensors, operation), operation
    )


def require_single_output(tensors: Any, operation: str) -> torch.Tensor:
    """Return a tensor that can be received into, given alone or as a list of one."""
    return require_output(
        tensors if isinstance(tensors, torch.Tensor) else require_single(tensors, operation), operation
    )


def require_nonempty(values: Sequence[T], operation: str) -> Sequence[T]:
    """Return the list if it is not empty."""
    if not values:
        raise ValueError(
            f"{operation}: expected at least one tensor, got an empty list.\nSkip the call for an empty list."
        )
    return values


def require_single_list(lists: Sequence[Any], operation: str) -> Any:
    """Return a list of tensors, given alone or as the only element of a list."""
    return lists if lists and isinstance(lists[0], torch.Tensor) else require_single(lists, operation)


def require_single(values: Sequence[T], operation: str) -> T:
    """Return the element of a list of one; torch's signatures date from several GPUs per process and allow more."""
    if len(values) != 1:
        raise ValueError(
            f"{operation}: expected one tensor (or list) per call, got {len(values)}.\nMake one call per tensor."
        )
    return values[0]


def require_tensor(value: Any, operation: str) -> torch.Tensor:
    """Return `value` if it is a tensor that can be sent: dense, not quantized, on the CPU or a GPU, with storage."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{operation}: expected a tensor, got {type(value).__name__}.\nPass a torch.Tensor.")
    value = torch_internals.wait_if_pending(value)
    if value.layout != torch.strided:
        raise ValueError(
            f"{operation}: expected a dense tensor, got layout {value.layout}.\nConvert it with tensor.to_dense()."
        )
    if value.is_quantized:
        raise ValueError(
            f"{operation}: expected a tensor that is not quantized, got {value.dtype}.\nPass tensor.int_repr() instead."
        )
    return require_storage(require_known_device(value, operation), operation)


def require_storage(value: torch.Tensor, operation: str) -> torch.Tensor:
    """Return a tensor if it has storage; fake tensors and wrapper subclasses have none."""
    try:
        address = value.data_ptr()
    except RuntimeError:  # the tensor has no storage
        address = 0
    if not address and value.numel():
        raise ValueError(
            f"{operation}: expected a tensor with elements in memory, got a {type(value).__name__} of shape "
            f"{list(value.shape)} without storage (a wrapper subclass, a fake tensor, or a freed storage).\n"
            f"Pass the plain tensor that it wraps."
        )
    return value


def require_known_device(value: torch.Tensor, operation: str) -> torch.Tensor:
    """Return a tensor if this backend supports its device."""
    if not value.is_cpu and value.device.type != vendor_backends.device_type():
        raise ValueError(
            f"{operation}: expected a tensor on the CPU or a GPU, got one on {value.device}.\n"
            f"Move it with tensor.cpu() first."
        )
    return value


def require_no_graph_capture(value: torch.Tensor) -> None:
    """Check that no capture of a graph, such as a CUDA graph, is in progress on the tensor's stream."""
    if vendors.is_capturing(value.device):
        graph, kind = f"{vendors.vendor().name} graph", value.device.type
        backend = dist.get_default_backend_for_device(kind)
        raise MpicommError(
            f"a {graph} is being captured, but MPI operations cannot be part of a {graph}.\n"
            f"Call the operation outside the capture, or use {backend.upper()} (backend='cpu:mpi,{kind}:{backend}')."
        )


def require_output(value: Any, operation: str) -> torch.Tensor:
    """Return `value` if it is a tensor that can be received into."""
    value = require_tensor(value, operation)
    is_expanded = 0 in value.stride() and not value.is_contiguous()
    if is_expanded:
        raise ValueError(
            f"{operation}: the output of shape {list(value.shape)} is expanded: several elements share memory.\n"
            f"Pass tensor.contiguous()."
        )
    return value


def require_one_per_rank(
    tensors: Any, size: int, operation: str, argument: str, *, are_written: bool = False
) -> list[torch.Tensor]:
    """Return the list if it has one valid tensor per rank."""
    if len(tensors) != size:
        raise ValueError(
            f"{operation}: {argument} has {len(tensors)} tensors, but the group has {size} ranks.\n"
            f"Pass one tensor per rank."
        )
    check = require_output if are_written else require_tensor
    return [check(tensor, operation) for tensor in tensors]


def require_lists_per_rank(lists: Sequence[Any], size: int, length: int, operation: str, argument: str) -> None:
    """Check that there is one list per rank, each of `length` tensors."""
    lengths = [len(tensors) for tensors in lists]
    if lengths != [length] * size:
        raise ValueError(
            f"{operation}: {argument} has lists of {lengths} tensors, but the group has {size} ranks "
            f"and the call has {length} inputs.\nPass {size} lists of {length} tensors."
        )


def require_distinct(outputs: Sequence[torch.Tensor], operation: str, argument: str) -> None:
    """Check that no two outputs share memory: the later result would overwrite the earlier one.

    Strided views whose address ranges interleave (e.g. the columns of a matrix) are not analysed element by element:
    they pass unless they start at the same address.
    """
    for (_, first), (_, second) in itertools.pairwise(_by_address(outputs)):
        if _share(outputs[first], outputs[second]):
            raise ValueError(
                f"{operation}: {argument}[{min(first, second)}] and {argument}[{max(first, second)}] share memory.\n"
                f"Pass tensors with separate storage, such as [torch.empty_like(t) for _ in range(n)]; "
                f"[t] * n repeats one tensor n times."
            )


def require_unread_by_others(outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], operation: str) -> None:
    """Check that no output overlaps the input of another pair, which may be read after the output is written.

    Args:
        outputs: Outputs that pass `require_distinct`; the same number for each input, in the order of the inputs.
    """
    by_address, share = _by_address(outputs), len(outputs) // len(sources)
    for index, source in enumerate(sources):
        end = bisect.bisect_left(by_address, (source.data_ptr() + source.nbytes, -1))
        for _, other in reversed(by_address[:end]):
            if not _share(outputs[other], source):
                break
            if other // share != index:
                raise ValueError(
                    f"{operation}: output {other} and input {index} share memory.\n"
                    f"Pass outputs that do not overlap the input of another pair."
                )


def _by_address(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return (address, index) of the tensors that have elements, in ascending order."""
    return sorted((tensor.data_ptr(), index) for index, tensor in enumerate(tensors) if tensor.numel())


def _share(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.is_contiguous() and second.is_contiguous():
        return buffers.overlap(first, second)
    return first.data_ptr() == second.data_ptr()


def require_same_own_count(counts: Sequence[int], source_counts: Sequence[int], rank: int, operation: str) -> None:
    """Check that a rank receives as many elements from itself as it sends to itself."""
    if counts[rank] != source_counts[rank]:
        raise ValueError(
            f"{operation}: this rank sends itself {source_counts[rank]} elements, but expects {counts[rank]} from "
            f"itself.\n"
            f"For each pair of ranks, make the output size equal to the input size on the sender."
        )


def require_same_dtype(value: torch.Tensor, tensor: torch.Tensor, operation: str, argument: str) -> None:
    """Check that two tensors have the same dtype."""
    if value.dtype != tensor.dtype:
        raise ValueError(
            f"{operation}: {argument} holds {dtypes.short(value.dtype)}, "
            f"but the tensor is {dtypes.short(tensor.dtype)}.\n"
            f"Convert one of them with tensor.to(dtype)."
        )


def require_same_size(value: torch.Tensor, tensor: torch.Tensor, operation: str, argument: str) -> None:
    """Check that two tensors have the same number of elements."""
    if value.numel() != tensor.numel():
        raise ValueError(
            f"{operation}: {argument} has {value.numel()} elements (shape {list(value.shape)}), "
            f"but the tensor has {tensor.numel()} (shape {list(tensor.shape)}).\nPass tensors of equal size."
        )


def require_matching(
    tensors: Sequence[torch.Tensor], own: torch.Tensor, rank: int, operation: str, argument: str
) -> None:
    """Check a list with a tensor for each rank: equal dtypes, and this rank's as large as its own tensor."""
    for tensor in tensors:
        require_same_dtype(tensor, own, operation, argument)
    require_same_size(tensors[rank], own, operation, f"{argument}[{rank}]")


def require_multiple_of(
    large: torch.Tensor, small: torch.Tensor, size: int, operation: str, large_name: str, small_name: str
) -> None:
    """Check that `large` has the dtype of `small` and `size` times its number of elements: one block per rank."""
    require_same_dtype(large, small, operation, large_name)
    if large.numel() != size * small.numel():
        raise ValueError(
            f"{operation}: {large_name} has {large.numel()} elements, but {small_name} has {small.numel()} "
            f"and the group has {size} ranks.\nPass {large_name} with {size * small.numel()} elements."
        )


def require_splits(sizes: Sequence[int], tensor: torch.Tensor, size: int, operation: str, argument: str) -> list[int]:
    """Return the number of elements of each rank's part of a tensor that is split along dimension 0.

    Args:
        sizes: Rows per rank; empty for equal parts.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % size:
            raise ValueError(
                f"{operation}: the tensor has {rows} rows, which are not divisible by the group size {size}.\n"
                f"Pass {argument}."
            )
        return [tensor.numel() // size] * size
    if len(sizes) != size or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(
            f"{operation}: {argument}={list(sizes)} does not split {rows} rows among the group's {size} ranks.\n"
            f"Pass {size} non-negative sizes with sum {rows}."
        )
    return [num_rows * (tensor.numel() // rows if rows else 0) for num_rows in sizes]


def require_rank(value: int, size: int, operation: str, argument: str) -> int:
    """Return `value` if it is a rank of the group."""
    if not 0 <= value < size:
        raise ValueError(
            f"{operation}: {argument}={value} is out of range for this group.\nPass a rank from 0 to {size - 1}."
        )
    return value


def require_tag(value: int, operation: str) -> int:
    """Return `value` if it is a valid tag for user messages."""
    largest = mpi_calls.largest_tag()
    if not 0 <= value <= largest:
        raise ValueError(f"{operation}: tag={value} is out of range for this MPI.\nPass a tag from 0 to {largest}.")
    return value
