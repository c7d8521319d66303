"""Programs generated from a seed, equal on all ranks and legal by construction.

First, a list of operations is drawn, which all ranks share: collectives on several groups, and messages. Each rank then
draws its own schedule: it starts its operations in the order of the list, and waits for each one at any later time.
Between two waits it may start them in a different order, if the collectives of each group, and the messages between two
ranks, keep their order.

Such a program cannot deadlock. Of all waiting ranks, consider one whose operation comes first in the list: its
partners have not started this operation, so they wait, too, for an operation that is earlier in the list.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import random
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from tests.programs.both import Results
from tests.programs.sets import KINDS, OURS, GroupSet, ranks_of
from tests.worlds import Group

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)
BLOCKING = ("objects", "callback")  # they complete within their step
MESSAGES = ("message", "funnel")
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bfloat16)
COUNTS = (1, 1, 7, 100, 1000, 30_000)
BIG = 1 << 20  # elements; used occasionally
WAITS = ("wait", "wait", "wait with a timeout", "future", "poll", "thread")
_WITHOUT_FUTURE = (*MESSAGES, "reduce_scatter")  # on Gloo, where these cannot be polled either
_LONG = datetime.timedelta(minutes=5)
_FUNNEL_TAG = 10  # and higher: a receive from any source must not match messages of other receives


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation, equal on all ranks."""

    number: int
    kind: str
    group: str
    dtype: torch.dtype
    count: int
    root: int
    """A number that determines the root in a group, or the sender of a message."""

    other: int
    """A number that determines the receiver of a message."""

    tag: int
    reduction: str
    is_strided: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"#{self.number} {self.kind} {self.reduction} {dtype}[{self.count}] on {self.group}"

    def ends(self, size: int) -> tuple[int, int]:
        """Return the sender and the receiver of a message in a group of `size` ranks."""
        sender = self.root % size
        return sender, (sender + 1 + self.other % (size - 1)) % size


@dataclasses.dataclass
class Started:
    """An operation that this rank has started, and the tensors that it writes."""

    operation: Operation
    works: list[dist.Work]
    written: list[torch.Tensor]


Step = tuple[str, Operation | None]
"""A step of a rank: "start", "sleep", or one of `WAITS`; and its operation."""


class DrawnProgram:
    """The K-th program of a seed."""

    def __init__(self, seed: int, number: int) -> None:
        self._seed = f"{seed}-{number}"
        self._now = "not begun"

    def where(self) -> str:
        """Return a description of this rank's current step."""
        return self._now

    def __call__(self, rank: int, size: int, groups: GroupSet) -> Results:
        """Run the program, and return the tensors that its operations wrote on this rank."""
        operations = draw_operations(self._seed, size)
        steps = draw_steps(operations, random.Random(f"{self._seed}-{rank}"), rank, size)
        started: dict[int, Started] = {}
        threads: list[threading.Thread] = []
        for index, (what, operation) in enumerate(steps):
            self._now = f"step {index} of {len(steps)}: {what} {operation or ''}"
            if operation is None:
                time.sleep(0.001)
            elif what == "start":
                started[operation.number] = _start(operation, groups)
            else:
                threads += _wait(what, started[operation.number])
        for thread in threads:
            thread.join()
        return {
            f"{each.operation} ({index})": tensor
            for each in sorted(started.values(), key=lambda each: each.operation.number)
            for index, tensor in enumerate(each.written)
        }


# -- generation --------------------------------------------------------------------------------------------------------


def draw_operations(seed: str, size: int) -> list[Operation]:
    """Draw the operations that all ranks share."""
    draw = random.Random(seed)
    kinds = [*COLLECTIVES, *BLOCKING, *(MESSAGES * 4 if size > 1 else ())]
    return [_draw_operation(draw, number, draw.choice(kinds)) for number in range(draw.randrange(5, 40))]


def _draw_operation(draw: random.Random, number: int, kind: str) -> Operation:
    group = draw.choice(("world", "copy") if kind in MESSAGES else KINDS)
    return Operation(
        number=number,
        kind=kind,
        group=group,
        dtype=draw.choice(DTYPES),
        count=BIG if draw.random() < 0.02 else draw.choice(COUNTS),
        root=draw.randrange(12),
        other=draw.randrange(12),
        tag=draw.randrange(3) if kind == "message" else _FUNNEL_TAG + number,
        reduction=draw.choice(("SUM", "SUM", "MAX", "MIN")),
        is_strided=draw.random() < 0.2,
    )


