"""Overlap of an operation with computation, by the method of the OSU benchmarks (osu_iallreduce).

The computation is calibrated to take as long as the operation alone. With full overlap both together take as long as
one of them, without overlap they take twice as long.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from mpicomm.bench import timing
from mpicomm.bench.timing import Bench

_EDGE = 32  # rows and columns of the matrices: one multiplication takes some microseconds
_CALIBRATION_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Microseconds on the slowest rank, the mean of the fastest round."""

    operation: float
    computation: float
    together: float

    @property
    def percent(self) -> float:
        """The percentage of the operation that the computation hides."""
        return max(0.0, min(100.0, 100 * (1 - (self.together - self.computation) / self.operation)))


def measure(bench: Bench, start: Callable[[], Any], compute: Callable[[int], object]) -> Overlap:
    """Return the overlap of the operation that `start` starts (collective).

    Args:
        bench: The functions for timing.
        start: Starts the operation, and returns its handle.
        compute: Computes; the time is proportional to the argument.
    """
    operation = timing.in_turn(bench, {"operation": lambda: start().wait()})["operation"].least

    def computed(amount: int) -> None:
        compute(amount)
        bench.settle()

    amount = amount_for(computed, operation)

    def together() -> None:
        work = start()
        compute(amount)
        work.wait()

    times = timing.in_turn(bench, {"computation": lambda: compute(amount), "together": together})
    return Overlap(operation, times["computation"].least, times["together"].least)


def multiplications(device: torch.device) -> Callable[[int], None]:
    """Return a function that multiplies small matrices, as often as its argument says."""
    matrix = torch.eye(_EDGE, device=device)
    result = torch.empty_like(matrix)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix, out=result)

    return multiply


def amount_for(compute: Callable[[int], object], microseconds: float) -> int:
    """Return the argument with which the computation takes about this long on this rank."""
    amount, seconds = 1, 0.0
    while seconds < _CALIBRATION_SECONDS:
        amount *= 2
        start = time.perf_counter()
        compute(amount)
        seconds = time.perf_counter() - start
    return max(1, round(microseconds * 1e-6 * amount / seconds))
