"""Messages from one rank to another: a head that says what comes, then the content.

The heads of one tag come in the order of their sending; each names the tag under which its content travels, so that the
contents of several messages on their way are not confused. These tags are of the upper half of those that a group has.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import mpi
from mpicomm.backend import wire
from mpicomm.verbs import gradients, leaves, parcels
from mpicomm.verbs.handles import Handle, Steps, Works, run
from mpicomm.verbs.leaves import Data
from mpicomm.verbs.members import Members
from mpicomm.verbs.parcels import Description

_MAGIC = b"mpicomm1"
_HEAD = 512  # bytes: the magic, the tag of the content, the length of the description, as much of it as fits
_WORD = 8
_START = len(_MAGIC) + 2 * _WORD
_LARGEST_TAG = 2**23 - 3  # UCX has so many

_numbers: dict[tuple[int, int], Iterator[int]] = {}
"""For each group and receiver, the numbers of contents."""


def start(steps: Steps, what: str, members: Members, async_op: bool) -> Any:
    """Run a message verb to its end and return its result, or return its handle."""
    if not async_op:
        return run(steps)
    return Handle(steps, what, in_callbacks=members.is_ours and not members.has_nccl, in_order=False)


def largest_tag() -> int:
    """Return the largest tag that a caller may use."""
    return _first() // 2 - 1


def send(members: Members, data: Data, dst: int, tag: int) -> Steps:
    """Send data; return None, or where they have a gradient, a zero to be added to the loss."""
    description = Description.of(data)
    yield _send_parts(members, data.tensors, description, dst, tag)
    if not description.has_gradient:
        return None

    def backward(_grads: list[torch.Tensor]) -> list[torch.Tensor]:
        return _received(members, dst, tag)

    return gradients.attach([torch.zeros(())], data.tensors, backward)[0]


def send_failure(members: Members, error: Exception, dst: int, tag: int) -> Works:
    """Start to tell a receiver that nothing comes."""
    return _send_head(members, parcels.failure(error), dst, tag, _next_tag(members, dst))


def receive(members: Members, src: int | None, tag: int, out: Data | None, target: Any) -> Steps:
    """Receive data, and return them; into `out`, whose container is `target`, if there is one."""
    head = torch.empty(_HEAD, dtype=torch.uint8, device=members.control)
    source = None if src is None else members.ranks[src]
    first = dist.irecv(head, source, members.handle, _head_tag(tag))
    yield [first]
    sender = members.ranks[first._source_rank()] if source is None else source  # type: ignore[union-attr]
    content_tag, length, start_of_it = _read(head)
    raw = start_of_it[:length]
    if length > len(start_of_it):
        whole = torch.empty(length, dtype=torch.uint8, device=members.control)
        yield [dist.irecv(whole, sender, members.handle, content_tag)]
        raw = whole.cpu().numpy().tobytes()
    description = Description.decoded(raw)
    if out is not None:
        _check_fits(out, description)
    rooms = {device: description.room(device) for device in description.devices}
    yield [dist.irecv(room, sender, members.handle, content_tag) for room in rooms.values() if room.numel()]
    tensors = description.unpacked(rooms)
    if out is not None:
        for to, got in zip(out.tensors, tensors, strict=True):
            to.detach().copy_(got)
        return target
    if description.has_gradient and torch.is_grad_enabled():
        tensors = gradients.attach(tensors, [], _sender_back(members, members.ranks.index(sender), tag))
    return description.rebuilt(tensors)


def exchange(members: Members, data: Data, dst: int, src: int, tag: int) -> Steps:
    """Send to one rank while receiving from another; return what came."""
    description = Description.of(data)
    works = _send_parts(members, data.tensors, description, dst, tag)
    coming = receive(members, src, tag, None, None)
    try:
        while True:
            yield next(coming)
    except StopIteration as end:
        result = end.value
    yield works
    if not (description.has_gradient and torch.is_grad_enabled()):
        return result
    got = leaves.take(result, "sendrecv")

    def backward(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        back = leaves.take(grads, "sendrecv, backward")
        return run(exchange(members, back, src, dst, tag))

    plain = [tensor.detach() for tensor in got.tensors]
    return got.rebuilt(gradients.attach(plain, data.tensors, backward))


def _send_parts(
    members: Members, tensors: Sequence[torch.Tensor], description: Description, dst: int, tag: int
) -> Works:
    """Start to send the head, what of the description does not fit into it, and the content of each device."""
    number = _next_tag(members, dst)
    works = _send_head(members, description.encoded(), dst, tag, number)
    contents = [parcels.pack(tensors, description, device) for device in description.devices]
    target, group = members.ranks[dst], members.handle
    return [*works, *[dist.isend(content, target, group, number) for content in contents if content.numel()]]


def _send_head(members: Members, raw: bytes, dst: int, tag: int, number: int) -> Works:
    head = _MAGIC + number.to_bytes(_WORD, "little") + len(raw).to_bytes(_WORD, "little") + raw[: _HEAD - _START]
    parts = [(head.ljust(_HEAD, b"\0"), _head_tag(tag))]
    if len(raw) > _HEAD - _START:
        parts.append((raw, number))
    target, group = members.ranks[dst], members.handle
    return [
        dist.isend(torch.frombuffer(bytearray(part), dtype=torch.uint8).to(members.control), target, group, of_part)
        for part, of_part in parts
    ]


def _received(members: Members, src: int, tag: int) -> list[torch.Tensor]:
    return run(receive(members, src, tag, None, None))


def _sender_back(members: Members, dst: int, tag: int) -> gradients.Backward:
    """Return what sends the gradients of received data to where these came from."""

    def backward(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        run(send(members, leaves.take([each.detach() for each in grads], "recv, backward"), dst, tag))
        return []

    return backward


def _read(head: torch.Tensor) -> tuple[int, int, bytes]:
    raw = head.cpu().numpy().tobytes()
    if not raw.startswith(_MAGIC):
        raise parcels.not_ours("it does not begin as one")
    words = raw[len(_MAGIC) : _START]
    number, length = int.from_bytes(words[:_WORD], "little"), int.from_bytes(words[_WORD:], "little")
    if not _first() <= number <= _last() or length >= 2**40:
        raise parcels.not_ours("its head is damaged")
    return number, length, raw[_START:]


def _check_fits(out: Data, description: Description) -> None:
    """Refuse memory that what comes does not fit into; it was sent, and is received by nobody then.

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
def _last() -> int:
    return min(_LARGEST_TAG, wire.largest_tag()) if mpi.is_usable() else _LARGEST_TAG


def _first() -> int:
    """Return the first of the tags that are ours."""
    return _last() // 2


def _head_tag(tag: int) -> int:
    return _first() + tag


def _next_tag(members: Members, dst: int) -> int:
    """Return a tag for a content, which no other content on its way to the same rank has."""
    start = _first() + largest_tag() + 1
    count = _numbers.setdefault((id(members.handle), dst), itertools.count())
    return start + next(count) % (_last() - start)
