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
from collections.abc import Iterator

import torch
import torch.distributed as dist

from tests.programs.sets import KINDS, OURS, GroupSet, Results, ranks_of

COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_single",
    "gather", "scatter", "reduce_scatter", "all_to_all", "barrier",
)  # fmt: skip
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

    def ends(self, size: int) -> tuple[int, int]:
        """Return the sender and the receiver of a message in a group of `size` ranks."""
        sender = self.root % size
        return sender, (sender + 1 + self.other % (size - 1)) % size


Step = tuple[str, Operation | None]
"""A step of a rank: "start", "sleep", or one of `WAITS`; and its operation."""


def run(seed: str, rank: int, size: int, groups: GroupSet) -> Results:
    """Run the program of a seed, and return the tensors that its operations wrote on this rank."""
    steps = draw_steps(draw_operations(seed), random.Random(f"{seed}-{rank}"), rank, size)
    started: dict[int, Started] = {}
    threads: list[threading.Thread] = []
    for how, operation in steps:
        if operation is None:
            time.sleep(0.001)
        elif how == "start":
            started[operation.number] = Started(operation, groups)
        else:
            threads += started[operation.number].wait(how)
    for thread in threads:
        thread.join()
    return {
        f"{each.operation} ({index})": tensor
        for _, each in sorted(started.items())
        for index, tensor in enumerate(each.written)
    }


# -- generation --------------------------------------------------------------------------------------------------------


def draw_operations(seed: str) -> list[Operation]:
    """Draw the operations that all ranks share."""
    draw = random.Random(seed)
    kinds = [*COLLECTIVES, *BLOCKING, *MESSAGES * 4]
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


class Started:
    """An operation that this rank has started: its works, and the tensors that it writes."""

    def __init__(self, operation: Operation, groups: GroupSet) -> None:
        self.operation = operation
        self.written: list[torch.Tensor] = []
        self._group = groups[operation.group]
        self._root = operation.root % self._group.size
        self._is_root = self._group.rank == self._root
        self._reduction = getattr(dist.ReduceOp, operation.reduction)
        self._is_strided = operation.is_strided and groups.backend == OURS  # Gloo requires dense tensors
        self._options = {"group": self._group.handle, "async_op": True}
        works = getattr(self, f"_{operation.kind}")()
        self._works = works if isinstance(works, list) else [works]

    def wait(self, how: str) -> Iterator[threading.Thread]:
        """Wait for the operation with the method `how`; yield the waiting thread, if it is a separate one."""
        for work in self._works:
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

    def _filled(self, parts: int = 1) -> torch.Tensor:
        """Return small numbers that depend on the rank, the index and the operation."""
        values = torch.arange(parts * self.operation.count) * 7 + self._group.rank * 3 + self.operation.number
        return self._laid_out(values % 11)

    def _output(self, parts: int = 1) -> torch.Tensor:
        """Return a buffer for a result."""
        self.written.append(self._laid_out(torch.full((parts * self.operation.count,), 99)))
        return self.written[-1]

    def _outputs(self) -> list[torch.Tensor]:
        return [self._output() for _ in range(self._group.size)]

    def _in_place(self) -> torch.Tensor:
        self.written.append(self._filled())
        return self.written[-1]

    def _laid_out(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values in the operation's dtype, with gaps in memory for strided operations."""
        gap = 2 if self._is_strided else 1
        return torch.zeros(gap * len(values), dtype=self.operation.dtype)[::gap].copy_(values)

    def _all_reduce(self) -> dist.Work:
        return dist.all_reduce(self._in_place(), self._reduction, **self._options)

    def _broadcast(self) -> dist.Work:
        return dist.broadcast(self._in_place(), group_src=self._root, **self._options)

    def _reduce(self) -> dist.Work:
        # Gloo overwrites the tensors of the other ranks.
        tensor = self._in_place() if self._is_root else self._filled()
        return dist.reduce(tensor, group_dst=self._root, op=self._reduction, **self._options)

    def _all_gather(self) -> dist.Work:
        return dist.all_gather(self._outputs(), self._filled(), **self._options)

    def _all_gather_single(self) -> dist.Work:
        return dist.all_gather_single(self._output(self._group.size), self._filled(), **self._options)

    def _gather(self) -> dist.Work:
        outputs = self._outputs() if self._is_root else None
        return dist.gather(self._filled(), outputs, group_dst=self._root, **self._options)

    def _scatter(self) -> dist.Work:
        size = self._group.size
        sources = list(self._filled(size).chunk(size)) if self._is_root else None
        return dist.scatter(self._output(), sources, group_src=self._root, **self._options)

    def _reduce_scatter(self) -> dist.Work:
        source = self._filled(self._group.size)
        return dist.reduce_scatter_single(self._output(), source, self._reduction, **self._options)

    def _all_to_all(self) -> dist.Work:
        size = self._group.size
        return dist.all_to_all_single(self._output(size), self._filled(size), **self._options)

    def _barrier(self) -> dist.Work:
        return dist.barrier(**self._options)

    def _objects(self) -> list[dist.Work]:
        gathered: list[int] = [-1] * self._group.size
        dist.all_gather_object(gathered, self._group.rank * self.operation.number, group=self._group.handle)
        self.written.append(torch.tensor(gathered))
        return []

    def _callback(self) -> list[dist.Work]:
        """Start an operation whose callback calls two further operations."""
        first, second = self._in_place(), self._in_place()

        def further(_future: torch.futures.Future) -> None:
            dist.all_reduce(second, dist.ReduceOp.MAX, group=self._group.handle)
            dist.broadcast(second, group_src=self._root, **self._options).wait()

        work = dist.all_reduce(first, dist.ReduceOp.MIN, **self._options)
        work.get_future().then(further).wait()
        return []

    def _message(self) -> dist.Work:
        sender, receiver = self.operation.ends(self._group.size)
        options = {"group": self._group.handle, "tag": self.operation.tag}
        if self._group.rank == sender:
            return dist.isend(self._filled(), group_dst=receiver, **options)
        return dist.irecv(self._output(), group_src=sender, **options)

    def _funnel(self) -> dist.Work | list[dist.Work]:
        """Send equal messages from all ranks to one rank, which receives them from any source."""
        options = {"group": self._group.handle, "tag": self.operation.tag}
        if self._is_root:
            return [dist.irecv(self._output(), **options) for _ in range(self._group.size - 1)]
        same = torch.full((self.operation.count,), self.operation.number, dtype=self.operation.dtype)
        return dist.isend(same, group_dst=self._root, **options)
