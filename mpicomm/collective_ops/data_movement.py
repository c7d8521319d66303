"""broadcast, gather, all_gather and all_to_all of containers, whose lengths the receivers get from the senders."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm.collective_ops import autograd, call_check, pytree, wire_format
from mpicomm.collective_ops.group_argument import GroupArgument
from mpicomm.collective_ops.handles import IN_THE_CALL, Mode, Steps, Works, run
from mpicomm.collective_ops.pytree import Data, Description

_LENGTHS = 14  # leaves whose lengths are sent in the same message as the digest


def barrier(members: GroupArgument, _mode: Mode) -> Steps:
    """Run barrier, without a timeout."""
    yield [dist.barrier(members.handle, async_op=True)]


# -- broadcast ---------------------------------------------------------------------------------------------------------


def broadcast(members: GroupArgument, data: Data | Exception | None, src: int, mode: Mode) -> Steps:
    """Run broadcast, and return `src`'s data.

    Args:
        members: The group.
        data: The data on `src`, or the error that prevents sending it, raised on all ranks; None on the other ranks.
        src: The rank in the group that sends.
        mode: Which calls of torch.distributed are asynchronous.
    """
    description = yield from _broadcast_description(members, data, src, mode)
    tensors = data.tensors if isinstance(data, Data) else None
    source = members.ranks[src]
    if isinstance(data, Data):
        buffers = wire_format.pack(data)
    else:
        buffers = wire_format.output_buffers(description, f"rank {source}")
    contents = [buffer for buffer in buffers.values() if len(buffer)]
    yield [dist.broadcast(content, source, members.handle, async_op=mode.last) for content in contents]
    results = (
        wire_format.unpack(description, buffers) if tensors is None else [tensor.detach().clone() for tensor in tensors]
    )

    def backward(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        sums = [gradient.clone() for gradient in grads]
        for total in sums:
            dist.reduce(total, members.ranks[src], group=members.handle)
        return sums

    return description.rebuilt(autograd.attach(results, tensors or [], backward, is_needed=description.has_gradient))


def broadcast_into(
    members: GroupArgument,
    data: Data | Exception | None,
    out: Data | Exception,
    target: Any,
    src: int,
    mode: Mode,
) -> Steps:
    """Run broadcast into memory that every rank passes, and return `target`, the container of that memory.

    If `data` or `out` is an error, or they differ, the calls differ, and the comparison raises an error on every rank.
    """
    operation = f"broadcast with out= from rank {src}"
    failed = data if isinstance(data, Exception) else out
    if isinstance(failed, Exception):
        yield from call_check.compare_calls(members, operation, failed, mode)
    assert isinstance(out, Data)
    assert not isinstance(data, Exception)
    fits = data is None or data.description == out.description
    signature = (operation if fits else f"{operation}, with data that differ from out=", out.description)
    yield from call_check.compare_signatures(members, signature, mode)
    if not fits:
        raise ValueError(
            "broadcast: data and out= differ in structure, dtype or shape.\n"
            "Pass both with the same structure, dtypes and shapes."
        )
    for to, given in zip(out.tensors, [] if data is None else data.tensors, strict=data is not None):
        if (to.data_ptr(), to.stride()) != (given.data_ptr(), given.stride()):
            to.detach().copy_(given.detach())
    source = members.ranks[src]
    yield [dist.broadcast(tensor.detach(), source, members.handle, async_op=mode.last) for tensor in out.tensors]
    return target


def _broadcast_description(
    members: GroupArgument, data: Data | Exception | None, src: int, mode: Mode
) -> Generator[Works, None, Description]:
    """Broadcast the description of `src`'s data, or its error; in a second message if it does not fit in the first."""
    raw = b"" if data is None else wire_format.encode(data)
    source = members.ranks[src]
    head = wire_format.to_tensor(wire_format.head(raw), members.control)
    yield [dist.broadcast(head, source, members.handle, async_op=mode.early)]
    _, length, start = wire_format.read_head(head)
    if length > len(start):
        whole = wire_format.to_tensor(raw.ljust(length), members.control)
        yield [dist.broadcast(whole, source, members.handle, async_op=False)]
        start = wire_format.to_bytes(whole)
    if isinstance(data, Exception):
        raise data
    return wire_format.decode(start[:length], f"rank {source}")