def draw_steps(operations: list[Operation], draw: random.Random, rank: int, size: int) -> list[Step]:
    """Draw the order in which a rank starts its operations and waits for them."""
    steps: list[Step] = []
    fresh: list[Operation] = []  # in the order of the list; not yet added to the steps
    pending: list[Operation] = []
    for operation in operations:
        if not _takes_part(operation, rank, size):
            continue
        fresh.append(operation)
        if operation.kind in BLOCKING:
            steps += [*_starts(fresh[:-1], draw), ("start", operation)]
            pending += fresh[:-1]
            fresh = []
        elif draw.random() < 0.35:
            steps += _starts(fresh, draw)
            pending += fresh
            fresh = []
            chosen = draw.sample(pending, draw.randrange(len(pending) + 1))
            steps += [_draw_wait(each, draw) for each in chosen]
            pending = [each for each in pending if each not in chosen]
        if draw.random() < 0.1:
            steps.append(("sleep", None))
    steps += _starts(fresh, draw)
    pending += fresh
    return steps + [_draw_wait(each, draw) for each in draw.sample(pending, len(pending))]


def _takes_part(operation: Operation, rank: int, size: int) -> bool:
    ranks = ranks_of(operation.group, rank, size)
    if operation.kind == "message":
        return rank in operation.ends(size)
    return rank in ranks


def _starts(operations: list[Operation], draw: random.Random) -> list[Step]:
    """Interleave operations, and keep the order within each lane."""
    lanes: dict[str, collections.deque[Operation]] = collections.defaultdict(collections.deque)
    for each in operations:
        lanes[f"{each.group} {'messages' if each.kind in MESSAGES else 'collectives'}"].append(each)
    mixed = []
    while waiting := [lane for lane in lanes.values() if lane]:
        mixed.append(draw.choice(waiting).popleft())
    return [("start", each) for each in mixed]


def _draw_wait(operation: Operation, draw: random.Random) -> Step:
    if operation.kind in _WITHOUT_FUTURE:
        return draw.choice(("wait", "thread")), operation
    return draw.choice(WAITS), operation


# -- execution ---------------------------------------------------------------------------------------------------------


def _wait(how: str, started: Started) -> Iterator[threading.Thread]:
    """Wait for an operation with the method `how`; yield the waiting thread, if it is a separate one."""
    for work in started.works:
        if how == "future":
            work.get_future().wait()
        elif how == "poll":
            while not work.is_completed():
                time.sleep(0.0001)
        elif how == "thread":
            thread = threading.Thread(target=work.wait)
            thread.start()
            yield thread
        elif how == "wait":
            work.wait()
        else:
            work.wait(_LONG)


def _start(operation: Operation, groups: GroupSet) -> Started:
    group, is_strided = groups[operation.group], operation.is_strided and groups.backend == OURS
    data = _Data(operation, group, is_strided)
    works, written = _STARTERS[operation.kind](operation, group, data)
    return Started(operation, works, written)


