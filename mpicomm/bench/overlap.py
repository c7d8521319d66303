"""Overlap of an operation with computation, by the method of the OSU benchmarks (osu_iallreduce).

The computation is calibrated to take as long as the operation alone. With full overlap both together take as long as
one of them, without overlap they take twice as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from mpicomm.bench import timing
from mpicomm.bench.timing import Bench

_EDGE = 32  # rows and columns of the matrices: one multiplication takes some microseconds
_CALIBRATION_SECONDS = 0.02


def percent(bench: Bench, start: Callable[[], object], device: torch.device) -> float:
    """Return the percentage of the operation started by `start` that computation hides (collective)."""

    def alone() -> None:
        start().wait()  # type: ignore[attr-defined]

    pure = timing.in_turn(bench, {"alone": alone})["alone"].least
    compute = _computation(pure, device)

    def together() -> None:
        work = start()
        compute()
        work.wait()  # type: ignore[attr-defined]

    times = timing.in_turn(bench, {"compute": compute, "together": together})
    left = times["together"].least - times["compute"].least
    return max(0.0, min(100.0, 100 * (1 - left / pure)))


def _computation(microseconds: float, device: torch.device) -> Callable[[], None]:
    """Return a computation that takes about this many microseconds on this rank."""
    matrix = torch.eye(_EDGE, device=device)
    result = torch.empty_like(matrix)
    number, start = 0, time.perf_counter()
    while time.perf_counter() < start + _CALIBRATION_SECONDS:
        torch.mm(matrix, matrix, out=result)
        number += 1
    times = max(1, round(microseconds * 1e-6 * number / _CALIBRATION_SECONDS))

    def compute() -> None:
        for _ in range(times):
            torch.mm(matrix, matrix, out=result)

    return compute
