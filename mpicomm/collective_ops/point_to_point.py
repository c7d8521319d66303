"""Operations between two ranks, and `scatter`, which is a message to each: on tensors, arrays, numbers and containers.

`mpicomm.recv` receives what `mpicomm.send` sends, and need not know its shape or dtype. `group` and `async_op` are as
for the collective operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpicomm import arguments
from mpicomm.collective_ops import messages, pytree
from mpicomm.collective_ops.group_argument import GroupArgument, resolve
from mpicomm.collective_ops.handles import Handle, Steps
from mpicomm.collective_ops.pytree import Data

_ITEMS = arguments.instance("a list or tuple", list, tuple, remedy="Pass one item for each rank, which may be empty.")


def send(data: Any, dst: int, *, tag: int = 0, group: Any = None, async_op: bool = False) -> Any:
    """Send data to a rank, which calls `recv` or `irecv`.

    Args:
        data: A tensor, an array, a number, or a container of them.
        dst: The rank, within the group.
        tag: Messages of one tag come in the order of their sending.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.

    Returns:
        None; where the data have a gradient, a zero. Add it to the loss: the backward pass of `dst` sends the gradient
        here, and this rank's is to wait for it.

    Raises:
        ValueError: If there is no such rank, or no such tag.
    """
    return _send(resolve(group, "send"), pytree.take(data, "send"), dst, tag, async_op, "send")


def isend(data: Any, dst: int, *, tag: int = 0, group: Any = None) -> Handle:
    """Start to send data to a rank; do not change them before the handle's `wait()` has returned.

    Args:
        data: A tensor, an array, a number, or a container of them.
        dst: The rank that it goes to, within the group.
        tag: Messages of one tag come in the order of their sending.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
    """
    return _send(resolve(group, "isend"), pytree.take(data, "isend"), dst, tag, True, "isend")


def recv(src: int | None = None, *, out: Any = None, tag: int = 0, group: Any = None, async_op: bool = False) -> Any:
    """Return what a rank sends here; dtype, shape and structure travel ahead.

    Args:
        src: The rank, within the group; whoever sends first if left out.
        out: Tensors or arrays that the data are written into.
        tag: Messages of one tag come in the order of their sending.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.

    Raises:
        ValueError: If there is no such rank or tag, or what comes does not fit into `out`.
        MpicommError: If what comes was not sent by an operation.
    """
    return _recv(resolve(group, "recv"), src, out, tag, async_op, "recv")


def irecv(src: int | None = None, *, out: Any = None, tag: int = 0, group: Any = None) -> Handle:
    """Start to receive what a rank sends here; the handle's `wait()` returns it.

    Args:
        src: The rank that it comes from, within the group.
        out: Tensors or arrays that the data are written into.
        tag: Messages of one tag come in the order of their sending.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
    """
    return _recv(resolve(group, "irecv"), src, out, tag, True, "irecv")


def sendrecv(
    data: Any, dst: int, src: int | None = None, *, tag: int = 0, group: Any = None, async_op: bool = False
) -> Any:
    """Send data to one rank while receiving from another, and return what came (differentiable).

    Args:
        data: A tensor, an array, a number, or a container of them.
        dst: The rank that it goes to, within the group.
        src: The rank to receive from; `dst` if left out.
        tag: Messages of one tag come in the order of their sending.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.
    """
    members = resolve(group, "sendrecv")
    source = dst if src is None else src
    members.global_rank(dst, "sendrecv", "dst")
    members.global_rank(source, "sendrecv", "src")
    messages.expected_tag().check(tag, "tag", "sendrecv")
    steps = messages.exchange(members, pytree.take(data, "sendrecv"), dst, source, tag)
    return messages.start(steps, "sendrecv", members, async_op)


def scatter(items: Sequence[Any] | None = None, src: int = 0, *, group: Any = None, async_op: bool = False) -> Any:
    """Return this rank's item of `src`'s list (collective).

    Args:
        items: On `src`, data for each rank, of any structure and length; None elsewhere.
        src: The rank that it comes from, within the group.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.
    """
    members = resolve(group, "scatter")
    return _scatter(members, items, src, async_op, "scatter", pytree.take)


def send_object(thing: Any, dst: int, *, tag: int = 0, group: Any = None, async_op: bool = False) -> Any:
    """Send an object, pickled, to a rank, which calls `recv_object`.

    Args:
        thing: Any object that can be pickled.
        dst: The rank that it goes to, within the group.
        tag: Messages of one tag come in the order of their sending.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.
    """
    return _send(resolve(group, "send_object"), pytree.pickled(thing), dst, tag, async_op, "send_object")


def recv_object(src: int | None = None, *, tag: int = 0, group: Any = None, async_op: bool = False) -> Any:
    """Return the object that a rank sends here.

    Args:
        src: The rank that it comes from, within the group.
        tag: Messages of one tag come in the order of their sending.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.
    """
    return _recv(resolve(group, "recv_object"), src, None, tag, async_op, "recv_object")


def scatter_object(
    items: Sequence[Any] | None = None, src: int = 0, *, group: Any = None, async_op: bool = False
) -> Any:
    """Return this rank's object of `src`'s list (collective).

    Args:
        items: On `src`, an object for each rank; None elsewhere.
        src: The rank that it comes from, within the group.
        group: A group of torch's, an mpi4py communicator, "node" or "leaders"; all ranks if left out.
        async_op: Return a `Handle` at once.
    """
    members = resolve(group, "scatter_object")
    return _scatter(members, items, src, async_op, "scatter_object", lambda item, _: pytree.pickled(item))


def _send(members: GroupArgument, data: Data, dst: int, tag: int, async_op: bool, what: str) -> Any:
    members.global_rank(dst, what, "dst")
    messages.expected_tag().check(tag, "tag", what)
    if dst == members.rank and not async_op:
        raise ValueError(f"{what}: rank {dst} would wait for itself to receive.\nUse isend, or just keep the data.")
    return messages.start(messages.send(members, data, dst, tag), what, members, async_op)


def _recv(members: GroupArgument, src: int | None, out: Any, tag: int, async_op: bool, what: str) -> Any:
    if src is not None:
        members.global_rank(src, what, "src")
    messages.expected_tag().check(tag, "tag", what)
    output_buffer = None if out is None else pytree.take(out, what)
    if output_buffer is not None:
        pytree.check_writable(output_buffer)
    return messages.start(messages.receive(members, src, tag, output_buffer, out), what, members, async_op)


def _scatter(members: GroupArgument, items: Any, src: int, async_op: bool, what: str, take: Any) -> Any:
    members.global_rank(src, what, "src")
    mine: list[Data] | Exception | None = None
    if members.rank == src:
        try:
            check_one_each(items, members, what)
            mine = [take(item, what) for item in items]
        except (TypeError, ValueError) as error:  # the others wait, and are told
            mine = error
    return messages.start(_scattered(members, mine, src), what, members, async_op)


def check_one_each(items: Any, members: GroupArgument, what: str) -> None:
    """Refuse what is no list of one item for each rank.

    Raises:
        TypeError: If it is not a list or tuple.
        ValueError: If it is of another length.
    """
    _ITEMS.check(items, "items", what)
    if len(items) != members.size:
        raise ValueError(
            f"{what}: items must have one item for each of the group's {members.size} ranks, got {len(items)}.\n"
            f"{_ITEMS.remedy}"
        )


def _scattered(members: GroupArgument, items: Sequence[Data] | Exception | None, src: int) -> Steps:
    tag = messages.largest_tag()  # no caller's
    if items is None:
        return (yield from messages.receive(members, src, tag, None, None))
    if isinstance(items, Exception):
        others = [rank for rank in range(members.size) if rank != src]
        yield [work for rank in others for work in messages.send_failure(members, items, rank, tag)]
        raise items
    sends = [messages.send(members, item, rank, tag) for rank, item in enumerate(items) if rank != src]
    with torch.no_grad():  # nobody would receive gradients
        works = [work for each in sends for work in next(each)]
    yield works
    return items[src].rebuilt([tensor.detach().clone() for tensor in items[src].tensors])
