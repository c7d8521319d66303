"""Timing of calls on several ranks: the compared calls run in turn, in rounds, and the slowest rank counts."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy
import torch
import torch.distributed as dist

from mpicomm.collective_ops.collectives import all_gather_object
from mpicomm.job.session import World

Call = Callable[[], object]

_WARM_UP_CALLS = 3  # the first calls load code, touch memory and open connections
_MIN_CALLS = 3  # per round, so that one interruption by the system is not the whole mean
_MAX_CALLS = 5000  # per round, for the memory of their times; calls of less than 10 us reach it in 0.05 s


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
class Timed:
    """A call to time, and code around it whose time does not count."""

    call: Call
    before_each: Call | None = None
    """Runs before each call, and is followed by a barrier."""
    before_round: Call | None = None


@dataclasses.dataclass(frozen=True)
class Times:
    """Duration of a call on the slowest rank, in microseconds."""

    rounds: tuple[float, ...]
    """Mean of each round."""
    p50: float | None = None
    """Median of the calls of all rounds; None if single calls are not timed."""
    p99: float | None = None
    """99th percentile of the same calls. It can be less than the means: if a call in a thousand is interrupted by the
    system for milliseconds, these calls determine the means, but no percentile."""

    @property
    def least(self) -> float:
        """Mean of the fastest round."""
        return min(self.rounds)

    @property
    def median(self) -> float:
        """Mean of the median round."""
        return statistics.median(self.rounds)


def on_ranks_of(world: World, rounds: int, *, device: str = "cpu", seconds: float = 0.05) -> Bench:
    """Return the functions for timing on the ranks of a job.

    Args:
        world: The ranks.
        rounds: The number of rounds.
        device: The type of the measured device: "cpu", or that of an accelerator.
        seconds: Approximate duration of a round.
    """
    synchronize = dist.barrier if world.comm is None else world.comm.Barrier  # MPI's has the least skew
    settle = (lambda: None) if device == "cpu" else torch.accelerator.synchronize
    return Bench(all_gather_object, synchronize, settle, rounds, seconds)


def in_turn(bench: Bench, calls: Mapping[str, Call | Timed], *, times_calls: bool = True) -> dict[str, Times]:
    """Return the duration of each call (collective).

    Args:
        bench: The functions for timing.
        calls: The calls by name.
        times_calls: Time every call; if False only whole rounds, for calls that return before their work completes, or
            that take less than a microsecond.
    """
    timed = {name: call if isinstance(call, Timed) else Timed(call) for name, call in calls.items()}
    numbers = {name: _number(bench, call, times_calls=times_calls) for name, call in timed.items()}
    samples: dict[str, list[numpy.ndarray]] = {name: [] for name in timed}
    for _ in range(bench.rounds):
        for name, call in timed.items():
            samples[name].append(_round(bench, call, numbers[name], times_calls=times_calls))
    return {name: _of_all_ranks(bench, rounds, times_calls=times_calls) for name, rounds in samples.items()}


def _number(bench: Bench, timed: Timed, *, times_calls: bool) -> int:
    """Return the number of calls per round, the same on every rank."""
    _round(bench, timed, _WARM_UP_CALLS, times_calls=times_calls)
    start = time.perf_counter()
    _round(bench, timed, _WARM_UP_CALLS, times_calls=times_calls)
    slowest = max(map(float, bench.gather(time.perf_counter() - start))) / _WARM_UP_CALLS  # type: ignore[arg-type]
    return round(min(max(bench.seconds / max(slowest, 1e-9), _MIN_CALLS), _MAX_CALLS))


def _round(bench: Bench, timed: Timed, number: int, *, times_calls: bool) -> numpy.ndarray:
    """Return the duration of each of `number` calls, in nanoseconds."""
    if timed.before_round is not None:
        timed.before_round()
    if timed.before_each is None:
        return _in_a_row(bench, timed.call, number) if times_calls else _together(bench, timed.call, number)
    return _one_by_one(bench, timed.call, timed.before_each, number)


def _in_a_row(bench: Bench, call: Call, number: int) -> numpy.ndarray:
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
    return numpy.diff(moments)


def _together(bench: Bench, call: Call, number: int) -> numpy.ndarray:
    """Return the mean duration `number` times: reading the clock takes as long as a tenth of a small operation."""
    bench.synchronize()
    start = time.perf_counter_ns()
    for _ in range(number):
        call()
    bench.settle()
    return numpy.full(number, (time.perf_counter_ns() - start) / number)


def _one_by_one(bench: Bench, call: Call, before: Call, number: int) -> numpy.ndarray:
    durations = [0] * number
    now, synchronize, settle = time.perf_counter_ns, bench.synchronize, bench.settle
    for index in range(number):
        before()
        settle()
        synchronize()
        start = now()
        call()
        settle()
        durations[index] = now() - start
    return numpy.array(durations)


def _of_all_ranks(bench: Bench, rounds: Sequence[numpy.ndarray], *, times_calls: bool) -> Times:
    means = [float(durations.mean()) for durations in rounds]
    percentiles = [float(value) for value in numpy.percentile(numpy.concatenate(rounds), (50, 99))]
    gathered: list[tuple[list[float], list[float]]] = bench.gather((means, percentiles))  # type: ignore[assignment]
    of_ranks, percentiles_of_ranks = zip(*gathered, strict=True)
    slowest = tuple(max(round_means) / 1e3 for round_means in zip(*of_ranks, strict=True))
    if not times_calls:
        return Times(slowest)
    return Times(slowest, *[max(values) / 1e3 for values in zip(*percentiles_of_ranks, strict=True)])
