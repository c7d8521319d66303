"""Messages from one rank to another: a head that says what comes, then the content.

The heads of one tag come in the order of their sending; each names the tag under which its content travels, so that the
contents of several messages on their way are not confused. These tags are of the upper half of those that a group has.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import arguments, mpi
from mpicomm.arguments import FLAG, Expected
from mpicomm.backend import mpi_calls
from mpicomm.collective_ops import autograd, pytree, wire_format
from mpicomm.collective_ops.group_argument import GroupArgument
from mpicomm.collective_ops.handles import Handle, Steps, Works, run
from mpicomm.collective_ops.pytree import Data
from mpicomm.collective_ops.wire_format import Description

_MAGIC = b"mpicomm1"
_HEAD = 512  # bytes: the magic, the tag of the content, the length of the description, as much of it as fits
_WORD = 8
_START = len(_MAGIC) + 2 * _WORD
_LARGEST_TAG = 2**23 - 3  # UCX has so many

_numbers: dict[tuple[int, int], Iterator[int]] = {}
"""For each group and receiver, the numbers of contents."""


def start(steps: Steps, what: str, members: GroupArgument, async_op: bool) -> Any:
    """Run a message operation to its end and return its result, or return its handle."""
    if async_op is False:
        return run(steps)
    FLAG.check(async_op, "async_op", what)
    in_callbacks = members.is_ours and not members.has_nccl and mpi.serves_threads()
    return Handle(steps, what, in_callbacks=in_callbacks, in_order=False)


def largest_tag() -> int:
    """Return the largest tag that a caller may use."""
    return _first() // 4 - 1


def send(members: GroupArgument, data: Data, dst: int, tag: int) -> Steps:
    """Send data; return None, or where they have a gradient, a zero to be added to the loss."""
    description = Description.of(data)
    yield _send_parts(members, data.tensors, description, dst, tag)
    if not description.has_gradient:
        return None

    def backward(_grads: list[torch.Tensor]) -> list[torch.Tensor]:
        return run(receive(members, dst, _backward(tag), None, None))

    return autograd.attach([torch.zeros(())], data.tensors, backward)[0]


def send_failure(members: GroupArgument, error: Exception, dst: int, tag: int) -> Works:
    """Start to tell a receiver that nothing comes."""
    return _send_head(members, wire_format.failure(error), dst, tag, _next_tag(members, dst))


def receive(members: GroupArgument, src: int | None, tag: int, out: Data | None, target: Any) -> Steps:
    """Receive data, and return them; into `out`, whose container is `target`, if there is one."""
    description, tensors, sender = yield from _content(members, src, tag)
    if out is not None:
        _check_fits(out, description)
        for to, got in zip(out.tensors, tensors, strict=True):
            to.detach().copy_(got)
        return target
    if description.has_gradient and torch.is_grad_enabled():

        def backward(grads: list[torch.Tensor]) -> list[torch.Tensor]:
            run(send(members, _detached(grads), sender, _backward(tag)))
            return []

        tensors = autograd.attach(tensors, [], backward)
    return description.rebuilt(tensors)


def _content(
    members: GroupArgument, src: int | None, tag: int
) -> Generator[Works, None, tuple[Description, list[torch.Tensor], int]]:
    """Receive what comes, and return it with its sender's rank in the group."""
    head = torch.empty(_HEAD, dtype=torch.uint8, device=members.control)
    source = None if src is None else members.ranks[src]
    first = dist.irecv(head, source, members.handle, _head_tag(tag))
    yield [first]
    sender = first._source_rank() if src is None else src  # type: ignore[union-attr]
    source = members.ranks[sender]
    number, length, raw = _read(head)
    if length > len(raw):
        whole = torch.empty(length, dtype=torch.uint8, device=members.control)
        yield [dist.irecv(whole, source, members.handle, number)]
        raw = wire_format.to_bytes(whole)
    description = Description.decoded(raw[:length])
    output_buffers = {device: description.output_buffer(device) for device in description.devices}
    yield [
        dist.irecv(output_buffer, source, members.handle, number)
        for output_buffer in output_buffers.values()
        if output_buffer.numel()
    ]
    return description, description.unpacked(output_buffers), sender