class _Data:
    """The tensors of one operation on one rank."""

    def __init__(self, operation: Operation, group: Group, is_strided: bool) -> None:
        self._operation = operation
        self._is_strided = is_strided
        self._rank = group.rank

    def filled(self, parts: int = 1) -> torch.Tensor:
        """Return small numbers that depend on the rank, the index and the operation."""
        count = parts * self._operation.count
        values = (torch.arange(count) * 7 + self._rank * 3 + self._operation.number) % 11
        return self._laid_out(values.to(self._operation.dtype))

    def empty(self, parts: int = 1) -> torch.Tensor:
        """Return a buffer for a result."""
        return self._laid_out(torch.full((parts * self._operation.count,), 99, dtype=self._operation.dtype))

    def _laid_out(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values, with gaps in memory for strided operations on backends that support them."""
        if not self._is_strided:
            return values
        strided = torch.zeros(2 * len(values), dtype=values.dtype)[::2]
        return strided.copy_(values)


Begun = tuple[list[dist.Work], list[torch.Tensor]]
"""The works of an operation, and the tensors that it writes."""

Starter = Callable[[Operation, Group, _Data], Begun]


def _all_reduce(operation: Operation, group: Group, data: _Data) -> Begun:
    tensor, reduction = data.filled(), getattr(dist.ReduceOp, operation.reduction)
    return [dist.all_reduce(tensor, reduction, group=group.handle, async_op=True)], [tensor]


def _broadcast(operation: Operation, group: Group, data: _Data) -> Begun:
    tensor = data.filled()
    root = operation.root % group.size
    return [dist.broadcast(tensor, group_src=root, group=group.handle, async_op=True)], [tensor]


def _reduce(operation: Operation, group: Group, data: _Data) -> Begun:
    tensor, root = data.filled(), operation.root % group.size
    reduction = getattr(dist.ReduceOp, operation.reduction)
    work = dist.reduce(tensor, group_dst=root, op=reduction, group=group.handle, async_op=True)
    return [work], [tensor] if group.rank == root else []  # Gloo overwrites the tensors of the other ranks


def _all_gather(operation: Operation, group: Group, data: _Data) -> Begun:
    outputs = [data.empty() for _ in range(group.size)]
    return [dist.all_gather(outputs, data.filled(), group=group.handle, async_op=True)], outputs


def _all_gather_single(operation: Operation, group: Group, data: _Data) -> Begun:
    output = data.empty(group.size)
    return [dist.all_gather_single(output, data.filled(), group=group.handle, async_op=True)], [output]


def _gather(operation: Operation, group: Group, data: _Data) -> Begun:
    root = operation.root % group.size
    outputs = [data.empty() for _ in range(group.size)] if group.rank == root else None
    work = dist.gather(data.filled(), outputs, group_dst=root, group=group.handle, async_op=True)
    return [work], outputs or []


def _scatter(operation: Operation, group: Group, data: _Data) -> Begun:
    output, root = data.empty(), operation.root % group.size
    sources = list(data.filled(group.size).chunk(group.size)) if group.rank == root else None
    return [dist.scatter(output, sources, group_src=root, group=group.handle, async_op=True)], [output]


def _reduce_scatter(operation: Operation, group: Group, data: _Data) -> Begun:
    output, source = data.empty(), data.filled(group.size)
    reduction = getattr(dist.ReduceOp, operation.reduction)
    return [dist.reduce_scatter_single(output, source, reduction, group=group.handle, async_op=True)], [output]


def _all_to_all(operation: Operation, group: Group, data: _Data) -> Begun:
    output = data.empty(group.size)
    return [dist.all_to_all_single(output, data.filled(group.size), group=group.handle, async_op=True)], [output]


def _barrier(operation: Operation, group: Group, data: _Data) -> Begun:
    return [dist.barrier(group=group.handle, async_op=True)], []


def _objects(operation: Operation, group: Group, data: _Data) -> Begun:
    gathered: list[int] = [-1] * group.size
    dist.all_gather_object(gathered, group.rank * operation.number, group=group.handle)
    return [], [torch.tensor(gathered)]


def _callback(operation: Operation, group: Group, data: _Data) -> Begun:
    """Start an operation whose callback calls two further operations."""
    first, second = data.filled(), data.filled()

    def further(_future: torch.futures.Future) -> None:
        dist.all_reduce(second, dist.ReduceOp.MAX, group=group.handle)
        dist.broadcast(second, group_src=operation.root % group.size, group=group.handle, async_op=True).wait()

    work = dist.all_reduce(first, dist.ReduceOp.MIN, group=group.handle, async_op=True)
    work.get_future().then(further).wait()
    return [], [first, second]


def _message(operation: Operation, group: Group, data: _Data) -> Begun:
    sender, receiver = operation.ends(group.size)
    if group.rank == sender:
        return [dist.isend(data.filled(), group_dst=receiver, group=group.handle, tag=operation.tag)], []
    tensor = data.empty()
    return [dist.irecv(tensor, group_src=sender, group=group.handle, tag=operation.tag)], [tensor]


def _funnel(operation: Operation, group: Group, data: _Data) -> Begun:
    """Send equal messages from all ranks to one rank, which receives them from any source."""
    root = operation.root % group.size
    if group.rank != root:
        same = torch.full((operation.count,), operation.number, dtype=operation.dtype)
        return [dist.isend(same, group_dst=root, group=group.handle, tag=operation.tag)], []
    tensors = [data.empty() for _ in range(group.size - 1)]
    return [dist.irecv(tensor, group=group.handle, tag=operation.tag) for tensor in tensors], tensors


_STARTERS: dict[str, Starter] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "objects": _objects,
    "callback": _callback,
    "message": _message,
    "funnel": _funnel,
}
