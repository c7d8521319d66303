"""broadcast, gather, all_gather and all_to_all of containers whose lengths only the senders know."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm.collective_ops import autograd, call_check, pytree, wire_format
from mpicomm.collective_ops.group_argument import GroupArgument
from mpicomm.collective_ops.handles import IN_THE_CALL, Mode, Steps, Works, run
from mpicomm.collective_ops.pytree import Data
from mpicomm.collective_ops.wire_format import Description

_HEAD = 512  # bytes of the first message: the length of the description, and as much of the description as fits
_LENGTHS = 14  # leaves whose lengths are sent in the same message as the digest


# -- broadcast ---------------------------------------------------------------------------------------------------------


def send_to_all(mode: Mode, members: GroupArgument, data: Data | Exception | None, src: int) -> Steps:
    """Run broadcast, and return `src`'s data.

    Args:
        mode: Which calls of torch.distributed are asynchronous.
        members: The group.
        data: The data on `src`, or the error that prevents sending it, raised on all ranks; None on the other ranks.
        src: The rank in the group that sends.
    """
    description = yield from _describe_to_all(mode, members, data, src)
    tensors = data.tensors if isinstance(data, Data) else None
    results = yield from _send_content_to_all(mode, members, description, tensors, src)
    return description.rebuilt(_differentiable_broadcast(members, description, tensors, results, src))


def send_to_all_into(mode: Mode, members: GroupArgument, data: Data | None, out: Data, src: int, target: Any) -> Steps:
    """Run broadcast into memory that every rank passes, and return `target`, the container of that memory."""
    operation = f"broadcast with out= from rank {src}"
    fits = data is None or call_check.of(data, operation)[1:] == call_check.of(out, operation)[1:]
    yield from call_check.reached(
        members, call_check.of(out, operation if fits else f"{operation}, with data that differ from out="), mode
    )
    if not fits:
        raise ValueError(
            "broadcast: data and out= differ in structure, dtype or shape.\n"
            "Pass both with the same structure, dtypes and shapes."
        )
    for to, given in zip(out.tensors, [] if data is None else data.tensors, strict=data is not None):
        if (to.data_ptr(), to.stride()) != (given.data_ptr(), given.stride()):
            to.detach().copy_(given.detach())
    source = members.ranks[src]
    yield [dist.broadcast(each.detach(), source, members.handle, async_op=mode.last) for each in out.tensors]
    return target


def _describe_to_all(
    mode: Mode, members: GroupArgument, data: Data | Exception | None, src: int
) -> Generator[Works, None, Description]:
    """Broadcast the description of `src`'s data, or its error; in a second message if it does not fit in the first."""
    raw = b""
    if data is not None:
        raw = wire_format.failure(data) if isinstance(data, Exception) else Description.of(data).encoded()
    source = members.ranks[src]
    head = _head_of(raw, members.control)
    yield [dist.broadcast(head, source, members.handle, async_op=mode.early)]
    length, start = _read_head(head)
    if length > len(start):
        whole = wire_format.to_tensor(raw, members.control) if raw else _output_buffer(length, head)
        yield [dist.broadcast(whole, source, members.handle, async_op=False)]
        start = wire_format.to_bytes(whole)
    if isinstance(data, Exception):
        raise data
    return Description.decoded(start[:length])


def _send_content_to_all(
    mode: Mode, members: GroupArgument, description: Description, tensors: Sequence[torch.Tensor] | None, src: int
) -> Generator[Works, None, list[torch.Tensor]]:
    output_buffers = {
        device: description.output_buffer(device) if tensors is None else wire_format.pack(tensors, description, device)
        for device in description.devices
    }
    source = members.ranks[src]
    yield [
        dist.broadcast(output_buffer, source, members.handle, async_op=mode.last)
        for output_buffer in output_buffers.values()
        if output_buffer.numel()
    ]
    return description.unpacked(output_buffers) if tensors is None else [each.detach().clone() for each in tensors]


