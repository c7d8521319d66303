"""The operations on tensors, synchronous and asynchronous, single and grouped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpicomm import arguments
from mpicomm.horovod import gpu_order, reduce_op, submission
from mpicomm.horovod.exceptions import HorovodInternalError
from mpicomm.horovod.process_sets import ProcessSet, engine_of, global_process_set
from mpicomm.horovod.reduce_op import Adasum, Average, Sum
from mpicomm.horovod.submission import ANY_ROWS, Layout, Signature, Submission

Tensors = Sequence[Tensor]

_ADASUM_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Grouped(Submission):
    """The handle of a grouped operation, whose result is a list."""

    __slots__ = ()


# -- handles -----------------------------------------------------------------------------------------------------------


def poll(handle: Submission) -> bool:
    """Return whether an operation has completed, so that `synchronize` does not wait. Does not communicate.

    Args:
        handle: The handle that the asynchronous function returned.
    """
    return handle.is_done


def synchronize(handle: Submission | Callable[[], Any]) -> Any:
    """Wait for an operation and return its result; every rank of the process set must have started the operation.

    Args:
        handle: The handle that the asynchronous function returned.

    Returns:
        The output tensor; a list of a grouped operation; the output and the received splits of `alltoall_async`.

    Raises:
        HorovodInternalError: If the arguments differ between ranks, or the ranks can no longer communicate.
    """
    if not isinstance(handle, Submission):
        return handle()  # of a sparse tensor
    handle.engine.wait(handle)
    if handle.error is not None:
        raise handle.error
    if handle.events:
        gpu_order.wait(handle.events)
        gpu_order.use_in_current_stream(handle.result)
    if isinstance(handle, _Grouped):
        return list(handle.result)
    if handle.splits is not None:
        return tuple(handle.result)
    return handle.result[0] if handle.result else None


# -- submission --------------------------------------------------------------------------------------------------------


def _submit(
    process_set: ProcessSet,
    name: str | None,
    signature: Signature,
    tensors: Tensors,
    outputs: Tensors = (),
    splits: Tensor | None = None,
    *,
    is_group: bool = False,
) -> Submission:
    kind = signature.kind
    engine = engine_of(process_set, kind)
    full = engine.next_name(kind) if name is None else f"{kind}.{name}"
    make = _Grouped if is_group else Submission
    handle = make(full, signature, tensors, outputs, splits, is_cacheable=name is not None)
    if any(each.device == "cuda" for each in signature.layouts):
        handle.events = gpu_order.record(tensors)
    return engine.submit(handle)


def _layouts(tensors: Tensors, what: str, *, any_rows: bool = False, needs_rows: bool = False) -> tuple[Layout, ...]:
    """Return the layouts of tensors after checking them."""
    layouts = []
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise ValueError(
                f"{what}: expected dense tensors, got {arguments.shown(tensor)}.\n"
                f"Pass tensors; for sparse ones, use hvd.sparse_allreduce_async()."
            )
        shape = tensor.shape
        if needs_rows and not shape:
            raise ValueError(
                f"{what}: the tensor must have at least one dimension, got a scalar.\nPass tensor.reshape(1)."
            )
        layouts.append(Layout(tensor.dtype, (ANY_ROWS, *shape[1:]) if any_rows else shape, tensor.device.type))
    return tuple(layouts)


def effective_op(op: int | None, average: bool | None, what: str) -> int:
    """Return the operation that `op` and the deprecated `average` select."""
    if average is not None:
        if op is not None:
            raise ValueError(f"{what}: got both op and average.\nPass op only.")
        warnings.warn(
            f"{what}: average is deprecated; pass op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=4
        )
        return Average if average else Sum
    return Average if op is None else reduce_op.check(op, what)


def _check_adasum(process_set: ProcessSet, tensors: Tensors) -> None:
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum supports the global process set only.\nUse another op, or omit process_set.")
    size = process_set.size() or 1
    if size & (size - 1):
        raise NotImplementedError(f"Adasum needs a power of two of ranks, got {size}.\nUse another op.")
    for each in tensors:
        if each.dtype not in _ADASUM_DTYPES:
            raise ValueError(
                f"Adasum reduces floating-point tensors, got {each.dtype}.\nUse another op, or convert it."
            )


# -- allreduce ---------------------------------------------------------------------------------------------------------


def _allreduce(
    tensors: Tensors,
    outputs: Tensors,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    *,
    is_group: bool = False,
) -> Submission:
    if op == Adasum:
        _check_adasum(process_set, tensors)
    layouts = _layouts(tensors, submission.ALLREDUCE)
    signature = Signature(submission.ALLREDUCE, layouts, op, 0, prescale_factor, postscale_factor)
    return _submit(process_set, name, signature, tensors, outputs, is_group=is_group)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Submission:
    """Start to reduce a tensor over all ranks (collective); the tensor itself does not change.

    The call returns without waiting for the other ranks, as do all functions with `_async` in their names.

    Args:
        tensor: The tensor; its shape, dtype and device type must be equal on all ranks.
        average: Deprecated; use `op`.
        name: The name by which the ranks match their tensors, in any order; by default, the position among the calls
            without a name.
        op: hvd.Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        ValueError: If an argument is invalid, or an operation of the same name is pending.
        HorovodInternalError: If Horovod has been shut down.
    """
    op = effective_op(op, average, "allreduce")
    return _allreduce([tensor], [_like(tensor)], name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Submission:
    """Start to reduce a tensor in place (collective); see `allreduce_async`."""
    op = effective_op(op, average, "allreduce")
    return _allreduce([tensor], [tensor], name, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor in place over all ranks, and return it (collective).

    The arguments are those of `allreduce_async`, and the errors those of `allreduce_async` and `synchronize`.
    """
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Submission:
    """Start to reduce a list of tensors as one operation (collective); see `allreduce_async`."""
    op = effective_op(op, average, "grouped_allreduce")
    outputs = [_like(each) for each in tensors]
    return _allreduce(list(tensors), outputs, name, op, prescale_factor, postscale_factor, process_set, is_group=True)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Submission:
    """Start to reduce a list of tensors in place as one operation (collective); see `allreduce_async`."""
    op = effective_op(op, average, "grouped_allreduce")
    tensors = list(tensors)
    return _allreduce(tensors, tensors, name, op, prescale_factor, postscale_factor, process_set, is_group=True)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce a list of tensors in place as one operation, and return it (collective).

    The arguments are those of `allreduce_async`, and the errors those of `allreduce_async` and `synchronize`.
    """
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to sum or average a sparse tensor (COO) over all ranks, whose entries may differ (collective).

    Args:
        tensor: The sparse tensor; its shape and dtype must be equal on all ranks.
        name: The name by which the ranks match their tensors.
        op: hvd.Average or hvd.Sum.
        process_set: The ranks that take part.

    Returns:
        A function without arguments, which waits for the operation and returns the tensor; entries with equal indices
        add up.

    Raises:
        ValueError: If the operation is neither Average nor Sum, or one of the same name is pending.
    """
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async: op must be hvd.Average or hvd.Sum, got {op!r}.\nPass one of these.")
    entries = tensor.detach().coalesce()
    indices = allgather_async(entries.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(entries.values(), f"{name}.values", process_set)

    def result() -> Tensor:
        gathered = synchronize(values)
        if op == Average:
            gathered = gathered / process_set.size()
        return torch.sparse_coo_tensor(synchronize(indices).t(), gathered, tensor.shape, check_invariants=False)

    return result


# -- allgather, broadcast ----------------------------------------------------------------------------------------------


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Submission:
    """Start to concatenate the tensors of all ranks along the first dimension (collective).

    Args:
        tensor: The tensor of this rank, with one or more dimensions; the first one may differ between ranks.
        name: The name by which the ranks match their tensors; see `allreduce_async`.
        process_set: The ranks that take part.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        ValueError: If an argument is invalid, or an operation of the same name is pending.
        HorovodInternalError: If Horovod has been shut down.
    """
    layouts = _layouts([tensor], submission.ALLGATHER, any_rows=True, needs_rows=True)
    return _submit(process_set, name, Signature(submission.ALLGATHER, layouts), [tensor])


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Submission:
    """Start to gather a list of tensors as one operation (collective); see `allgather_async`."""
    layouts = _layouts(tensors, "grouped_allgather", any_rows=True, needs_rows=True)
    return _submit(process_set, name, Signature(submission.ALLGATHER, layouts), list(tensors), is_group=True)


def _broadcast(tensor: Tensor, output: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Submission:
    ranks = process_set.ranks or []
    if process_set.process_set_id is not None and root_rank not in ranks:
        raise ValueError(
            f"broadcast: root_rank must be one of the ranks {ranks}, got {root_rank!r}.\nPass one of these."
        )
    layouts = _layouts([tensor], submission.BROADCAST)
    root = ranks.index(root_rank) if ranks else 0
    return _submit(process_set, name, Signature(submission.BROADCAST, layouts, root=root), [tensor], [output])


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Submission:
    """Start to send the root's tensor to all ranks (collective); the tensor itself does not change.

    Args:
        tensor: The tensor; its shape, dtype and device type must be equal on all ranks.
        root_rank: The rank in the job that sends.
        name: The name by which the ranks match their tensors; see `allreduce_async`.
        process_set: The ranks that take part.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        ValueError: If an argument is invalid, or an operation of the same name is pending.
        HorovodInternalError: If Horovod has been shut down.
    """
    return _broadcast(tensor, _like(tensor), root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Submission:
    """Start to send the root's tensor to all ranks, in place (collective); see `broadcast_async`."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Send the root's tensor to all ranks, in place, and return it (collective).

    The arguments are those of `broadcast_async`, and the errors those of `broadcast_async` and `synchronize`.
    """
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


# -- alltoall, reducescatter -------------------------------------------------------------------------------------------


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Submission:
    """Start to send parts of a tensor to all ranks, and to receive their parts (collective).

    Args:
        tensor: The tensor, of one or more dimensions, which is divided along the first one.
        splits: The number of rows for each rank, as a list or a tensor of int32; equal parts by default.
        name: The name by which the ranks match their tensors; see `allreduce_async`.
        process_set: The ranks that take part.

    Returns:
        A handle for `poll` and `synchronize`, which returns the received rows, and their number from each rank.

    Raises:
        ValueError: If an argument is invalid, or an operation of the same name is pending.
        HorovodInternalError: If Horovod has been shut down.
    """
    layouts = _layouts([tensor], submission.ALLTOALL, any_rows=True, needs_rows=True)
    size = process_set.size()
    rows = tensor.shape[0]
    if size is None:
        engine_of(process_set, submission.ALLTOALL)  # raises the error
        raise AssertionError
    if splits is None:
        if rows % size:
            raise ValueError(
                f"alltoall: without splits, the first dimension must be a multiple of {size}, the number of ranks, got "
                f"{rows}.\nPass splits."
            )
        counts = torch.full((size,), rows // size, dtype=torch.int32)
    elif isinstance(splits, torch.Tensor):
        counts = splits
    else:
        counts = torch.tensor(splits, dtype=torch.int32)
    if counts.dtype != torch.int32 or counts.shape != (size,):
        raise ValueError(
            f"alltoall: splits must be {size} numbers of int32, one for each rank, got shape {tuple(counts.shape)} of "
            f"{counts.dtype}.\nPass the number of rows for each rank."
        )
    if int(counts.sum()) > rows or int(counts.min()) < 0:
        raise ValueError(
            f"alltoall: splits must be at least 0, and their sum at most {rows}, the first dimension, got "
            f"{counts.tolist()}.\nPass the number of rows for each rank."
        )
    return _submit(process_set, name, Signature(submission.ALLTOALL, layouts), [tensor], splits=counts)


def _reducescatter(
    tensors: Tensors,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    *,
    is_group: bool = False,
) -> Submission:
    if op not in (Average, Sum):
        raise HorovodInternalError(f"reducescatter: op must be hvd.Average or hvd.Sum, got {op!r}.\nPass one of these.")
    layouts = _layouts(tensors, submission.REDUCESCATTER, needs_rows=True)
    signature = Signature(submission.REDUCESCATTER, layouts, op, 0, prescale_factor, postscale_factor)
    return _submit(process_set, name, signature, list(tensors), is_group=is_group)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Submission:
    """Start to reduce a tensor over all ranks, each of which receives its part of the rows (collective).

    Args:
        tensor: The tensor, of one or more dimensions; its shape, dtype and device type must be equal on all ranks. If
            the number of ranks does not divide the first dimension, the first ranks receive one row more.
        name: The name by which the ranks match their tensors; see `allreduce_async`.
        op: hvd.Average or hvd.Sum.
        process_set: The ranks that take part.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        ValueError: If an argument is invalid, or an operation of the same name is pending.
        HorovodInternalError: If the operation is not supported, or Horovod has been shut down.
    """
    return _reducescatter([tensor], name, op, process_set, prescale_factor, postscale_factor)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Submission:
    """Start to reduce and scatter a list of tensors as one operation (collective); see `reducescatter_async`."""
    return _reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor, is_group=True)


# -- synchronisation ---------------------------------------------------------------------------------------------------


def join(device: int = -1) -> int:
    """Contribute zeros to the allreduces of the other ranks until all ranks have joined (collective).

    Args:
        device: Ignored: the zeros are allocated on the device type of the other ranks' tensors.

    Returns:
        The last rank that joined.

    Raises:
        ValueError: If Horovod is not initialized.
        HorovodInternalError: If the ranks can no longer communicate.
    """
    del device
    engine = engine_of(global_process_set, submission.JOIN)
    handle = engine.submit(Submission(submission.JOIN, Signature(submission.JOIN), is_cacheable=False))
    return synchronize(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for all ranks of a process set (collective).

    Raises:
        ValueError: If Horovod is not initialized, or this rank is not in the process set.
        HorovodInternalError: If the ranks can no longer communicate.
    """
    synchronize(_submit(process_set, submission.BARRIER, Signature(submission.BARRIER), []))
