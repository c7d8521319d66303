"""Point-to-point operations, and `scatter`, on tensors, arrays, numbers and containers of them.

They pair with each other only: `mpicomm.send` does not pair with `torch.distributed.recv`, nor `mpicomm.recv` with
`torch.distributed.send`. The receiver need not know the structure, dtypes or shapes of the data. `scatter` sends one
message to each rank.

`data` is a torch tensor, a NumPy or CuPy array, a NumPy scalar, a number (bool, int, float or complex), or a dict,
OrderedDict, list, tuple, namedtuple or dataclass of these and of None; the keys of a dict are str, int or None. A tag
is an integer from 0; for a tag out of range, the message of the ValueError states the range. `async_op` is as for the
collective operations.

Besides the errors that each operation documents, `group` raises ValueError if this rank is not in it, its name is
unknown or torch.distributed is not initialized; TypeError if it is not a group; and MpicommError if it is a name and
`bootstrap` has not been called. With MPICOMM_ON_TIMEOUT=raise, an operation that times out raises TimeoutError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, overload

import torch

from mpicomm import arguments
from mpicomm.collective_ops import call_check, messages, pytree
from mpicomm.collective_ops.group_argument import GroupArgument, resolve
from mpicomm.collective_ops.handles import Handle, Mode, Steps, start
from mpicomm.collective_ops.pytree import Data

T = TypeVar("T")

_ITEMS = arguments.instance("a list or tuple", list, tuple, remedy="Pass one item for each rank; an item may be empty.")


@overload
def send(
    data: Any, dst: int, *, tag: int = ..., group: Any = ..., async_op: Literal[False] = ...
) -> torch.Tensor | None: ...
@overload
def send(
    data: Any, dst: int, *, tag: int = ..., group: Any = ..., async_op: Literal[True]
) -> Handle[torch.Tensor | None]: ...
def send(data: Any, dst: int, *, tag: int = 0, group: Any = None, async_op: bool = False) -> Any:
    """Send data to a rank that calls `mpicomm.recv` or `irecv`; does not pair with `torch.distributed.recv`.

    Not collective.

    Args:
        data: A tensor, an array, a number, or a container of them.
        dst: The rank in the group that receives; another rank than this one, unless with `async_op`.
        tag: Matches the tag of `recv`; an integer from 0. Messages with the same tag arrive in the order of sending.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; do not change the data before its `wait()` has returned.

    Returns:
        None, or a zero if the data requires a gradient. Add the zero to the loss: the backward pass of `dst` sends the
        gradient to this rank, and the backward pass of this rank then waits for it.

    Raises:
        ValueError: If `dst` or `tag` is out of range, or `dst` is this rank.
        TypeError: If `data` holds a leaf of an unsupported type.
    """
    return _send(resolve(group, "send", dst=dst), pytree.take(data, "send"), dst, tag, async_op, "send")


def isend(data: Any, dst: int, *, tag: int = 0, group: Any = None) -> Handle[torch.Tensor | None]:
    """Start to send data to a rank that calls `mpicomm.recv` or `irecv`; does not pair with `torch.distributed.recv`.

    Not collective.

    Args:
        data: A tensor, an array, a number, or a container of them. Do not change it before the handle's `wait()` has
            returned.
        dst: The rank in the group that receives.
        tag: Matches the tag of `recv`; an integer from 0. Messages with the same tag arrive in the order of sending.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.

    Returns:
        A handle, whose `wait()` returns the same as `send`.

    Raises:
        ValueError: If `dst` or `tag` is out of range.
        TypeError: If `data` holds a leaf of an unsupported type.
    """
    return _send(resolve(group, "isend", dst=dst), pytree.take(data, "isend"), dst, tag, True, "isend")


@overload
def recv(src: int | None = ..., *, out: T, tag: int = ..., group: Any = ..., async_op: Literal[False] = ...) -> T: ...
@overload
def recv(src: int | None = ..., *, out: T, tag: int = ..., group: Any = ..., async_op: Literal[True]) -> Handle[T]: ...
@overload
def recv(
    src: int | None = ..., *, out: None = ..., tag: int = ..., group: Any = ..., async_op: Literal[False] = ...
) -> Any: ...
@overload
def recv(
    src: int | None = ..., *, out: None = ..., tag: int = ..., group: Any = ..., async_op: Literal[True]
) -> Handle[Any]: ...
def recv(src: int | None = None, *, out: Any = None, tag: int = 0, group: Any = None, async_op: bool = False) -> Any:
    """Return the data that a rank sends with `mpicomm.send`; does not pair with `torch.distributed.send`.

    Not collective. No buffer is needed: structure, dtypes and shapes are sent before the content.

    Args:
        src: The rank in the group that sends; the rank whose message arrives first by default.
        out: Tensors or arrays to write the data into, and to return.
        tag: Matches the tag of `send`; an integer from 0. Messages with the same tag arrive in the order of sending.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the data.

    Raises:
        ValueError: If `src` or `tag` is out of range, the message does not match `out`, or a leaf of `out` is a number,
            is read-only or requires a gradient.
        TypeError: If `out` holds a leaf of an unsupported type.
        MpicommError: If the message was not sent by an operation of mpicomm, its data are on a GPU and this rank has
            none, or this rank cannot import a class of the data.
    """
    return _recv(group, src, out, tag, async_op, "recv")


def irecv(src: int | None = None, *, out: Any = None, tag: int = 0, group: Any = None) -> Handle[Any]:
    """Start to receive data of `mpicomm.send`; the handle's `wait()` returns them. Does not pair with torch's send.

    Not collective.

    Args:
        src: The rank in the group that sends; the rank whose message arrives first by default.
        out: Tensors or arrays to write the data into, and to return.
        tag: Matches the tag of `send`; an integer from 0. Messages with the same tag arrive in the order of sending.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.

    Raises:
        ValueError: If `src` or `tag` is out of range, or a leaf of `out` is a number, is read-only or requires a
            gradient. `wait()` raises the errors of the message, as `recv` does.
        TypeError: If `out` holds a leaf of an unsupported type.
    """
    return _recv(group, src, out, tag, True, "irecv")


@overload
def sendrecv(
    data: Any, dst: int, src: int | None = ..., *, tag: int = ..., group: Any = ..., async_op: Literal[False] = ...
) -> Any: ...
@overload
def sendrecv(
    data: Any, dst: int, src: int | None = ..., *, tag: int = ..., group: Any = ..., async_op: Literal[True]
) -> Handle[Any]: ...
def sendrecv(
    data: Any, dst: int, src: int | None = None, *, tag: int = 0, group: Any = None, async_op: bool = False
) -> Any:
    """Send data to one rank while receiving from another, and return the received data (differentiable).

    Args:
        data: A tensor, an array, a number, or a container of them.
        dst: The rank in the group that receives this rank's data.
        src: The rank in the group whose data this rank receives; `dst` by default.
        tag: Matches the tag of the other ranks' call; an integer from 0. Messages with the same tag arrive in order.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the received data.

    Raises:
        ValueError: If `dst`, `src` or `tag` is out of range.
        TypeError: If `data` holds a leaf of an unsupported type.
        MpicommError: If the received message was not sent by an operation of mpicomm, its data are on a GPU and this
            rank has none, or this rank cannot import a class of the data.
    """
    source = dst if src is None else src
    members = resolve(group, "sendrecv", dst=dst, src=source)
    messages.expected_tag().check(tag, "tag", "sendrecv")
    own_data = pytree.take(data, "sendrecv")
    return _start(lambda: messages.sendrecv(members, own_data, dst, source, tag), "sendrecv", members, async_op)


@overload
def scatter(items: None = ..., src: int = ..., *, group: Any = ..., async_op: Literal[False] = ...) -> Any: ...
@overload
def scatter(items: None = ..., src: int = ..., *, group: Any = ..., async_op: Literal[True]) -> Handle[Any]: ...
@overload
def scatter(items: Sequence[T], src: int = ..., *, group: Any = ..., async_op: Literal[False] = ...) -> T: ...
@overload
def scatter(items: Sequence[T], src: int = ..., *, group: Any = ..., async_op: Literal[True]) -> Handle[T]: ...
def scatter(items: Sequence[Any] | None = None, src: int = 0, *, group: Any = None, async_op: bool = False) -> Any:
    """Return this rank's item of `src`'s list; unlike torch's scatter, without an output buffer (collective).

    Not differentiable: the result has no gradient.

    Args:
        items: On `src`, one item for each rank, of any structure and length. Ignored on the other ranks.
        src: The rank in the group that sends.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the item.

    Raises:
        ValueError: If `src` is not a rank of the group, or, on `src`, the number of items is not the number of ranks.
        TypeError: On `src`, if `items` is not a list or tuple, or holds a leaf of an unsupported type.
        MpicommError: On the other ranks, if `src` cannot send the items, an item is on a GPU and this rank has none, or
            this rank cannot import a class of its item.
    """
    members = resolve(group, "scatter", src=src)
    return _scatter(members, items, src, async_op, "scatter", pytree.take)


@overload
def send_object(thing: Any, dst: int, *, tag: int = ..., group: Any = ..., async_op: Literal[False] = ...) -> None: ...
@overload
def send_object(thing: Any, dst: int, *, tag: int = ..., group: Any = ..., async_op: Literal[True]) -> Handle[None]: ...
def send_object(thing: Any, dst: int, *, tag: int = 0, group: Any = None, async_op: bool = False) -> Any:
    """Send an object, pickled, to a rank that calls `mpicomm.recv_object`.

    Not collective.

    Args:
        thing: Any object that can be pickled.
        dst: The rank in the group that receives; another rank than this one, unless with `async_op`.
        tag: Matches the tag of `recv_object`; an integer from 0. Messages with the same tag arrive in order.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once.

    Raises:
        ValueError: If `dst` or `tag` is out of range, or `dst` is this rank.
        TypeError: If the object cannot be pickled.
    """
    members = resolve(group, "send_object", dst=dst)
    return _send(members, pytree.pickled(thing, "send_object"), dst, tag, async_op, "send_object")


@overload
def recv_object(src: int | None = ..., *, tag: int = ..., group: Any = ..., async_op: Literal[False] = ...) -> Any: ...
@overload
def recv_object(src: int | None = ..., *, tag: int = ..., group: Any = ..., async_op: Literal[True]) -> Handle[Any]: ...
def recv_object(src: int | None = None, *, tag: int = 0, group: Any = None, async_op: bool = False) -> Any:
    """Return the object that a rank sends with `mpicomm.send_object`.

    Not collective.

    Args:
        src: The rank in the group that sends; the rank whose message arrives first by default.
        tag: Matches the tag of `send_object`; an integer from 0. Messages with the same tag arrive in order.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the object.

    Raises:
        ValueError: If `src` or `tag` is out of range.
        MpicommError: If the message was not sent by an operation of mpicomm.
    """
    return _recv(group, src, None, tag, async_op, "recv_object")


@overload
def scatter_object(items: None = ..., src: int = ..., *, group: Any = ..., async_op: Literal[False] = ...) -> Any: ...
@overload
def scatter_object(items: None = ..., src: int = ..., *, group: Any = ..., async_op: Literal[True]) -> Handle[Any]: ...
@overload
def scatter_object(items: Sequence[T], src: int = ..., *, group: Any = ..., async_op: Literal[False] = ...) -> T: ...
@overload
def scatter_object(items: Sequence[T], src: int = ..., *, group: Any = ..., async_op: Literal[True]) -> Handle[T]: ...
def scatter_object(
    items: Sequence[Any] | None = None, src: int = 0, *, group: Any = None, async_op: bool = False
) -> Any:
    """Return this rank's object of `src`'s list; the objects are sent pickled (collective).

    Args:
        items: On `src`, one object for each rank. Ignored on the other ranks.
        src: The rank in the group that sends.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.
        async_op: Return a `Handle` at once; its `wait()` returns the object.

    Raises:
        ValueError: If `src` is not a rank of the group, or, on `src`, the number of objects is not the number of ranks.
        TypeError: On `src`, if `items` is not a list or tuple, or an object cannot be pickled.
        MpicommError: On the other ranks, if `src` cannot send the objects.
    """
    members = resolve(group, "scatter_object", src=src)
    return _scatter(members, items, src, async_op, "scatter_object", pytree.pickled)


def _send(members: GroupArgument, data: Data, dst: int, tag: int, async_op: bool, operation: str) -> Any:
    messages.expected_tag().check(tag, "tag", operation)
    if dst == members.rank and not async_op:
        raise ValueError(
            f"{operation}: dst must be another rank, got this rank ({dst}): a blocking send to itself would deadlock.\n"
            f"Use isend, or use the data directly."
        )
    return _start(lambda: messages.send(members, data, dst, tag), operation, members, async_op)


def _recv(group: Any, src: int | None, out: Any, tag: int, async_op: bool, operation: str) -> Any:
    members = resolve(group, operation) if src is None else resolve(group, operation, src=src)
    messages.expected_tag().check(tag, "tag", operation)
    output_buffer = None if out is None else pytree.take(out, operation, is_output=True)
    return _start(lambda: messages.receive(members, src, tag, output_buffer, out), operation, members, async_op)


def _start(steps: Callable[[], Steps], operation: str, members: GroupArgument, async_op: bool) -> Any:
    return start(lambda _: steps(), operation, members, async_op, None, in_order=False)


def _scatter(members: GroupArgument, items: Any, src: int, async_op: bool, operation: str, take: Any) -> Any:
    with torch.no_grad():  # scatter is not differentiable: no rank would receive the gradients
        to_send = partial(take_each, items, members, operation, take)
        to_scatter = pytree.or_error(to_send) if members.rank == src else None
    return start(partial(_scattered, members, to_scatter, operation, src), operation, members, async_op, None)


def take_each(items: Any, members: GroupArgument, operation: str, take: Callable[[Any, str], Data]) -> list[Data]:
    """Return the data of a list or tuple of one item for each rank, each taken by `take`.

    Raises:
        TypeError: If `items` is not a list or tuple.
        ValueError: If the number of items is not the number of ranks.
        Exception: Any error of `take`.
    """
    _ITEMS.check(items, "items", operation)
    if len(items) != members.size:
        raise ValueError(
            f"{operation}: items must have one item for each of the group's {members.size} ranks, got {len(items)}.\n"
            f"{_ITEMS.remedy}"
        )
    return [take(item, operation) for item in items]


def _scattered(
    members: GroupArgument, items: Sequence[Data] | Exception | None, operation: str, src: int, mode: Mode
) -> Steps:
    nothing = pytree.take(None, operation).description
    yield from call_check.compare_signatures(members, (f"{operation} from rank {src}", nothing), mode)
    tag = messages.largest_tag()  # reserved: callers cannot use it
    if items is None:
        return (yield from messages.receive(members, src, tag, None, None))
    others = [rank for rank in range(members.size) if rank != src]
    of_ranks = [items] * members.size if isinstance(items, Exception) else items
    yield [work for rank in others for work in messages.start_send(members, of_ranks[rank], rank, tag)]
    if isinstance(items, Exception):
        raise items
    own = items[src]
    return own.description.rebuilt([tensor.detach().clone() for tensor in own.tensors])