def _differentiable_broadcast(
    members: GroupArgument,
    description: Description,
    tensors: Sequence[torch.Tensor] | None,
    results: list[torch.Tensor],
    src: int,
) -> list[torch.Tensor]:
    if not (description.has_gradient and torch.is_grad_enabled()):
        return results

    def backward(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        sums = [each.clone() for each in grads]
        for each in sums:
            dist.reduce(each, members.ranks[src], group=members.handle)
        return sums

    return autograd.attach(results, tensors or [], backward)


# -- gather and all_gather ---------------------------------------------------------------------------------------------


def gather_on_all_ranks(mode: Mode, members: GroupArgument, data: Data) -> Steps:
    """Run all_gather, and return every rank's data in a list."""
    described = yield from _lengths(mode, members, data, "all_gather")
    output_buffers: list[dict[str, torch.Tensor]] = [{} for _ in described]
    works = []
    for device in described[members.rank].devices:
        mine = wire_format.pack(data.tensors, described[members.rank], device)
        targets = [each.output_buffer(device) for each in described]
        works.append(_all_gather(targets, mine, members, mode))
        for output_buffer, target in zip(output_buffers, targets, strict=True):
            output_buffer[device] = target
    yield [work for work, _ in works]
    for _, finish in works:
        finish()
    results = [each.unpacked(output_buffer) for each, output_buffer in zip(described, output_buffers, strict=True)]
    if any(data.gradients):
        results = _differentiable_all_gather(members, data, results)
    return [each.rebuilt(tensors) for each, tensors in zip(described, results, strict=True)]


def gather_at_one(mode: Mode, members: GroupArgument, data: Data, dst: int) -> Steps:
    """Run gather, and return every rank's data in a list on `dst`, None elsewhere."""
    described = yield from _lengths(mode, members, data, f"gather to rank {dst}")
    is_target = members.rank == dst
    output_buffers: list[dict[str, torch.Tensor]] = [{} for _ in described]
    works = []
    for device in described[members.rank].devices:
        mine = wire_format.pack(data.tensors, described[members.rank], device)
        longest = max(each.nbytes(device) for each in described)
        if not longest:
            continue
        is_padded = not members.is_ours  # dist.gather of other backends needs equal lengths
        targets = None
        if is_target:
            targets = [_output_buffer(longest, mine) if is_padded else each.output_buffer(device) for each in described]
            for output_buffer, target, each in zip(output_buffers, targets, described, strict=True):
                output_buffer[device] = target[: each.nbytes(device)]
        source = _padded(mine, longest) if is_padded else mine
        works.append(dist.gather(source, targets, members.ranks[dst], members.handle, async_op=mode.last))
    yield works
    if not is_target:
        return None
    return [
        each.rebuilt(each.unpacked(_complete(output_buffer, each)))
        for each, output_buffer in zip(described, output_buffers, strict=True)
    ]


def _lengths(
    mode: Mode, members: GroupArgument, data: Data, operation: str
) -> Generator[Works, None, list[Description]]:
    """Return the description of every rank's data, equal but for the lengths of the first dimensions.

    Raises:
        MismatchError: On every rank, if the data differ in anything else.
    """
    signature = call_check.of(data, operation, any_length=True)
    mine = [tensor.shape[0] if tensor.dim() else -1 for tensor in data.tensors]
    first = [*call_check.words(signature), *mine[:_LENGTHS], *[-1] * (_LENGTHS - len(mine))]
    table = yield from _gathered(first, members, is_async=mode.early)
    if any(row[:2] != first[:2] for row in table):
        call_check.refuse(members, signature)
    lengths = [row[2 : 2 + len(mine)] for row in table]
    if len(mine) > _LENGTHS:
        rest = yield from _gathered(mine[_LENGTHS:], members, is_async=False)
        lengths = [[*some, *others] for some, others in zip(lengths, rest, strict=True)]
    description = Description.of(data)
    return [_with_lengths(description, of_rank) for of_rank in lengths]


def _with_lengths(description: Description, lengths: Sequence[int]) -> Description:
    resized = [leaf.with_length(length) for leaf, length in zip(description.leaves, lengths, strict=True)]
    return dataclasses.replace(description, leaves=tuple(resized))


def _gathered(
    numbers: Sequence[int], members: GroupArgument, *, is_async: bool
) -> Generator[Works, None, list[list[int]]]:
    """Return the numbers of every rank, one row per rank; all rows have the same length."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=members.control)
    table = torch.empty(members.size, len(numbers), dtype=torch.int64, device=members.control)
    yield [dist.all_gather(list(table), mine, members.handle, async_op=is_async)]
    return table.tolist()


def _all_gather(targets: list[torch.Tensor], mine: torch.Tensor, members: GroupArgument, mode: Mode) -> tuple[Any, Any]:
    """Start an all_gather of bytes of any lengths; return the work, and a function to call after it has completed.

    Groups of other backends need equal lengths, so their contents are padded to the longest.
    """
    longest = max(target.numel() for target in targets)
    if not longest:
        return None, lambda: None
    if members.is_ours or all(target.numel() == longest for target in targets):
        return dist.all_gather(targets, mine, members.handle, async_op=mode.last), lambda: None
    padded = [_output_buffer(longest, mine) for _ in targets]
    work = dist.all_gather(padded, _padded(mine, longest), members.handle, async_op=mode.last)

    def finish() -> None:
        for target, source in zip(targets, padded, strict=True):
            target.copy_(source[: target.numel()])

    return work, finish


def _output_buffer(length: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(length, dtype=torch.uint8, device=like.device)


def _padded(content: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([content, _output_buffer(length - content.numel(), content)])


def _complete(output_buffers: dict[str, torch.Tensor], description: Description) -> dict[str, torch.Tensor]:
    """Return the buffers, with empty ones for the devices on which all leaves are empty."""
    return {device: output_buffers.get(device, description.output_buffer(device)) for device in description.devices}


def _differentiable_all_gather(
    members: GroupArgument, data: Data, results: list[list[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    count = len(data.tensors)

    def backward(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        items = [grads[rank * count : (rank + 1) * count] for rank in range(members.size)]
        taken = [pytree.take(item, "all_gather, backward") for item in items]
        shares = run(exchange(IN_THE_CALL, members, taken))
        return [torch.stack(of_leaf).sum(0) for of_leaf in zip(*shares, strict=True)]

    flat = autograd.attach([each for of_rank in results for each in of_rank], data.tensors, backward)
    return [flat[rank * count : (rank + 1) * count] for rank in range(members.size)]


# -- all_to_all --------------------------------------------------------------------------------------------------------


def exchange(mode: Mode, members: GroupArgument, items: Sequence[Data]) -> Steps:
    """Run all_to_all: rank r receives `items[r]` of every rank, in a list."""
    # 1. exchange the lengths of the descriptions
    descriptions = [Description.of(item) for item in items]
    raws = [each.encoded() for each in descriptions]
    lengths, devices, has_gradient = yield from _exchanged_lengths(mode, members, raws, descriptions)
    # 2. exchange the descriptions
    gathered = yield from _exchanged(raws, lengths, members)
    got = [Description.decoded(raw) for raw in gathered]
    # 3. exchange the contents, one call per device type
    output_buffers: list[dict[str, torch.Tensor]] = [{} for _ in got]
    works = []
    for device in devices:
        sent = [_packed_for(device, item, each) for item, each in zip(items, descriptions, strict=True)]
        theirs = [each.nbytes(device) for each in got]
        target = torch.empty(sum(theirs), dtype=torch.uint8, device=sent[0].device)
        counts = [part.numel() for part in sent]
        works.append(
            dist.all_to_all_single(target, torch.cat(sent), theirs, counts, members.handle, async_op=mode.last)
        )
        for output_buffer, part in zip(output_buffers, target.split(theirs), strict=True):
            output_buffer[device] = part
    yield works
    results = [each.unpacked(_aligned(output_buffer)) for each, output_buffer in zip(got, output_buffers, strict=True)]
    inputs = [tensor for item in items for tensor in item.tensors]
    if has_gradient and torch.is_grad_enabled():
        results = _differentiable_exchange(members, inputs, results)
    return [each.rebuilt(tensors) for each, tensors in zip(got, results, strict=True)]


def _exchanged_lengths(
    mode: Mode, members: GroupArgument, raws: Sequence[bytes], descriptions: Sequence[Description]
) -> Generator[Works, None, tuple[list[int], list[str], bool]]:
    """Return the lengths of the descriptions for this rank, the device types in use, and whether any has a gradient.

    All ranks must agree on the devices and on the gradients, since both decide which collectives follow.
    """
    uses = [int(any(device in each.devices for each in descriptions)) for device in wire_format.DEVICES]
    uses.append(int(any(each.has_gradient for each in descriptions)))
    sent = torch.tensor([[len(raw), *uses] for raw in raws], dtype=torch.int64, device=members.control)
    got = torch.empty_like(sent)
    yield [dist.all_to_all_single(got, sent, group=members.handle, async_op=mode.early)]
    lengths, *used, with_gradient = got.t().tolist()
    devices = [device for device, by in zip(wire_format.DEVICES, used, strict=True) if any(by)]
    return lengths, devices, any(with_gradient)


def _packed_for(device: str, item: Data, description: Description) -> torch.Tensor:
    """Return the bytes of an item on a device; empty if it has no leaf there."""
    if device in description.devices:
        return wire_format.pack(item.tensors, description, device)
    return torch.empty(0, dtype=torch.uint8, device=device)


def _aligned(output_buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same content at offsets that are aligned for every dtype."""
    return {
        device: output_buffer.clone() if output_buffer.storage_offset() % wire_format.ALIGNED else output_buffer
        for device, output_buffer in output_buffers.items()
    }


def _exchanged(
    raws: Sequence[bytes], lengths: Sequence[int], members: GroupArgument
) -> Generator[Works, None, list[bytes]]:
    """Return every rank's bytes for this rank."""
    sent = wire_format.to_tensor(b"".join(raws), members.control)
    got = torch.empty(sum(lengths), dtype=torch.uint8, device=members.control)
    yield [dist.all_to_all_single(got, sent, lengths, [len(raw) for raw in raws], members.handle, async_op=False)]
    return [wire_format.to_bytes(part) for part in got.split(list(lengths))]


def _differentiable_exchange(
    members: GroupArgument, inputs: Sequence[torch.Tensor], results: list[list[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    counts = [len(tensors) for tensors in results]

    def backward(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        taken = [pytree.take(part, "all_to_all, backward") for part in _split(grads, counts)]
        shares = run(exchange(IN_THE_CALL, members, taken))
        return [grad for share in shares for grad in share]

    flat = autograd.attach([each for tensors in results for each in tensors], inputs, backward)
    return _split(flat, counts)


def _split(tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> list[list[torch.Tensor]]:
    each = iter(tensors)
    return [[next(each) for _ in range(count)] for count in counts]


# -- descriptions ------------------------------------------------------------------------------------------------------


def _head_of(raw: bytes, device: torch.device) -> torch.Tensor:
    """Return the length of a description (8 bytes, little-endian) and as much of the description as fits."""
    start = len(raw).to_bytes(8, "little") + raw[: _HEAD - 8]
    return wire_format.to_tensor(start.ljust(_HEAD, b"\0"), device)


def _read_head(head: torch.Tensor) -> tuple[int, bytes]:
    raw = wire_format.to_bytes(head)
    return int.from_bytes(raw[:8], "little"), raw[8:]
