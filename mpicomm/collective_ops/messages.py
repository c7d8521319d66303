"""Messages between two ranks: a header that describes the data, then the content.

Headers with the same tag arrive in the order in which they were sent. Each header holds the tag of its content, so that
the contents of several messages in flight are not confused. All these tags are in the upper half of a group's tags.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import arguments, mpi
from mpicomm.arguments import Expected
from mpicomm.backend.transfer import dtypes, mpi_calls
from mpicomm.collective_ops import autograd, pytree, wire_format
from mpicomm.collective_ops.group_argument import GroupArgument
from mpicomm.collective_ops.handles import Steps, Works, run
from mpicomm.collective_ops.pytree import Data, Description

_LARGEST_TAG = 2**23 - 3  # UCX's limit

_numbers: dict[tuple[int, int], Iterator[int]] = {}
"""For each group and receiver, a counter of the contents sent."""


def largest_tag() -> int:
    """Return the largest tag of the operations, which is reserved for `scatter`; callers may use smaller ones."""
    return _first_tag() // 4 - 1


def send(members: GroupArgument, data: Data, dst: int, tag: int) -> Steps:
    """Send data; return None, or, if the data requires a gradient, a zero to add to the loss."""
    yield start_send(members, data, dst, tag)
    if not data.description.has_gradient:
        return None

    def backward(_grads: list[torch.Tensor]) -> list[torch.Tensor]:
        return run(receive(members, dst, _backward_tag(tag), None, None))

    return autograd.attach([torch.zeros(())], data.tensors, backward)[0]


def receive(members: GroupArgument, src: int | None, tag: int, out: Data | None, target: Any) -> Steps:
    """Receive data and return it; with `out`, write it there and return `target`, the container of `out`."""
    description, tensors, sender = yield from _content(members, src, tag)
    if out is not None:
        _check_fits(out, description)
        for to, got in zip(out.tensors, tensors, strict=True):
            to.detach().copy_(got)
        return target

    def backward(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        run(send(members, _detached(grads), sender, _backward_tag(tag)))
        return []

    return description.rebuilt(autograd.attach(tensors, [], backward, is_needed=description.has_gradient))


def _content(
    members: GroupArgument, src: int | None, tag: int
) -> Generator[Works, None, tuple[Description, list[torch.Tensor], int]]:
    """Receive a message; return its description, its tensors and the sender's rank in the group."""
    # 1. the header
    head = torch.empty(wire_format.HEAD, dtype=torch.uint8, device=members.control)
    source = None if src is None else members.ranks[src]
    first = dist.irecv(head, source, members.handle, _head_tag(tag))
    yield [first]
    sender = first._source_rank() if src is None else src  # type: ignore[union-attr]
    source = members.ranks[sender]
    number, length, raw = _read(head)
    # 2. the description, if it did not fit in the header
    if length > len(raw):
        whole = torch.empty(length, dtype=torch.uint8, device=members.control)
        yield [dist.irecv(whole, source, members.handle, number)]
        raw = wire_format.to_bytes(whole)
    description = wire_format.decode(raw[:length], f"rank {source}")
    # 3. the content, one message per device type
    buffers = wire_format.output_buffers(description, f"rank {source}")
    yield [dist.irecv(buffer, source, members.handle, number) for buffer in buffers.values() if buffer.numel()]
    return description, wire_format.unpack(description, buffers), sender