# -- gather and all_gather ---------------------------------------------------------------------------------------------


def gather(members: GroupArgument, data: Data | Exception, dst: int | None, operation: str, mode: Mode) -> Steps:
    """Run gather, or all_gather if `dst` is None; return every rank's data in a list on `dst` (or on all ranks).

    Args:
        members: The group.
        data: The data of this rank, or the error that prevents sending it.
        dst: The rank in the group that receives the list; None for all ranks.
        operation: The name of the operation, which the ranks compare.
        mode: Which calls of torch.distributed are asynchronous.
    """
    with call_check.raise_after_comparison(data):
        described = yield from _lengths(members, data, operation if dst is None else f"{operation} to rank {dst}", mode)
    assert isinstance(data, Data)
    is_target = dst in (None, members.rank)
    received: dict[str, list[torch.Tensor]] = {}
    works = []
    for device, content in wire_format.pack(data).items():
        sizes = [wire_format.nbytes(description)[device] for description in described]
        longest = max(sizes)
        is_padded = not members.is_ours  # other backends need equal lengths
        source = _padded(content, longest) if is_padded else content
        outputs = [content.new_empty(longest if is_padded else size) for size in sizes] if is_target else []
        received[device] = [output[:size] for output, size in zip(outputs, sizes, strict=is_target)]
        if longest and dst is None:
            works.append(dist.all_gather(outputs, source, members.handle, async_op=mode.last))
        elif longest and dst is not None:
            target = members.ranks[dst]
            works.append(dist.gather(source, outputs or None, target, members.handle, async_op=mode.last))
    yield works
    if not is_target:
        return None
    is_differentiable = dst is None and data.description.has_gradient
    inputs = data.tensors if is_differentiable else None
    return _rebuilt(members, described, received, inputs, _summed, operation)


def _lengths(
    members: GroupArgument, data: Data | Exception, operation: str, mode: Mode
) -> Generator[Works, None, list[Description]]:
    """Return the description of every rank's data, equal but for the lengths of the first dimensions.

    Raises:
        MismatchError: On every rank, if the data differ in anything else.
    """
    operation, description = call_check.signature_of(operation, data)
    shapes = description.shapes
    signature = (operation, description.with_lengths(["*"] * len(shapes)))
    own_lengths = [shape[0] if shape else -1 for shape in shapes]
    first = [*own_lengths[:_LENGTHS], *[-1] * (_LENGTHS - len(own_lengths))]
    table = yield from call_check.compare_and_gather(members, signature, first, mode)
    lengths = [row[: len(own_lengths)] for row in table]
    if len(own_lengths) > _LENGTHS:
        rest_of_own = torch.tensor(own_lengths[_LENGTHS:], device=members.control)
        rest = yield from call_check.gathered(members, rest_of_own, IN_THE_CALL)
        lengths = [[*some, *others] for some, others in zip(lengths, rest, strict=True)]
    return [description.with_lengths(of_rank) for of_rank in lengths]


