"""The synchronous operations that return a new tensor, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpicomm.horovod.compression import Compression, Compressor
from mpicomm.horovod.process_sets import ProcessSet, global_process_set
from mpicomm.horovod.reduce_op import Average, Sum
from mpicomm.horovod.tensor_operations import (
    allgather_async,
    alltoall_async,
    broadcast_async,
    effective_op,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_reducescatter_async,
    synchronize,
)

Tensors = Sequence[Tensor]


class _Allreduce(torch.autograd.Function):
    """The gradient of a reduction is the reduction of the gradients."""

    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], name: str | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        return tuple(synchronize(grouped_allreduce_async(tensors, name=name, **options)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *grouped_allreduce(gradients, **ctx.options)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks (collective, differentiable); the tensor itself does not change.

    Args:
        tensor: The tensor; its shape, dtype and device type must be equal on all ranks.
        average: Deprecated; use `op`.
        name: The name by which the ranks match their tensors, in any order; by default, the position among the calls
            without a name.
        compression: hvd.Compression.none or hvd.Compression.fp16.
        op: hvd.Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Returns:
        The reduced tensor, of the shape of `tensor`.

    Raises:
        ValueError: If an argument is invalid, or an operation of the same name is pending.
        HorovodInternalError: If the arguments differ between ranks, or the ranks can no longer communicate.
    """
    return grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)[
        0
    ]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce a list of tensors as one operation (collective, differentiable); see `allreduce`."""
    options = {
        "op": effective_op(op, average, "allreduce"),
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    compressed = [compression.compress(each) for each in tensors]
    reduced = _Allreduce.apply(options, name, *[each for each, _ in compressed])
    return [compression.decompress(each, kept) for each, (_, kept) in zip(reduced, compressed, strict=True)]


class _Allgather(torch.autograd.Function):
    """The gradient is this rank's part of the average of the gradients, as in Horovod."""

    @staticmethod
    def forward(
        ctx: Any, is_group: bool, name: str | None, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        if is_group:
            gathered = tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))
        else:
            gathered = (synchronize(allgather_async(tensors[0], name, process_set)),)
        ctx.rows, ctx.process_set = [each.shape[0] for each in tensors], process_set
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        reduced = grouped_allreduce(gradients, op=Average, process_set=ctx.process_set)
        rows = synchronize(allgather_async(torch.tensor([ctx.rows]), process_set=ctx.process_set))
        starts = rows[: ctx.process_set.rank()].sum(0).tolist()
        parts = [each.narrow(0, start, n) for each, start, n in zip(reduced, starts, ctx.rows, strict=True)]
        return None, None, None, *parts


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the tensors of all ranks along the first dimension (collective, differentiable).

    Args:
        tensor: The tensor of this rank, of one or more dimensions; the first one may differ between ranks.
        name: The name by which the ranks match their tensors; see `allreduce`.
        process_set: The ranks that take part.

    Returns:
        The rows of all tensors, in the order of the ranks; the other dimensions are those of `tensor`.

    Raises:
        ValueError: If an argument is invalid, or an operation of the same name is pending.
        HorovodInternalError: If the arguments differ between ranks, or the ranks can no longer communicate.
    """
    return _Allgather.apply(False, name, process_set, tensor)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Gather a list of tensors as one operation (collective, differentiable); see `allgather`."""
    return _Allgather.apply(True, name, process_set, *tensors)


class _Broadcast(torch.autograd.Function):
    """The gradient is the average of the gradients on the root, and zero on the other ranks, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        reduced = allreduce(gradient, op=Average, process_set=ctx.process_set)
        ranks = ctx.process_set.ranks
        is_root = ranks[ctx.process_set.rank()] == ctx.root_rank
        return reduced if is_root else torch.zeros_like(reduced), None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Send the root's tensor to all ranks (collective, differentiable); the tensor itself does not change.

    Args:
        tensor: The tensor; its shape, dtype and device type must be equal on all ranks.
        root_rank: The rank in the job that sends.
        name: The name by which the ranks match their tensors; see `allreduce`.
        process_set: The ranks that take part.

    Returns:
        The root's tensor.

    Raises:
        ValueError: If an argument is invalid, or an operation of the same name is pending.
        HorovodInternalError: If the arguments differ between ranks, or the ranks can no longer communicate.
    """
    return _Broadcast.apply(tensor, root_rank, name, process_set)


class _Alltoall(torch.autograd.Function):
    """The gradient of a row returns to the rank that sent it."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set, ctx.rows = received, process_set, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        returned, _ = synchronize(alltoall_async(gradient, ctx.received, None, ctx.process_set))
        rest = ctx.rows - returned.shape[0]  # rows that were sent to no rank
        if rest:
            returned = torch.cat([returned, returned.new_zeros(rest, *returned.shape[1:])])
        return returned, None, None, None


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send parts of a tensor to all ranks, and receive their parts (collective, differentiable).

    Args:
        tensor: The tensor, of one or more dimensions, which is divided along the first one.
        splits: The number of rows for each rank, as a list or a tensor of int32; equal parts by default.
        name: The name by which the ranks match their tensors; see `allreduce`.
        process_set: The ranks that take part.

    Returns:
        The received rows; with `splits`, also the number of rows from each rank.

    Raises:
        ValueError: If an argument is invalid, or an operation of the same name is pending.
        HorovodInternalError: If the arguments differ between ranks, or the ranks can no longer communicate.
    """
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


class _Reducescatter(torch.autograd.Function):
    """The gradient gathers the parts; of a sum it is multiplied by the number of ranks, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], name: str | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        return tuple(synchronize(grouped_reducescatter_async(tensors, name, **options)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        process_set = ctx.options["process_set"]
        factor = ctx.options["prescale_factor"] * ctx.options["postscale_factor"]
        if ctx.options["op"] == Sum:
            factor *= process_set.size()
        return None, None, *grouped_allgather([each * factor for each in gradients], process_set=process_set)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over all ranks, each of which receives its part of the rows (collective, differentiable).

    Args:
        tensor: The tensor; its shape, dtype and device type must be equal on all ranks. If the number of ranks does not
            divide the first dimension, the first ranks receive one row more.
        name: The name by which the ranks match their tensors; see `allreduce`.
        compression: hvd.Compression.none or hvd.Compression.fp16.
        op: hvd.Average or hvd.Sum.
        process_set: The ranks that take part.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        This rank's rows of the reduced tensor.

    Raises:
        ValueError: If an argument is invalid, or an operation of the same name is pending.
        HorovodInternalError: If the operation is not supported, the arguments differ between ranks, or the ranks can no
            longer communicate.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce and scatter a list of tensors as one operation (collective, differentiable); see `reducescatter`."""
    options = {
        "op": op,
        "process_set": process_set,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }
    compressed = [compression.compress(each) for each in tensors]
    reduced = _Reducescatter.apply(options, name, *[each for each, _ in compressed])
    return [compression.decompress(each, kept) for each, (_, kept) in zip(reduced, compressed, strict=True)]
