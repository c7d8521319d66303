"""Timing of cases that run in turn, in rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch.distributed as dist


def fastest(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the least time of each case (collective).

    Args:
        cases: Functions that run a case and return its time.
        rounds: The number of rounds; in each, all cases run in turn.
    """
    least = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for name, case in cases.items():
            dist.barrier()
            least[name] = min(least[name], case())
    return least


def mean_microseconds(call: Callable[[], object], count: int, warm_up: int = 1) -> float:
    """Return the mean time of `count` calls, after `warm_up` calls that are not timed."""
    for _ in range(warm_up):
        call()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return 1e6 * (time.perf_counter() - start) / count
