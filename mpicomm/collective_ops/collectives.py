"""Collective operations: what all ranks of a group call together, on tensors, arrays, numbers and containers of them.

All of them take `group` (a group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out; ranks
are counted within the group) and `async_op`, with which they return a `Handle` at once. They compare the ranks' calls
first: what does not fit together is a `MismatchError` on every rank. Results are new; `data` are left as they are.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from mpicomm.arguments import FLAG
from mpicomm.backend import process_group
from mpicomm.collective_ops import data_movement, pytree, reducing
from mpicomm.collective_ops.group_argument import GroupArgument, resolve
from mpicomm.collective_ops.handles import Handle, Mode, Steps, start
from mpicomm.collective_ops.point_to_point import check_one_each
from mpicomm.collective_ops.pytree import Data
from mpicomm.collective_ops.reducing import Op
from mpicomm.durations import in_seconds

_SHORTEST_TIMEOUT = 1e-3  # seconds: torch counts timeouts in milliseconds, and takes 0 for the default


def barrier(
    group: Any = None, *, timeout: float | datetime.timedelta | None = None, async_op: bool = False
) -> Handle | None:
    """Wait until every rank of the group has come here (collective).

    Args:
        group: The group; all ranks if left out.
        timeout: How long to wait, in seconds or as a timedelta; the group's timeout if left out.
        async_op: Return a `Handle` at once, whose `wait()` takes the timeout.

    Raises:
        TimeoutError: If a rank has not come in time. It names the ranks that have not, and says where they are. The
            group cannot be used any more then.
        ValueError: If the timeout is not positive.
        TypeError: If the timeout is neither seconds nor a timedelta.
    """
    members = resolve(group, "barrier")
    FLAG.check(async_op, "async_op", "barrier")
    if not async_op:
        process_group.barrier_within(members.handle, in_seconds(timeout, _SHORTEST_TIMEOUT, "the group's timeout"))
        return None
    if timeout is not None:
        raise ValueError(
            f"barrier: timeout must be None with async_op=True, got {timeout!r}.\nPass it to the handle's wait()."
        )

    def steps(_mode: Mode) -> Steps:
        yield [dist.barrier(members.handle, async_op=True)]

    return start(steps, "barrier", members, async_op, [])


def all_reduce(
    data: Any,
    op: str | dist.ReduceOp = "sum",
    *,
    group: Any = None,
    async_op: bool = False,
    inplace: bool = False,
) -> Any:
    """Return the reduction of all ranks' data, on every rank (collective, differentiable for "sum" and "mean").

    Leaves of one dtype and device travel together, as one tensor. Numbers are reduced in 64 bits.

    Args:
        data: A tensor, an array, a number, or a container of them; of one structure on all ranks.
        op: "sum", "mean", "product", "min", "max", "band", "bor", "bxor", or one of torch's.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.
        inplace: Write the result into the tensors and arrays of `data`, and return these.

    Raises:
        ValueError: If the operation is unknown, or has no meaning for a dtype.
        MismatchError: On every rank, if the ranks' data differ in structure, dtype, shape or kind of device.
    """
    members, taken, how = _reduction(data, op, group, "all_reduce")
    FLAG.check(inplace, "inplace", "all_reduce")
    if inplace:
        pytree.check_writable(taken)

    def steps(mode: Mode) -> Steps:
        return reducing.reduce_everywhere(mode, members, taken, how, inplace=inplace)

    return start(steps, "all_reduce", members, async_op, taken.tensors)


def reduce(
    data: Any, dst: int = 0, op: str | dist.ReduceOp = "sum", *, group: Any = None, async_op: bool = False
) -> Any:
    """Return the reduction of all ranks' data on `dst`, None elsewhere (collective).

    Errors are those of `all_reduce`.

    Args:
        data: A tensor, an array, a number, or a container of them.
        dst: The rank that it goes to, within the group.
        op: "sum", "mean", "product", "min", "max", "band", "bor", "bxor", or one of torch's.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.
    """
    members, taken, how = _reduction(data, op, group, "reduce")
    members.global_rank(dst, "reduce", "dst")

    def steps(mode: Mode) -> Steps:
        return reducing.reduce_to_one(mode, members, taken, how, dst)

    return start(steps, "reduce", members, async_op, taken.tensors)


def reduce_scatter(data: Any, op: str | dist.ReduceOp = "sum", *, group: Any = None, async_op: bool = False) -> Any:
    """Return this rank's part of the reduction of all ranks' data (collective, differentiable for "sum" and "mean").

    Each leaf is cut along its first dimension into as many parts as there are ranks; where that does not divide, the
    first ranks get one row more, as by `torch.tensor_split`.

    Errors are those of `all_reduce`; every leaf needs a first dimension.

    Args:
        data: A tensor, an array, a number, or a container of them.
        op: "sum", "mean", "product", "min", "max", "band", "bor", "bxor", or one of torch's.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.
    """
    members, taken, how = _reduction(data, op, group, "reduce_scatter")
    if any(tensor.dim() == 0 for tensor in taken.tensors):
        raise ValueError("reduce_scatter: a number or a scalar cannot be cut.\nReduce it with all_reduce.")

    def steps(mode: Mode) -> Steps:
        return reducing.reduce_and_scatter(mode, members, taken, how)

    return start(steps, "reduce_scatter", members, async_op, taken.tensors)


def broadcast(data: Any = None, src: int = 0, *, group: Any = None, async_op: bool = False, out: Any = None) -> Any:
    """Return `src`'s data on every rank (collective, differentiable).

    Ranks other than `src` need not know what comes: dtype, shape, structure and kind of device travel ahead.

    Args:
        data: The data; they matter on `src` alone, and may be None elsewhere.
        src: The rank that it comes from, within the group.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.
        out: Tensors or arrays that the data are written into, on all ranks or on none. Nothing travels ahead then; on
            `src`, they are what is sent if `data` is None.

    Raises:
        MismatchError: On every rank, if their `out` differ.
    """
    members = resolve(group, "broadcast")
    members.global_rank(src, "broadcast", "src")
    is_source = members.rank == src
    if out is not None:
        return _broadcast_into(members, data if is_source else None, out, src, async_op)
    return _broadcast(members, _to_send(data) if is_source else None, src, async_op)


def gather(data: Any, dst: int = 0, *, group: Any = None, async_op: bool = False) -> Any:
    """Return a list of all ranks' data on `dst`, None elsewhere (collective).

    Leaves may be of any length in their first dimension.

    Args:
        data: A tensor, an array, a number, or a container of them.
        dst: The rank that it goes to, within the group.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.

    Raises:
        MismatchError: On every rank, if the ranks' data differ otherwise.
    """
    members = resolve(group, "gather")
    members.global_rank(dst, "gather", "dst")
    return _gather(members, pytree.take(data, "gather"), dst, async_op)


def all_gather(data: Any, *, group: Any = None, async_op: bool = False) -> Any:
    """Return a list of all ranks' data on every rank (collective, differentiable).

    Leaves may be of any length in their first dimension.

    Args:
        data: A tensor, an array, a number, or a container of them.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.

    Raises:
        MismatchError: On every rank, if the ranks' data differ otherwise.
    """
    return _all_gather(resolve(group, "all_gather"), pytree.take(data, "all_gather"), async_op)


def all_to_all(items: Sequence[Any], *, group: Any = None, async_op: bool = False) -> Any:
    """Send `items[r]` to rank r, and return a list of what every rank sent here (collective, differentiable).

    Args:
        items: For each rank, data of any structure and length.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.

    Raises:
        ValueError: If there is not one item for each rank.
    """
    members = resolve(group, "all_to_all")
    check_one_each(items, members, "all_to_all")
    return _all_to_all(members, [pytree.take(item, "all_to_all") for item in items], async_op)


# -- objects -----------------------------------------------------------------------------------------------------------


def broadcast_object(thing: Any = None, src: int = 0, *, group: Any = None, async_op: bool = False) -> Any:
    """Return `src`'s object, pickled on the way, on every rank (collective).

    Args:
        thing: Any object that can be pickled.
        src: The rank that it comes from, within the group.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.
    """
    members = resolve(group, "broadcast_object")
    members.global_rank(src, "broadcast_object", "src")
    return _broadcast(members, _pickled(thing) if members.rank == src else None, src, async_op)


def gather_object(thing: Any, dst: int = 0, *, group: Any = None, async_op: bool = False) -> Any:
    """Return a list of all ranks' objects, pickled on the way, on `dst`, None elsewhere (collective).

    Args:
        thing: Any object that can be pickled.
        dst: The rank that it goes to, within the group.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.
    """
    members = resolve(group, "gather_object")
    members.global_rank(dst, "gather_object", "dst")
    return _gather(members, pytree.pickled(thing), dst, async_op)


def all_gather_object(thing: Any, *, group: Any = None, async_op: bool = False) -> Any:
    """Return a list of all ranks' objects, pickled on the way, on every rank (collective).

    Args:
        thing: Any object that can be pickled.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.
    """
    return _all_gather(resolve(group, "all_gather_object"), pytree.pickled(thing), async_op)


def all_to_all_object(items: Sequence[Any], *, group: Any = None, async_op: bool = False) -> Any:
    """Send the object `items[r]`, pickled, to rank r, and return a list of what every rank sent here (collective).

    Args:
        items: On `src`, an object for each rank; None elsewhere.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.
    """
    members = resolve(group, "all_to_all_object")
    check_one_each(items, members, "all_to_all_object")
    return _all_to_all(members, [pytree.pickled(item) for item in items], async_op)


# -- what the forms share ----------------------------------------------------------------------------------------------


def _reduction(data: Any, op: Any, group: Any, what: str) -> tuple[GroupArgument, Data, Op]:
    members, how = resolve(group, what), Op.of(op, what)
    taken = reducing.numbers_widened(pytree.take(data, what), how)
    how.check(taken, members.size, what)
    return members, taken, how


def _to_send(data: Any) -> Data | Exception:
    """Return data taken apart, or why that cannot be: the others wait, and are told."""
    try:
        if data is None:
            raise ValueError("broadcast: there are no data on src.\nPass what is to be sent.")
        return pytree.take(data, "broadcast")
    except (TypeError, ValueError) as error:
        return error


def _pickled(thing: Any) -> Data | TypeError:
    """Return an object as data, or why that cannot be."""
    try:
        return pytree.pickled(thing)
    except TypeError as error:
        return error


def _broadcast(members: GroupArgument, taken: Data | Exception | None, src: int, async_op: bool) -> Any:
    def steps(mode: Mode) -> Steps:
        return data_movement.send_to_all(mode, members, taken, src)

    return start(steps, "broadcast", members, async_op, taken.tensors if isinstance(taken, Data) else None)


def _broadcast_into(members: GroupArgument, data: Any, out: Any, src: int, async_op: bool) -> Any:
    output_buffer = pytree.take(out, "broadcast")
    pytree.check_writable(output_buffer)
    taken = None if data is None else pytree.take(data, "broadcast")

    def steps(mode: Mode) -> Steps:
        return data_movement.send_to_all_into(mode, members, taken, output_buffer, src, out)

    return start(steps, "broadcast", members, async_op, output_buffer.tensors)


def _gather(members: GroupArgument, taken: Data, dst: int, async_op: bool) -> Any:
    def steps(mode: Mode) -> Steps:
        return data_movement.gather_at_one(mode, members, taken, dst)

    return start(steps, "gather", members, async_op, taken.tensors)


def _all_gather(members: GroupArgument, taken: Data, async_op: bool) -> Any:
    def steps(mode: Mode) -> Steps:
        return data_movement.gather_everywhere(mode, members, taken)

    return start(steps, "all_gather", members, async_op, taken.tensors)


def _all_to_all(members: GroupArgument, taken: list[Data], async_op: bool) -> Any:
    def steps(mode: Mode) -> Steps:
        return data_movement.exchange(mode, members, taken)

    return start(steps, "all_to_all", members, async_op, [each for item in taken for each in item.tensors])