def exchange(members: GroupArgument, data: Data, dst: int, src: int, tag: int) -> Steps:
    """Send to one rank while receiving from another; return what came."""
    mine = Description.of(data)
    works = _send_parts(members, data.tensors, mine, dst, tag)
    theirs, tensors, _ = yield from _content(members, src, tag)
    yield works
    if not ((mine.has_gradient or theirs.has_gradient) and torch.is_grad_enabled()):
        return theirs.rebuilt(tensors)

    def backward(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each end of a message waits for the other only if that has a gradient too."""
        back = _detached(grads)
        going = (
            _send_parts(members, back.tensors, Description.of(back), src, _backward(tag)) if theirs.has_gradient else []
        )
        coming = run(receive(members, dst, _backward(tag), None, None)) if mine.has_gradient else []
        for work in going:
            work.wait()
        return coming

    return theirs.rebuilt(autograd.attach(tensors, data.tensors if mine.has_gradient else [], backward))


def _send_parts(
    members: GroupArgument, tensors: Sequence[torch.Tensor], description: Description, dst: int, tag: int
) -> Works:
    """Start to send the head, what of the description does not fit into it, and the content of each device."""
    number = _next_tag(members, dst)
    works = _send_head(members, description.encoded(), dst, tag, number)
    contents = [wire_format.pack(tensors, description, device) for device in description.devices]
    target, group = members.ranks[dst], members.handle
    return [*works, *[dist.isend(content, target, group, number) for content in contents if content.numel()]]


def _send_head(members: GroupArgument, raw: bytes, dst: int, tag: int, number: int) -> Works:
    head = _MAGIC + number.to_bytes(_WORD, "little") + len(raw).to_bytes(_WORD, "little") + raw[: _HEAD - _START]
    parts = [(head.ljust(_HEAD, b"\0"), _head_tag(tag))]
    if len(raw) > _HEAD - _START:
        parts.append((raw, number))
    target, group = members.ranks[dst], members.handle
    return [dist.isend(wire_format.to_tensor(part, members.control), target, group, of_part) for part, of_part in parts]


def _detached(grads: Sequence[torch.Tensor]) -> Data:
    """Return gradients as data to be sent, whose receiver does not wait for gradients of gradients."""
    return pytree.take([each.detach() for each in grads], "backward")


def _read(head: torch.Tensor) -> tuple[int, int, bytes]:
    raw = wire_format.to_bytes(head)
    if not raw.startswith(_MAGIC):
        raise wire_format.not_ours("it does not begin as one")
    words = raw[len(_MAGIC) : _START]
    number, length = int.from_bytes(words[:_WORD], "little"), int.from_bytes(words[_WORD:], "little")
    if not _first() <= number <= _last() or length >= 2**40:
        raise wire_format.not_ours("its head is damaged")
    return number, length, raw[_START:]


def _check_fits(out: Data, description: Description) -> None:
    """Refuse memory that what has come does not fit into.

    Raises:
        ValueError: If a leaf is of another shape or dtype, or the sender waits for gradients.
    """
    if description.has_gradient:
        raise ValueError(
            "recv: what comes has a gradient, which cannot flow back from out=.\nLeave it away, or send data.detach()."
        )
    here = Description.of(out)
    expected = [(leaf.dtype, leaf.shape) for leaf in here.leaves]
    got = [(leaf.dtype, leaf.shape) for leaf in description.leaves]
    if expected != got:
        raise ValueError(
            f"recv: out= expects {_shown(expected)}, but what comes is {_shown(got)}.\n"
            f"Make them equal, or leave out= away."
        )


def _shown(found: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in found)


# -- tags --------------------------------------------------------------------------------------------------------------


@functools.cache
def expected_tag() -> Expected:
    """Return what the tag of a message must be."""
    return arguments.integer(0, largest_tag() - 1)


@functools.cache
def _last() -> int:
    return min(_LARGEST_TAG, mpi_calls.largest_tag()) if mpi.is_usable() else _LARGEST_TAG


def _first() -> int:
    """Return the first of the tags that are ours."""
    return _last() // 2


def _head_tag(tag: int) -> int:
    return _first() + tag


def _backward(tag: int) -> int:
    """Return the tag of gradients for messages of a tag; no caller's."""
    return tag + largest_tag() + 1


def _next_tag(members: GroupArgument, dst: int) -> int:
    """Return a tag for a content, which no other content on its way to the same rank has."""
    start = _first() + 2 * (largest_tag() + 1)
    count = _numbers.setdefault((id(members.handle), dst), itertools.count())
    return start + next(count) % (_last() - start)
