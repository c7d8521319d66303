"""Timing of calls: the compared calls run in turn, in rounds, and the slowest rank counts."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy

Call = Callable[[], object]

_WARM_UP = 3
_FEWEST, _MOST = 3, 5000  # calls per round


@dataclasses.dataclass(frozen=True)
class Bench:
    """Functions and parameters for timing on several ranks."""

    gather: Callable[[object], list[object]]
    """Returns the values of all ranks, on every rank (collective)."""
    synchronize: Call
    """A barrier: returns once all ranks have called it (collective)."""
    settle: Call
    """Returns once this rank's device has completed its work."""
    rounds: int = 7
    seconds: float = 0.05
    """Approximate duration of a round, in seconds."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Duration of a call on the slowest rank, in microseconds."""

    least: float
    """Mean of the fastest round."""
    median: float
    """Mean of the median round."""
    p99: float | None
    """99th percentile of the calls of all rounds; None if calls return before the device completes."""


def in_turn(bench: Bench, calls: Mapping[str, Call], *, each: bool = True) -> dict[str, Times]:
    """Return the duration of each call (collective).

    Args:
        each: Time every call; if False only whole rounds, for calls that return before their work completes.
    """
    numbers = {name: _number(bench, call) for name, call in calls.items()}
    samples: dict[str, list[numpy.ndarray]] = {name: [] for name in calls}
    for _ in range(bench.rounds):
        for name, call in calls.items():
            samples[name].append(_round(bench, call, numbers[name]))
    return {name: _of_all_ranks(bench, rounds, each=each) for name, rounds in samples.items()}


def _number(bench: Bench, call: Call) -> int:
    """Return the number of calls per round, the same on every rank."""
    for _ in range(_WARM_UP):
        call()
    bench.settle()
    bench.synchronize()
    start = time.perf_counter()
    for _ in range(_WARM_UP):
        call()
    bench.settle()
    slowest = max(map(float, bench.gather(time.perf_counter() - start))) / _WARM_UP  # type: ignore[arg-type]
    return round(min(max(bench.seconds / max(slowest, 1e-9), _FEWEST), _MOST))


def _round(bench: Bench, call: Call, number: int) -> numpy.ndarray:
    """Return the times before each call and after the last, in nanoseconds."""
    moments = [0] * (number + 1)
    now = time.perf_counter_ns
    bench.synchronize()
    moments[0] = now()
    for index in range(1, number):
        call()
        moments[index] = now()
    call()
    bench.settle()
    moments[number] = now()
    return numpy.array(moments)


def _of_all_ranks(bench: Bench, rounds: Sequence[numpy.ndarray], *, each: bool) -> Times:
    means = [(moments[-1] - moments[0]) / (len(moments) - 1) for moments in rounds]
    p99 = float(numpy.percentile(numpy.concatenate([numpy.diff(moments) for moments in rounds]), 99))
    gathered: list[tuple[list[float], float]] = bench.gather((means, p99))  # type: ignore[assignment]
    slowest = [max(of_ranks) / 1e3 for of_ranks in zip(*[means for means, _ in gathered], strict=True)]
    return Times(
        least=float(min(slowest)),
        median=float(statistics.median(slowest)),
        p99=max(p99 for _, p99 in gathered) / 1e3 if each else None,
    )
