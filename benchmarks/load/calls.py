"""The overhead of asynchronous operations: call, wait, and the share that overlaps with the caller's own work."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.rounds import fastest, mean_microseconds

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
    for name, work in {"a sleep": _sleep, "a kernel of torch's": _multiply, "a loop in Python": _loop}.items():
        figures |= _overlap(name, work, large, ours)
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


def _overlap(name: str, work: Callable[[int], None], tensor: torch.Tensor, group: Group) -> dict[str, float]:
    """Return the share of an operation that overlaps with equally long work of the caller, by OSU's method."""
    rounds = []
    for _ in range(ROUNDS):
        alone = mean_microseconds(lambda: _wait(tensor, group), 3)
        amount = _amount_for(work, alone)
        own = mean_microseconds(functools.partial(work, amount), 3)
        both = mean_microseconds(functools.partial(_both, work, amount, tensor, group), 3)
        rounds.append((both, own, alone))
        dist.barrier()
    both, own, alone = min(rounds)
    hidden = max(0.0, 1 - (both - own) / alone)
    return {
        f"16 MiB beside {name}: together": round(both, 1),
        f"16 MiB beside {name}: that alone": round(own, 1),
        f"16 MiB beside {name}: the operation alone": round(alone, 1),
        f"16 MiB beside {name}: share hidden": round(hidden, 2),
    }


def _both(work: Callable[[int], None], amount: int, tensor: torch.Tensor, group: Group) -> None:
    operation = dist.all_reduce(tensor, group=group, async_op=True)
    work(amount)
    operation.wait()


def _amount_for(work: Callable[[int], None], microseconds: float) -> int:
    return max(1, round(200 * microseconds / mean_microseconds(lambda: work(200), 3)))


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
