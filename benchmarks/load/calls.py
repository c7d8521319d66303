"""The overhead of asynchronous operations: call, wait, and the share that overlaps with the caller's own work."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from mpicomm.bench import overlap, timing
from mpicomm.bench.timing import Bench, Timed

Group = dist.ProcessGroup


def measure(ours: Group, gloo: Group, bench: Bench) -> dict[str, float]:
    """Return the microseconds of calls, the minimum of interleaved rounds, and overlap shares (collective)."""
    small, large = torch.zeros(16), torch.zeros(4 * 2**20)
    times = timing.in_turn(
        bench,
        {
            "async call, 64 B": _call(small, ours),
            "async call, 64 B, Gloo": _call(small, gloo),
            "async call + wait, 64 B": lambda: _wait(small, ours),
            "async call + wait, 64 B, Gloo": lambda: _wait(small, gloo),
            "sync, 64 B": lambda: dist.all_reduce(small, group=ours),
            "async call + wait, 16 MiB": lambda: _wait(large, ours),
            "async call + wait, 16 MiB, Gloo": lambda: _wait(large, gloo),
        },
    )
    figures = {name: round(each.least, 1) for name, each in times.items()}
    for name, compute in {"a sleep": _sleep, "a kernel of torch's": _multiply, "a loop in Python": _loop}.items():
        figures |= _overlap(name, compute, large, ours, bench)
    return figures


def _call(tensor: torch.Tensor, group: Group) -> Timed:
    """Return the call alone; it is waited for before the next one, while the worker is awake and idle."""
    works: list[dist.Work] = []

    def call() -> None:
        works.append(dist.all_reduce(tensor, group=group, async_op=True))

    def wait() -> None:
        while works:
            works.pop().wait()

    return Timed(call, wait)


def _wait(tensor: torch.Tensor, group: Group) -> None:
    dist.all_reduce(tensor, group=group, async_op=True).wait()


def _overlap(
    name: str, compute: Callable[[int], None], tensor: torch.Tensor, group: Group, bench: Bench
) -> dict[str, float]:
    start = functools.partial(dist.all_reduce, tensor, group=group, async_op=True)
    found = overlap.measure(bench, start, compute)
    return {
        f"16 MiB beside {name}: together": round(found.together, 1),
        f"16 MiB beside {name}: that alone": round(found.computation, 1),
        f"16 MiB beside {name}: the operation alone": round(found.operation, 1),
        f"16 MiB beside {name}: share hidden": round(found.percent / 100, 2),
    }


def _sleep(amount: int) -> None:
    """Simulate a computation on a GPU, during which the host is idle: sleep `amount` times 10 us."""
    time.sleep(1e-5 * amount)


_MATRIX = torch.ones(128, 128)


def _multiply(amount: int) -> None:
    for _ in range(amount):
        _MATRIX @ _MATRIX


def _loop(amount: int) -> None:
    for _ in range(100 * amount):
        pass