def _padded(content: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - content.numel()
    return torch.cat([content, content.new_empty(missing)]) if missing else content


# -- all_to_all --------------------------------------------------------------------------------------------------------


def all_to_all(members: GroupArgument, items: Sequence[Data] | Exception, mode: Mode) -> Steps:
    """Run all_to_all: rank r receives `items[r]` of every rank, in a list.

    An error in place of the items prevents sending them, and is raised on all ranks.
    """
    # 1. exchange the lengths of the descriptions
    error = items if isinstance(items, Exception) else None
    items = [] if isinstance(items, Exception) else items
    raws = [wire_format.encode(item) for item in items] if error is None else [wire_format.encode(error)] * members.size
    lengths, devices, has_gradient = yield from _all_to_all_lengths(members, raws, items, mode)
    # 2. exchange the descriptions
    encoded = [wire_format.to_tensor(raw, members.control) for raw in raws]
    work, parts = _start_all_to_all(encoded, lengths, members, is_async=False)
    yield [work]
    if error is not None:
        raise error
    described = [
        wire_format.decode(wire_format.to_bytes(part), f"rank {rank}")
        for rank, part in zip(members.ranks, parts, strict=True)
    ]
    # 3. exchange the contents, one call per device type
    packed = [wire_format.pack(item) for item in items]
    received: dict[str, list[torch.Tensor]] = {}
    works = []
    for device in devices:
        nothing = torch.empty(0, dtype=torch.uint8, device=wire_format.device_of(device))
        sizes = [wire_format.nbytes(description).get(device, 0) for description in described]
        sent = [buffers.get(device, nothing) for buffers in packed]
        work, received[device] = _start_all_to_all(sent, sizes, members, is_async=mode.last)
        works.append(work)
    yield works
    inputs = [tensor for item in items for tensor in item.tensors] if has_gradient else None
    return _rebuilt(members, described, received, inputs, _joined, "all_to_all")


def _all_to_all_lengths(
    members: GroupArgument, raws: Sequence[bytes], items: Sequence[Data], mode: Mode
) -> Generator[Works, None, tuple[list[int], list[str], bool]]:
    """Return the lengths of the descriptions for this rank, the device types in use, and whether any has a gradient.

    All ranks must agree on the devices and on the gradients, since both decide which collectives follow.
    """
    uses = [any(device in item.description.devices for item in items) for device in wire_format.DEVICES]
    uses.append(any(item.description.has_gradient for item in items))
    sent = torch.tensor([[len(raw), *uses] for raw in raws], dtype=torch.int64, device=members.control)
    got = torch.empty_like(sent)
    yield [dist.all_to_all_single(got, sent, group=members.handle, async_op=mode.early)]
    lengths, *used, with_gradient = got.t().tolist()
    devices = [device for device, by in zip(wire_format.DEVICES, used, strict=True) if any(by)]
    return lengths, devices, any(with_gradient)


def _start_all_to_all(
    parts: Sequence[torch.Tensor], sizes: Sequence[int], members: GroupArgument, *, is_async: bool
) -> tuple[Any, list[torch.Tensor]]:
    """Start to send each rank its part, in bytes; return the work, and the parts that the ranks send to this rank.

    Each part is padded, so that the next one is aligned for every dtype.
    """
    sent = [_padded(part, wire_format.aligned(len(part))) for part in parts]
    counts = [wire_format.aligned(size) for size in sizes]
    got = sent[0].new_empty(sum(counts))
    sent_counts = [len(part) for part in sent]
    work = dist.all_to_all_single(got, torch.cat(sent), counts, sent_counts, members.handle, async_op=is_async)
    return work, [part[:size] for part, size in zip(got.split(counts), sizes, strict=True)]


# -- gradients ---------------------------------------------------------------------------------------------------------


def _rebuilt(
    members: GroupArgument,
    described: Sequence[Description],
    received: Mapping[str, Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor] | None,
    combine: Callable[[list[list[torch.Tensor]]], list[torch.Tensor]],
    operation: str,
) -> list[Any]:
    """Return every rank's data, connected to the inputs in the autograd graph.

    Args:
        members: The group.
        described: The description of each rank's data.
        received: For each device type, the content of each rank's data.
        inputs: The tensors that this rank sent; None if no rank needs gradients.
        combine: Computes the gradients of the inputs from those that each rank sends back.
        operation: The name of the operation, for messages.
    """
    contents = [{device: parts[rank] for device, parts in received.items()} for rank in range(members.size)]
    results = list(map(wire_format.unpack, described, contents))
    counts = [len(tensors) for tensors in results]

    def backward(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        items = [pytree.take(part, f"{operation}, backward") for part in _split(grads, counts)]
        return combine(run(all_to_all(members, items, IN_THE_CALL)))

    flat = autograd.attach(_joined(results), inputs or [], backward, is_needed=inputs is not None)
    return [description.rebuilt(tensors) for description, tensors in zip(described, _split(flat, counts), strict=True)]


def _summed(shares: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(of_leaf).sum(0) for of_leaf in zip(*shares, strict=True)]


def _joined(shares: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return list(itertools.chain(*shares))


def _split(tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> list[list[torch.Tensor]]:
    remaining = iter(tensors)
    return [list(itertools.islice(remaining, count)) for count in counts]
