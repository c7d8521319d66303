"""The overhead of asynchronous operations: call, wait, and the share that overlaps with the caller's own work."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import mpicomm
from benchmarks.rounds import fastest, mean_microseconds
from mpicomm.bench import overlap
from mpicomm.bench.timing import Bench

ROUNDS = 7
Group = dist.ProcessGroup


def measure(ours: Group, gloo: Group) -> dict[str, float]:
    """Return the microseconds of calls, the minimum of interleaved rounds, and overlap shares (collective)."""
    small, large = torch.zeros(16), torch.zeros(4 * 2**20)
    figures = fastest(
        {
            "async call, 64 B": lambda: _call(small, ours),
            "async call, 64 B, Gloo": lambda: _call(small, gloo),
            "async call + wait, 64 B": lambda: mean_microseconds(lambda: _wait(small, ours), 100),
            "async call + wait, 64 B, Gloo": lambda: mean_microseconds(lambda: _wait(small, gloo), 100),
            "sync, 64 B": lambda: mean_microseconds(lambda: dist.all_reduce(small, group=ours), 200),
            "async call + wait, 16 MiB": lambda: mean_microseconds(lambda: _wait(large, ours), 4),
            "async call + wait, 16 MiB, Gloo": lambda: mean_microseconds(lambda: _wait(large, gloo), 4),
        },
        ROUNDS,
    )
    figures = {name: round(microseconds, 1) for name, microseconds in figures.items()}
    for name, compute in {"a sleep": _sleep, "a kernel of torch's": _multiply, "a loop in Python": _loop}.items():
        figures |= _overlap(name, compute, large, ours)
    return figures


def _call(tensor: torch.Tensor, group: Group) -> float:
    """Return the time of the call alone, while the worker is awake and idle."""
    total = 0.0
    for _ in range(100):
        start = time.perf_counter()
        work = dist.all_reduce(tensor, group=group, async_op=True)
        total += time.perf_counter() - start
        work.wait()
    return 1e6 * total / 100


def _wait(tensor: torch.Tensor, group: Group) -> None:
    dist.all_reduce(tensor, group=group, async_op=True).wait()


def _overlap(name: str, compute: Callable[[int], None], tensor: torch.Tensor, group: Group) -> dict[str, float]:
    bench = Bench(mpicomm.all_gather_object, dist.barrier, lambda: None, ROUNDS)
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