def sendrecv(members: GroupArgument, data: Data, dst: int, src: int, tag: int) -> Steps:
    """Send to one rank while receiving from another; return the received data."""
    works = start_send(members, data, dst, tag)
    theirs, tensors, _ = yield from _content(members, src, tag)
    yield works
    sends_gradients, gets_gradients = theirs.has_gradient, data.description.has_gradient

    def backward(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send the gradients of the received data to `src`, and receive those of the sent data from `dst`.

        Each direction runs only if the data that was sent in it requires a gradient.
        """
        sending = start_send(members, _detached(grads), src, _backward_tag(tag)) if sends_gradients else []
        received = run(receive(members, dst, _backward_tag(tag), None, None)) if gets_gradients else []
        for work in sending:
            work.wait()
        return received

    inputs = data.tensors if gets_gradients else []
    return theirs.rebuilt(autograd.attach(tensors, inputs, backward, is_needed=sends_gradients or gets_gradients))


def start_send(members: GroupArgument, data: Data | Exception, dst: int, tag: int) -> Works:
    """Start to send the header, the description if it does not fit in the header, and the content of each device.

    In place of data that cannot be sent, the receiver gets the error.
    """
    number = _next_tag(members, dst)
    raw = wire_format.encode(data)
    parts = [(wire_format.to_tensor(wire_format.head(raw, number), members.control), _head_tag(tag))]
    if len(raw) > wire_format.IN_HEAD:
        parts.append((wire_format.to_tensor(raw, members.control), number))
    if isinstance(data, Data):
        parts += [(content, number) for content in wire_format.pack(data).values() if content.numel()]
    return [dist.isend(part, members.ranks[dst], members.handle, of_part) for part, of_part in parts]


def _detached(grads: Sequence[torch.Tensor]) -> Data:
    """Return gradients as data to send, detached, so that the receiver expects no second-order gradients."""
    return pytree.take([gradient.detach() for gradient in grads], "backward")


def _read(head: torch.Tensor) -> tuple[int, int, bytes]:
    number, length, start = wire_format.read_head(head)
    if not _first_tag() <= number <= _last_tag() or length >= 2**40:
        raise wire_format.not_ours("its header is corrupted")
    return number, length, start


def _check_fits(out: Data, description: Description) -> None:
    """Check that the received data can be written into `out`.

    Raises:
        ValueError: If a leaf differs in shape or dtype, or the sender's data requires a gradient.
    """
    if description.has_gradient:
        raise ValueError(
            "recv: the sender's data requires a gradient, which cannot be propagated through out=.\n"
            "Omit out=, or send data.detach()."
        )
    expected, got = [[(dtype, shape) for _, dtype, shape, *_ in side.leaves] for side in (out.description, description)]
    if expected != got:
        raise ValueError(
            f"recv: out= has {_shown(expected)}, but the message has {_shown(got)}.\n"
            f"Pass out= of the message's shapes and dtypes, or omit out=."
        )


def _shown(leaves: Sequence[tuple[torch.dtype, Sequence[int]]]) -> str:
    return ", ".join(f"{dtypes.short(dtype)}{list(shape)}" for dtype, shape in leaves)


# -- tags --------------------------------------------------------------------------------------------------------------


@functools.cache
def expected_tag() -> Expected:
    """Return the range of tags that callers may use."""
    return arguments.integer(0, largest_tag() - 1)


@functools.cache
def _last_tag() -> int:
    return min(_LARGEST_TAG, mpi_calls.largest_tag()) if mpi.is_usable() else _LARGEST_TAG


def _first_tag() -> int:
    """Return the first of the tags that the operations use."""
    return _last_tag() // 2


def _head_tag(tag: int) -> int:
    return _first_tag() + tag


def _backward_tag(tag: int) -> int:
    """Return the tag of the gradients of messages with a tag; callers cannot use it."""
    return tag + largest_tag() + 1


def _next_tag(members: GroupArgument, dst: int) -> int:
    """Return a tag for a content, different from the tags of other contents in flight to the same rank."""
    count = _numbers.setdefault((id(members.handle), dst), itertools.count())
    return _first_content_tag() + next(count) % _content_tags()


def halo_tag(members: GroupArgument) -> int:
    """Return the tag of the messages of a call of `HaloExchange`, the same on all ranks, which make the same calls."""
    return _last_tag() - next(members.exchanges) % _content_tags()


def _first_content_tag() -> int:
    return _first_tag() + 2 * (largest_tag() + 1)


def _content_tags() -> int:
    """Return the number of tags of contents; the messages of halos have as many, above."""
    return (_last_tag() - _first_content_tag()) // 2
