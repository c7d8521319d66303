"""Four threads on four groups, with delays: each thread has its own group, and calls several kinds of operations."""

from __future__ import annotations

import random
import threading
import time

import torch
import torch.distributed as dist

from tests.programs.limit import Limit
from tests.programs.sets import GroupSet
from tests.worlds import Group

KINDS = ("world", "copy", "left", "right")
_MOST_OPEN = 8  # operations that a thread has started and not yet waited for
_COUNTS = (1, 100, 5000)


class Load(threading.Thread):
    """Calls operations on one group, and checks their results."""

    def __init__(self, kind: str, group: Group, operations: int, seed: int) -> None:
        super().__init__(name=f"load-{kind}")
        self.error: BaseException | None = None
        self.done = 0
        self._kind = kind
        self._group = group
        self._operations = operations
        self._same = random.Random(f"{seed}-{kind}")  # equal on all ranks
        self._own = random.Random(f"{seed}-{kind}-{group.rank}")
        self._open: list[tuple[list[dist.Work], torch.Tensor, float]] = []

    def run(self) -> None:
        try:
            for _ in range(self._operations):
                self._one()
                self.done += 1
            self._finish(0)
        except BaseException as error:  # noqa: BLE001  the joining thread raises it
            self.error = error

    def _one(self) -> None:
        kind, count, number = self._same.choice(CALLS), self._same.choice(_COUNTS), self._same.randrange(100)
        if self._own.random() < 0.05:
            time.sleep(self._own.random() * 0.002)
        works, tensor, expected = kind(self._group, count, number, self._same.randrange(self._group.size))
        self._open.append((works, tensor, expected))
        if self._own.random() < 0.5 or len(self._open) > _MOST_OPEN:
            self._finish(self._own.randrange(_MOST_OPEN))

    def _finish(self, left: int) -> None:
        """Wait for all but the last `left` operations."""
        while len(self._open) > left:
            works, tensor, expected = self._open.pop(0)
            for work in works:
                work.wait()
            right = torch.full_like(tensor, expected)
            assert torch.equal(tensor, right), f"{self._kind}, by #{self.done}: {tensor} instead of {expected}"


Call = tuple[list[dist.Work], torch.Tensor, float]
"""The works of an operation, the tensor that it writes, and the expected value of its elements."""


def _all_reduce(group: Group, count: int, number: int, root: int) -> Call:
    tensor = torch.full((count,), float(number + group.rank))
    work = dist.all_reduce(tensor, group=group.handle, async_op=True)
    return [work], tensor, group.size * number + sum(range(group.size))


def _all_reduce_now(group: Group, count: int, number: int, root: int) -> Call:
    tensor = torch.full((count,), float(number + group.rank))
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group.handle)
    return [], tensor, number + group.size - 1


def _broadcast(group: Group, count: int, number: int, root: int) -> Call:
    tensor = torch.full((count,), float(number + group.rank))
    return [dist.broadcast(tensor, group_src=root, group=group.handle, async_op=True)], tensor, number + root


def _ring(group: Group, count: int, number: int, root: int) -> Call:
    received = torch.full((count,), float(number))
    if group.size == 1:
        return [], received, number
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sent = torch.full((count,), float(number + group.rank))
    works = [
        dist.isend(sent, group_dst=after, group=group.handle),
        dist.irecv(received, group_src=before, group=group.handle),
    ]
    return works, received, number + before


CALLS = (_all_reduce, _all_reduce_now, _broadcast, _ring)


def run_on(groups: GroupSet, operations: int, seed: int, watch: Limit) -> list[Load]:
    """Run the threads of this rank on existing groups, and return the threads when they have ended."""
    loads = [Load(kind, groups[kind], operations, seed) for kind in KINDS if kind in groups]

    def where() -> str:
        return ", ".join(f"{load.name} at #{load.done} of {operations} (error: {load.error})" for load in loads)

    with watch.over(f"four threads --seed {seed}", where):
        for load in loads:
            load.start()
        for load in loads:
            load.join()
    return loads
