"""What an operation's arguments must be; every error says which operation, which argument, got and expected."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch

from mpicomm.backend import buffers, dtypes, mpi_calls, torch_internals
from mpicomm.errors import MpicommError

T = TypeVar("T")


def single(tensors: Any, what: str) -> torch.Tensor:
    """Return the one tensor of a list of one, or the tensor itself."""
    return tensor(tensors if isinstance(tensors, torch.Tensor) else only(tensors, what), what)


def single_written(tensors: Any, what: str) -> torch.Tensor:
    """Return the one tensor of a list of one, if it can be received into."""
    return written(tensors if isinstance(tensors, torch.Tensor) else only(tensors, what), what)


def some(values: Sequence[T], what: str) -> Sequence[T]:
    """Return a list if there is something in it."""
    if not values:
        raise ValueError(f"{what}: expected at least one tensor, got none.\nCall it only if there is something to do.")
    return values


def only_list(lists: Sequence[Any], what: str) -> Any:
    """Return the one list of a list of one, or the list of tensors itself."""
    return lists if lists and isinstance(lists[0], torch.Tensor) else only(lists, what)


def only(values: Sequence[T], what: str) -> T:
    """Return the one element of a list; torch's signatures allow several from the time of several GPUs per process."""
    if len(values) != 1:
        raise ValueError(f"{what}: expected one tensor (or list) per call, got {len(values)}.\nCall it once for each.")
    return values[0]


def tensor(value: Any, what: str) -> torch.Tensor:
    """Return `value` if it is a tensor that can be sent."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what}: expected a tensor, got {type(value).__name__}.\nPass a torch.Tensor.")
    value = torch_internals.arrived(value)
    if value.layout != torch.strided:
        raise ValueError(
            f"{what}: expected a dense tensor, got one of layout {value.layout}.\nConvert it with tensor.to_dense()."
        )
    if value.is_quantized:
        raise ValueError(
            f"{what}: expected a plain tensor, got a quantized one ({value.dtype}).\nSend tensor.int_repr() instead."
        )
    return in_memory(on_known_device(value, what), what)


def in_memory(value: torch.Tensor, what: str) -> torch.Tensor:
    """Return a tensor if its elements are somewhere: those of fake tensors and wrapper subclasses are not."""
    try:
        address = value.data_ptr()
    except RuntimeError:  # torch has no storage to show
        address = 0
    if not address and value.numel():
        raise ValueError(
            f"{what}: expected a tensor with elements in memory, got a {type(value).__name__} of shape "
            f"{list(value.shape)} that has none (a wrapper subclass, a fake tensor, or a storage that was freed).\n"
            f"Pass the plain tensor inside it."
        )
    return value


def on_known_device(value: torch.Tensor, what: str) -> torch.Tensor:
    """Return a tensor if it is where this back end can reach it."""
    if not (value.is_cpu or value.is_cuda):
        raise ValueError(
            f"{what}: expected a tensor on cpu or cuda, got one on {value.device}.\nMove it with tensor.cpu() first."
        )
    return value


def outside_of_graphs(value: torch.Tensor) -> None:
    """Check that the tensor's stream runs what it is given, and does not record it."""
    if torch_internals.is_capturing(value):
        raise MpicommError(
            "a CUDA graph is being recorded, and MPI cannot be part of one.\n"
            "Call the operation outside of it, or use NCCL (backend='cpu:mpi,cuda:nccl')."
        )


def written(value: Any, what: str) -> torch.Tensor:
    """Return `value` if it is a tensor that can be received into."""
    value = tensor(value, what)
    is_expanded = 0 in value.stride() and not value.is_contiguous()
    if is_expanded:
        raise ValueError(
            f"{what}: the output of shape {list(value.shape)} is expanded: several elements share one place.\n"
            f"Pass tensor.contiguous()."
        )
    return value


def one_per_rank(tensors: Any, size: int, what: str, argument: str, *, are_written: bool = False) -> list[torch.Tensor]:
    """Return the list if it has one proper tensor for each rank."""
    if len(tensors) != size:
        raise ValueError(
            f"{what}: {argument} has {len(tensors)} tensors, but the group has {size} ranks.\nPass one for each rank."
        )
    check = written if are_written else tensor
    return [check(each, what) for each in tensors]


def lists_per_rank(lists: Sequence[Any], size: int, length: int, what: str, argument: str) -> None:
    """Check that there is one list for each rank, each of a certain length."""
    lengths = [len(each) for each in lists]
    if lengths != [length] * size:
        raise ValueError(
            f"{what}: {argument} holds lists of {lengths} tensors, but the group has {size} ranks "
            f"and there are {length} inputs.\nPass {size} lists of {length} tensors."
        )


