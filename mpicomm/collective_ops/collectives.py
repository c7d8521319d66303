"""Collective operations on tensors, arrays, numbers and containers of them.

Unlike the functions of `torch.distributed`, they return their results in new memory and do not modify `data`, except
with `inplace` or `out`. Every operation takes `group` (a torch `ProcessGroup`, an mpi4py communicator, "node" for the
ranks of this node, "leaders" for the first rank of each node; all ranks by default) and `async_op`, which makes it
return a `Handle` at once. Ranks are numbered within the group.

`data` is a torch tensor, a NumPy or CuPy array, a NumPy scalar, a number (bool, int, float or complex), or a dict,
OrderedDict, list, tuple, namedtuple or dataclass of these and of None; the keys of a dict are str, int or None.

all_reduce, reduce, reduce_scatter, gather, all_gather, scatter and broadcast with `out` compare the ranks' calls before
they start: a mismatch raises `MismatchError` on every rank. So do the `_object` forms of gather, all_gather and
scatter. barrier, broadcast without `out`, all_to_all, and the `_object` forms of the last two do not.

If a rank cannot send its data (a leaf of an unsupported type, an object that cannot be pickled), that rank raises the
error, and the other ranks raise `MpicommError`, which names the rank and the error. The group remains usable.

Besides the errors that each operation documents, `group` raises ValueError if this rank is not in it, its name is
unknown or torch.distributed is not initialized; TypeError if it is not a group; and MpicommError if it is a name and
`bootstrap` has not been called. With MPICOMM_ON_TIMEOUT=raise, an operation that times out raises TimeoutError.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist

from mpicomm import torch_internals
from mpicomm.arguments import FLAG, Timeout, in_seconds
from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.collective_ops import data_movement, pytree, reducing, repeated_calls
from mpicomm.collective_ops.group_argument import GroupArgument, resolve
from mpicomm.collective_ops.handles import Handle, start
from mpicomm.collective_ops.point_to_point import take_each
from mpicomm.collective_ops.pytree import Data
from mpicomm.collective_ops.reducing import Op

T = TypeVar("T")
OpName = str | dist.ReduceOp

_SHORTEST_TIMEOUT = 1e-3  # seconds: torch rounds timeouts to milliseconds and treats 0 as the default


@overload
def barrier(group: Any = ..., *, timeout: Timeout = ..., async_op: Literal[False] = ...) -> None: ...
@overload
def barrier(group: Any = ..., *, timeout: Timeout = ..., async_op: Literal[True]) -> Handle[None]: ...
def barrier(group: Any = None, *, timeout: Timeout = None, async_op: bool = False) -> Handle[None] | None:
    """Block until every rank of the group has called barrier, with an optional timeout (collective).

    Args:
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        timeout: The longest wait, in seconds or as a timedelta; the group's timeout by default.
        async_op: Return a `Handle` at once. Pass the timeout to its `wait()`.

    Raises:
        TimeoutError: If a rank does not arrive within the timeout. The message names the missing ranks and where they
            are. The group is unusable afterwards.
        RuntimeError: If a rank does not arrive within the timeout, and the group uses another backend.
        ValueError: If the timeout is not between 0.001 and 1e9 seconds, or is given with `async_op=True`.
        TypeError: If the timeout is neither seconds nor a timedelta.
    """
    members = resolve(group, "barrier")
    FLAG.check(async_op, "async_op", "barrier")
    if not async_op:
        _barrier_within(members.handle, in_seconds(timeout, _SHORTEST_TIMEOUT, "the group's timeout"))
        return None
    if timeout is not None:
        raise ValueError(
            f"barrier: timeout must be None with async_op=True, got {timeout!r}.\nPass it to the handle's wait()."
        )

    return start(partial(data_movement.barrier, members), "barrier", members, async_op, [])


def _barrier_within(group: Any, seconds: float | None) -> None:
    """Wait for all ranks of a group of any backend (collective).

    Args:
        seconds: The longest wait; None for the group's own timeout.

    Raises:
        TimeoutError: If a rank does not arrive in time and the group uses this backend.
        RuntimeError: If a rank does not arrive in time and the group uses another backend.
    """
    if seconds is not None and not isinstance(group, MPIProcessGroup) and dist.get_backend(group) == "gloo":
        dist.monitored_barrier(group, datetime.timedelta(seconds=seconds), wait_all_ranks=True)
        return
    options = torch_internals.BarrierOptions()
    options.asyncOp = False
    if seconds is not None:
        options.timeout = datetime.timedelta(seconds=seconds)
    torch_internals.wait_for(group.barrier(options))


@overload
def all_reduce(
    data: T, op: OpName = ..., *, group: Any = ..., inplace: bool = ..., async_op: Literal[False] = ...
) -> T: ...
@overload
def all_reduce(
    data: T, op: OpName = ..., *, group: Any = ..., inplace: bool = ..., async_op: Literal[True]
) -> Handle[T]: ...
def all_reduce(
    data: Any, op: OpName = "sum", *, group: Any = None, async_op: bool = False, inplace: bool = False
) -> Any:
    """Reduce all ranks' data and return the result; unlike `torch.distributed.all_reduce`, not in place (collective).

    Leaves of the same dtype and device are packed into one tensor. Sums and products of Python integers are exact, also
    beyond 64 bits; other Python numbers are reduced in 64 bits.
    Differentiable for "sum" and "mean".

    Args:
        data: A tensor, an array, a number, or a container of them; of the same structure on all ranks.
        op: "sum", "mean" or "avg" (of integers: truncated in tensors and arrays, a float for Python numbers),
            "product", "min", "max", "band", "bor", "bxor", or a `torch.distributed.ReduceOp`.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the result.
        inplace: Write the result into the tensors and arrays of `data`, and return them.

    Returns:
        The reduced data on every rank, with the structure and shapes of `data`.

    Raises:
        ValueError: If the operation is unknown or not defined for a dtype, or `inplace` is set and a leaf cannot be
            written.
        TypeError: If `data` holds a leaf of an unsupported type.
        MismatchError: On every rank, if the ranks' data differ in structure, dtype, shape or device type.
    """
    FLAG.check(inplace, "inplace", "all_reduce")
    members = resolve(group, "all_reduce")
    if async_op is False and type(data) is torch.Tensor:
        reduced = repeated_calls.all_reduce(members, data, op, inplace=inplace)
        if reduced is not None:
            return reduced
    members, own_data, reduce_op = _reduction(data, op, members.handle, "all_reduce", is_output=inplace)

    steps = partial(reducing.reduce_on_all_ranks, members, own_data, reduce_op, inplace)
    return start(steps, "all_reduce", members, async_op, _tensors(own_data))


@overload
def reduce(
    data: T, dst: int = ..., op: OpName = ..., *, group: Any = ..., async_op: Literal[False] = ...
) -> T | None: ...
@overload
def reduce(
    data: T, dst: int = ..., op: OpName = ..., *, group: Any = ..., async_op: Literal[True]
) -> Handle[T | None]: ...
def reduce(data: Any, dst: int = 0, op: OpName = "sum", *, group: Any = None, async_op: bool = False) -> Any:
    """Reduce all ranks' data and return the result on `dst`; unlike torch's reduce, not in place (collective).

    Not differentiable: the result has no gradient.

    Args:
        data: A tensor, an array, a number, or a container of them; of the same structure on all ranks.
        dst: The rank in the group that receives the result.
        op: "sum", "mean" or "avg" (of integers: truncated in tensors and arrays, a float for Python numbers),
            "product", "min", "max", "band", "bor", "bxor", or a `torch.distributed.ReduceOp`.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the result.

    Returns:
        The reduced data on `dst`, None on the other ranks.

    Raises:
        ValueError: If the operation is unknown or not defined for a dtype, or `dst` is not a rank of the group.
        TypeError: If `data` holds a leaf of an unsupported type.
        MismatchError: On every rank, if the ranks' data differ in structure, dtype, shape or device type.
    """
    members, own_data, reduce_op = _reduction(data, op, group, "reduce", dst=dst)
    steps = partial(reducing.reduce_to_one, members, own_data, reduce_op, dst)
    return start(steps, "reduce", members, async_op, _tensors(own_data))


@overload
def reduce_scatter(data: T, op: OpName = ..., *, group: Any = ..., async_op: Literal[False] = ...) -> T: ...
@overload
def reduce_scatter(data: T, op: OpName = ..., *, group: Any = ..., async_op: Literal[True]) -> Handle[T]: ...
def reduce_scatter(data: Any, op: OpName = "sum", *, group: Any = None, async_op: bool = False) -> Any:
    """Reduce all ranks' data and return this rank's part; unlike torch's, it takes whole data, not a list (collective).

    Each leaf is split along its first dimension into one part per rank. If the length is not divisible, the first ranks
    get one row more, as in `torch.tensor_split`. Differentiable for "sum" and "mean".

    Args:
        data: A tensor, an array, or a container of them; every leaf has at least one dimension.
        op: "sum", "mean" or "avg" (truncated to an integer for tensors and arrays of integers), "product", "min",
            "max", "band", "bor", "bxor", or a `torch.distributed.ReduceOp`.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the result.

    Returns:
        This rank's part of the reduced data, in the structure of `data`.

    Raises:
        ValueError: If the operation is unknown or not defined for a dtype, or a leaf is a number or has no dimension.
        TypeError: If `data` holds a leaf of an unsupported type.
        MismatchError: On every rank, if the ranks' data differ in structure, dtype, shape or device type.
    """
    members, own_data, reduce_op = _reduction(data, op, group, "reduce_scatter", is_split=True)
    steps = partial(reducing.reduce_and_scatter, members, own_data, reduce_op)
    return start(steps, "reduce_scatter", members, async_op, _tensors(own_data))


@overload
def broadcast(data: None = ..., src: int = ..., *, group: Any = ..., out: T, async_op: Literal[False] = ...) -> T: ...
@overload
def broadcast(data: None = ..., src: int = ..., *, group: Any = ..., out: T, async_op: Literal[True]) -> Handle[T]: ...
@overload
def broadcast(
    data: None = ..., src: int = ..., *, group: Any = ..., out: None = ..., async_op: Literal[False] = ...
) -> Any: ...
@overload
def broadcast(
    data: None = ..., src: int = ..., *, group: Any = ..., out: None = ..., async_op: Literal[True]
) -> Handle[Any]: ...
@overload
def broadcast(
    data: T, src: int = ..., *, group: Any = ..., out: T | None = ..., async_op: Literal[False] = ...
) -> T: ...
@overload
def broadcast(
    data: T, src: int = ..., *, group: Any = ..., out: T | None = ..., async_op: Literal[True]
) -> Handle[T]: ...
def broadcast(data: Any = None, src: int = 0, *, group: Any = None, async_op: bool = False, out: Any = None) -> Any:
    """Return `src`'s data on every rank; unlike `torch.distributed.broadcast`, not in place (collective).

    The other ranks need no buffer: structure, dtypes, shapes and device types are sent before the content.
    Differentiable unless `out` is given.

    Args:
        data: A tensor, an array, a number, or a container of them. Ignored on ranks other than `src`.
        src: The rank in the group that sends.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the result.
        out: Tensors or arrays to write the data into, and to return; on all ranks or on none. The description of the
            data is then not sent. If `data` is None on `src`, the content of `out` is sent.

    Returns:
        The data of `src` on every rank; a copy on `src` too.

    Raises:
        ValueError: If `src` is not a rank of the group, (on `src`) `data` and `out` are both None, or a leaf of `out`
            is a number, is read-only or requires a gradient.
        TypeError: If `data` (on `src` only) or `out` holds a leaf of an unsupported type.
        MpicommError: On the other ranks, if `src` cannot send its data, the data are on a GPU and this rank has none,
            or this rank cannot import a class of the data.
        MismatchError: On every rank, if `out` differs between the ranks, or does not match `data`.
    """
    members = resolve(group, "broadcast", src=src)
    if out is not None:
        return _broadcast_into(members, data, out, src, async_op)
    return _broadcast(members, partial(_to_send, data), src, async_op, "broadcast")


@overload
def gather(data: T, dst: int = ..., *, group: Any = ..., async_op: Literal[False] = ...) -> list[T] | None: ...
@overload
def gather(data: T, dst: int = ..., *, group: Any = ..., async_op: Literal[True]) -> Handle[list[T] | None]: ...
def gather(data: Any, dst: int = 0, *, group: Any = None, async_op: bool = False) -> Any:
    """Return a list of all ranks' data on `dst`; unlike torch's, without a `gather_list` to fill (collective).

    The length of a leaf's first dimension may differ between the ranks. Not differentiable: the result
    has no gradient.

    Args:
        data: A tensor, an array, a number, or a container of them.
        dst: The rank in the group that receives the list.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the result.

    Returns:
        The list, by rank, on `dst`; None on the other ranks.

    Raises:
        ValueError: If `dst` is not a rank of the group.
        TypeError: If `data` holds a leaf of an unsupported type.
        MismatchError: On every rank, if the ranks' data differ in more than the length of the first dimension.
    """
    members = resolve(group, "gather", dst=dst)
    return _gather(members, partial(pytree.take, data, "gather"), dst, async_op, "gather")


@overload
def all_gather(data: T, *, group: Any = ..., async_op: Literal[False] = ...) -> list[T]: ...
@overload
def all_gather(data: T, *, group: Any = ..., async_op: Literal[True]) -> Handle[list[T]]: ...
def all_gather(data: Any, *, group: Any = None, async_op: bool = False) -> Any:
    """Return a list of all ranks' data on every rank; unlike torch's, without a `tensor_list` to fill (collective).

    The length of a leaf's first dimension may differ between the ranks. Differentiable.

    Args:
        data: A tensor, an array, a number, or a container of them.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the result.

    Returns:
        The list, by rank.

    Raises:
        TypeError: If `data` holds a leaf of an unsupported type.
        MismatchError: On every rank, if the ranks' data differ in more than the length of the first dimension.
    """
    members = resolve(group, "all_gather")
    return _gather(members, partial(pytree.take, data, "all_gather"), None, async_op, "all_gather")


@overload
def all_to_all(items: Sequence[T], *, group: Any = ..., async_op: Literal[False] = ...) -> list[T]: ...
@overload
def all_to_all(items: Sequence[T], *, group: Any = ..., async_op: Literal[True]) -> Handle[list[T]]: ...
def all_to_all(items: Sequence[Any], *, group: Any = None, async_op: bool = False) -> Any:
    """Send `items[r]` to rank r and return the received items; unlike torch's, without an output list (collective).

    Differentiable.

    Args:
        items: One item for each rank: tensors, arrays, numbers or containers of them, of any structure and length.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the result.

    Returns:
        The items that the ranks sent to this rank, in a list by rank.

    Raises:
        ValueError: If the number of items is not the number of ranks.
        TypeError: If `items` is not a list or tuple, or holds a leaf of an unsupported type.
        MpicommError: If this rank cannot import a class of the received items.
    """
    return _all_to_all(resolve(group, "all_to_all"), items, pytree.take, async_op, "all_to_all")


# -- objects -----------------------------------------------------------------------------------------------------------


@overload
def broadcast_object(thing: None = ..., src: int = ..., *, group: Any = ..., async_op: Literal[False] = ...) -> Any: ...
@overload
def broadcast_object(
    thing: None = ..., src: int = ..., *, group: Any = ..., async_op: Literal[True]
) -> Handle[Any]: ...
@overload
def broadcast_object(thing: T, src: int = ..., *, group: Any = ..., async_op: Literal[False] = ...) -> T: ...
@overload
def broadcast_object(thing: T, src: int = ..., *, group: Any = ..., async_op: Literal[True]) -> Handle[T]: ...
def broadcast_object(thing: Any = None, src: int = 0, *, group: Any = None, async_op: bool = False) -> Any:
    """Return `src`'s object on every rank; it is sent pickled (collective).

    Args:
        thing: Any object that can be pickled. Ignored on ranks other than `src`.
        src: The rank in the group that sends.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the object.

    Raises:
        ValueError: If `src` is not a rank of the group.
        TypeError: On `src`, if the object cannot be pickled.
        MpicommError: On the other ranks, if `src` cannot pickle its object.
    """
    members = resolve(group, "broadcast_object", src=src)
    take = partial(pytree.pickled, thing, "broadcast_object")
    return _broadcast(members, take, src, async_op, "broadcast_object")


@overload
def gather_object(thing: T, dst: int = ..., *, group: Any = ..., async_op: Literal[False] = ...) -> list[T] | None: ...
@overload
def gather_object(thing: T, dst: int = ..., *, group: Any = ..., async_op: Literal[True]) -> Handle[list[T] | None]: ...
def gather_object(thing: Any, dst: int = 0, *, group: Any = None, async_op: bool = False) -> Any:
    """Return a list of all ranks' objects on `dst`; unlike torch's, without a list to fill (collective).

    The objects are sent pickled.

    Args:
        thing: Any object that can be pickled.
        dst: The rank in the group that receives the list.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the result.

    Returns:
        The list, by rank, on `dst`; None on the other ranks.

    Raises:
        ValueError: If `dst` is not a rank of the group.
        TypeError: If the object cannot be pickled.
    """
    members = resolve(group, "gather_object", dst=dst)
    return _gather(members, partial(pytree.pickled, thing, "gather_object"), dst, async_op, "gather_object")


@overload
def all_gather_object(thing: T, *, group: Any = ..., async_op: Literal[False] = ...) -> list[T]: ...
@overload
def all_gather_object(thing: T, *, group: Any = ..., async_op: Literal[True]) -> Handle[list[T]]: ...
def all_gather_object(thing: Any, *, group: Any = None, async_op: bool = False) -> Any:
    """Return a list of all ranks' objects on every rank; unlike torch's, without a list to fill (collective).

    The objects are sent pickled.

    Args:
        thing: Any object that can be pickled.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the list.

    Raises:
        TypeError: If the object cannot be pickled.
    """
    members = resolve(group, "all_gather_object")
    return _gather(members, partial(pytree.pickled, thing, "all_gather_object"), None, async_op, "all_gather_object")


@overload
def all_to_all_object(items: Sequence[T], *, group: Any = ..., async_op: Literal[False] = ...) -> list[T]: ...
@overload
def all_to_all_object(items: Sequence[T], *, group: Any = ..., async_op: Literal[True]) -> Handle[list[T]]: ...
def all_to_all_object(items: Sequence[Any], *, group: Any = None, async_op: bool = False) -> Any:
    """Send the object `items[r]`, pickled, to rank r and return the received objects in a list by rank (collective).

    Args:
        items: One object for each rank, on every rank; each object can be pickled.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the list.

    Raises:
        ValueError: If the number of objects is not the number of ranks.
        TypeError: If `items` is not a list or tuple, or an object cannot be pickled.
    """
    return _all_to_all(resolve(group, "all_to_all_object"), items, pytree.pickled, async_op, "all_to_all_object")


# -- shared by the tensor and object forms -----------------------------------------------------------------------------


def _reduction(
    data: Any, op: Any, group: Any, operation: str, *, is_output: bool = False, is_split: bool = False, **ranks: int
) -> tuple[GroupArgument, Data | Exception, Op]:
    members, reduce_op = resolve(group, operation, **ranks), Op.of(op, operation)

    def to_send() -> Data:
        own_data = pytree.take(data, operation, is_output=is_output)
        if is_split and any(tensor.dim() == 0 for tensor in own_data.tensors):
            raise ValueError(
                f"{operation}: expected leaves with at least one dimension, got a number or a scalar.\n"
                f"Reduce it with all_reduce."
            )
        own_data = reducing.widen_numbers(own_data, reduce_op, members)
        reduce_op.check(own_data, members.size, operation)
        return own_data

    return members, pytree.or_error(to_send), reduce_op


def _tensors(own_data: Data | Exception | None) -> Sequence[torch.Tensor] | None:
    return own_data.tensors if isinstance(own_data, Data) else None


def _to_send(data: Any) -> Data:
    if data is None:
        raise ValueError("broadcast: data must not be None on src, got None.\nPass the data to send on src.")
    return pytree.take(data, "broadcast")


def _broadcast(members: GroupArgument, take: Callable[[], Data], src: int, async_op: bool, operation: str) -> Any:
    own_data = pytree.or_error(take) if members.rank == src else None
    steps = partial(data_movement.broadcast, members, own_data, src)
    return start(steps, operation, members, async_op, _tensors(own_data))


def _broadcast_into(members: GroupArgument, data: Any, out: Any, src: int, async_op: bool) -> Any:
    output_buffer = pytree.or_error(partial(pytree.take, out, "broadcast", is_output=True))
    is_source = members.rank == src
    own_data = pytree.or_error(partial(pytree.take, data, "broadcast")) if is_source and data is not None else None
    steps = partial(data_movement.broadcast_into, members, own_data, output_buffer, out, src)
    return start(steps, "broadcast", members, async_op, _tensors(output_buffer))


def _gather(members: GroupArgument, take: Callable[[], Data], dst: int | None, async_op: bool, operation: str) -> Any:
    own_data = pytree.or_error(take)
    steps = partial(data_movement.gather, members, own_data, dst, operation)
    return start(steps, operation, members, async_op, _tensors(own_data))


def _all_to_all(
    members: GroupArgument, items: Any, take: Callable[[Any, str], Data], async_op: bool, operation: str
) -> Any:
    own_data = pytree.or_error(partial(take_each, items, members, operation, take))
    tensors = None if isinstance(own_data, Exception) else [tensor for item in own_data for tensor in item.tensors]
    return start(partial(data_movement.all_to_all, members, own_data), operation, members, async_op, tensors)