def distinct(outputs: Sequence[torch.Tensor], what: str, argument: str) -> None:
    """Check that no two outputs share memory, where the later result would overwrite the earlier one.

    Views whose elements only interleave, as the columns of a matrix do, are told from those that share some by their
    strides alone: they pass unless they are the same view.
    """
    for (_, one), (_, other) in itertools.pairwise(_by_address(outputs)):
        if _share(outputs[one], outputs[other]):
            raise ValueError(
                f"{what}: {argument}[{min(one, other)}] and {argument}[{max(one, other)}] share memory.\n"
                f"Pass tensors of their own, as [torch.empty_like(t) for _ in range(n)] makes; "
                f"[t] * n is the same tensor n times."
            )


def unread(outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], what: str) -> None:
    """Check that no output is in the input of another pair, which may be read after the output is written.

    Args:
        outputs: As `distinct` accepts them; equally many for each input, in the order of the inputs.
    """
    by_address, share = _by_address(outputs), len(outputs) // len(sources)
    for index, source in enumerate(sources):
        end = bisect.bisect_left(by_address, (source.data_ptr() + source.nbytes, -1))
        for _, other in reversed(by_address[:end]):
            if not _share(outputs[other], source):
                break
            if other // share != index:
                raise ValueError(
                    f"{what}: output {other} and input {index} share memory.\n"
                    f"Pass outputs that no other pair's input overlaps."
                )


def _by_address(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return address and index of the tensors that have elements, in ascending order."""
    return sorted((each.data_ptr(), index) for index, each in enumerate(tensors) if each.numel())


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_contiguous() and other.is_contiguous():
        return buffers.overlap(one, other)
    return one.data_ptr() == other.data_ptr()


def same_share(counts: Sequence[int], source_counts: Sequence[int], rank: int, what: str) -> None:
    """Check that a rank receives from itself what it sends to itself."""
    if counts[rank] != source_counts[rank]:
        raise ValueError(
            f"{what}: this rank sends itself {source_counts[rank]} elements, but expects {counts[rank]}.\n"
            f"Make both ranks of every pair expect what the other sends."
        )


def same_dtype(one: torch.Tensor, other: torch.Tensor, what: str, argument: str) -> None:
    """Check that two tensors have one dtype."""
    if one.dtype != other.dtype:
        raise ValueError(
            f"{what}: {argument} holds {dtypes.short(one.dtype)}, but the tensor is {dtypes.short(other.dtype)}.\n"
            f"Convert one of them."
        )


def same_size(one: torch.Tensor, other: torch.Tensor, what: str, argument: str) -> None:
    """Check that two tensors have equally many elements."""
    if one.numel() != other.numel():
        raise ValueError(
            f"{what}: {argument} has {one.numel()} elements (shape {list(one.shape)}), "
            f"but the tensor has {other.numel()} (shape {list(other.shape)}).\nMake them equal."
        )


def multiple(large: torch.Tensor, small: torch.Tensor, size: int, what: str, large_name: str, small_name: str) -> None:
    """Check that `large` holds exactly one block like `small` for each rank."""
    same_dtype(large, small, what, large_name)
    if large.numel() != size * small.numel():
        raise ValueError(
            f"{what}: {large_name} has {large.numel()} elements, but {small_name} has {small.numel()} "
            f"and the group {size} ranks.\nMake {large_name} hold {size * small.numel()}."
        )


def splits(sizes: Sequence[int], tensor: torch.Tensor, size: int, what: str, argument: str) -> list[int]:
    """Return how many elements each rank's rows of a tensor have.

    Args:
        sizes: Rows for each rank; none for equal parts.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % size:
            raise ValueError(
                f"{what}: the tensor has {rows} rows, which the group's {size} ranks cannot share equally.\n"
                f"Pass {argument}."
            )
        return [tensor.numel() // size] * size
    if len(sizes) != size or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(
            f"{what}: {argument}={list(sizes)} does not split {rows} rows between the group's {size} ranks.\n"
            f"Pass {size} sizes that add up to {rows}."
        )
    return [each * (tensor.numel() // rows if rows else 0) for each in sizes]


def rank(value: int, size: int, what: str, argument: str) -> int:
    """Return a rank if the group has it."""
    if not 0 <= value < size:
        raise ValueError(f"{what}: {argument}={value} is not a rank of this group.\nPass a rank from 0 to {size - 1}.")
    return value


def tag(value: int, what: str) -> int:
    """Return a tag if MPI can carry it."""
    largest = mpi_calls.largest_tag()
    if not 0 <= value <= largest:
        raise ValueError(f"{what}: tag={value} is not a tag of this MPI.\nPass a number from 0 to {largest}.")
    return value


def first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    """Return the first tensor among the values and the lists in them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, list | tuple) and (found := first_tensor(value)) is not None:
            return found
    return None
