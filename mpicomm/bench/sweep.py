"""Measures operations of all kinds and sizes with all backends in turn: latency, bandwidth, wrong elements, overlap.

Before and after the timed calls, each backend runs an operation on known inputs, whose result is checked. Every rank
writes its inputs again before each timed call, so that no backend finds them in another rank's cache; that time does
not count. Without it the timed calls run on zeros, because repeated sums of zeros stay zero.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mpicomm import terminal
from mpicomm.backend.transfer import dtypes
from mpicomm.bench import overlap, timing
from mpicomm.bench.compared_backends import Backend
from mpicomm.bench.measured_operations import OPERATIONS, Case, MeasuredOperation
from mpicomm.bench.timing import Bench, Call, Timed
from mpicomm.job.session import World

REWRITTEN = "rewritten before each call; that time does not count"
ZEROS = "zeros, not rewritten between the calls"
"""What the timed calls run on, for reports."""

# Exceptions with which backends reject an operation.
_REFUSALS = (NotImplementedError, RuntimeError, ValueError, TypeError, MemoryError, OverflowError)


@dataclasses.dataclass(frozen=True)
class SweepRow:
    """Results for one operation, dtype, size and backend."""

    operation: str
    dtype: str
    in_place: bool
    nbytes: int
    count: int
    backend: str
    us: float
    """Latency on the slowest rank: the mean of the fastest round."""
    us_median: float
    """The mean of the median round."""
    us_p50: float | None
    us_p99: float | None
    """Percentiles of the calls of all rounds; None if single calls are not timed."""
    algbw: float
    """Algorithm bandwidth: the size divided by the latency, in GB/s."""
    busbw: float
    """Bus bandwidth: the bandwidth on the links between ranks, in GB/s."""
    wrong: int
    """Number of wrong elements on all ranks."""
    overlap: float | None = None
    """Percentage that computation can hide; None for synchronous operations."""


@dataclasses.dataclass(frozen=True)
class SweepResults:
    """Results, and the cases that backends rejected."""

    rows: list[SweepRow] = dataclasses.field(default_factory=list)
    refusals: dict[str, str] = dataclasses.field(default_factory=dict)
    """Reasons by operation, dtype, mode (in place or out of place) and backend."""


def cases(
    operations: Sequence[str], sizes: Sequence[int], types: Sequence[torch.dtype], device: torch.device, world: World
) -> list[Case]:
    """Return the cases of all operations, dtypes, modes and sizes, the same on every rank.

    Args:
        operations: The names of the operations.
        sizes: Bytes of the larger buffer of a rank.
        types: The dtypes.
        device: The device of the buffers.
        world: The ranks.
    """
    distinct: dict[Any, Case] = {}
    for name, dtype in itertools.product(operations, types):
        for in_place, nbytes in itertools.product(OPERATIONS[name].places, sizes):
            case = Case(name, nbytes, dtype, device, in_place, world.rank, world.size)
            # Several small sizes may round to one element per rank.
            distinct.setdefault((name, dtype, in_place, OPERATIONS[name].count_of(case)), case)
    return list(distinct.values())


def measure(
    each_case: Iterable[Case],
    backends: Mapping[str, Backend],
    bench: Bench,
    *,
    asynchronous: bool = False,
    rewrites: bool = True,
) -> SweepResults:
    """Measure each case with each backend that supports it (collective).

    Args:
        each_case: The cases.
        backends: The backends by name.
        bench: The functions for timing.
        asynchronous: Start the operations and wait, and measure their overlap with computation; otherwise run them
            synchronously.
        rewrites: Write the inputs again before each timed call.
    """
    results = SweepResults()
    for case in each_case:
        operation, why = _allocated(case)
        if reasons := [reason for reason in bench.gather(why) if reason]:
            results.refusals[str(case)] = str(reasons[0])
        elif operation is not None:
            _measure(operation, backends, bench, results, asynchronous=asynchronous, rewrites=rewrites)
    return results


def _allocated(case: Case) -> tuple[MeasuredOperation | None, str]:
    """Return the operation with its buffers, or the reason why they cannot be allocated."""
    try:
        return MeasuredOperation(case), ""
    except (RuntimeError, MemoryError) as error:
        return None, terminal.first_line(error)


def _measure(
    operation: MeasuredOperation,
    backends: Mapping[str, Backend],
    bench: Bench,
    results: SweepResults,
    *,
    asynchronous: bool,
    rewrites: bool,
) -> None:
    # 1. run each backend once on known inputs
    case = operation.case
    calls: dict[str, Call] = {}
    wrong: dict[str, int] = {}
    for name, backend in backends.items():
        try:
            calls[name], wrong[name] = _tried(operation, backend, bench, asynchronous=asynchronous)
        except NotImplementedError as error:
            mode = "in place" if case.in_place else "out of place"
            results.refusals[f"{case.name}, {dtypes.short(case.dtype)}, {mode}, {name}"] = str(error)
    # 2. time them in turn
    _write_zeros(operation)
    before = operation.write_inputs if rewrites else None
    timed = {name: Timed(call, before) for name, call in calls.items()}
    times = timing.in_turn(bench, timed, times_calls=case.device.type == "cpu")
    # 3. check them again, and measure the overlap on zeros
    for name, call in calls.items():
        wrong[name] += _wrong_after(operation, call, bench)
        _write_zeros(operation)
        hidden = None
        if asynchronous:
            compute = overlap.multiplications(case.device)
            hidden = overlap.measure(bench, backends[name](operation, True), compute).percent
        results.rows.append(_row(operation, name, times[name], wrong[name], hidden))


def _tried(operation: MeasuredOperation, backend: Backend, bench: Bench, *, asynchronous: bool) -> tuple[Call, int]:
    """Return the call, and the number of wrong elements after it on all ranks (collective).

    Raises:
        NotImplementedError: If the backend of a rank rejects the operation, with its reason.
    """
    operation.prepare()
    call: Call | None = None
    why = ""
    try:
        start = backend(operation, asynchronous)
        call = (lambda: start().wait()) if asynchronous else start
        call()
        bench.settle()
    except _REFUSALS as error:
        why = terminal.first_line(error)
    answers: list[Any] = bench.gather((why, 0 if why else operation.wrong()))
    reasons = [reason for reason, _ in answers if reason]
    if call is None or reasons:
        raise NotImplementedError(reasons[0])
    return call, sum(wrong for _, wrong in answers)


def _wrong_after(operation: MeasuredOperation, call: Call, bench: Bench) -> int:
    """Return the number of wrong elements on all ranks after a call on known inputs (collective)."""
    operation.prepare()
    bench.synchronize()
    call()
    bench.settle()
    wrong: list[Any] = bench.gather(operation.wrong())
    return sum(wrong)


def _write_zeros(operation: MeasuredOperation) -> None:
    operation.receive.zero_()
    operation.send.zero_()


def _row(operation: MeasuredOperation, backend: str, times: timing.Times, wrong: int, hidden: float | None) -> SweepRow:
    repeats = operation.kind.repeats
    us = times.least / repeats
    algbw = operation.nbytes / us / 1e3
    return SweepRow(
        operation=operation.case.name,
        dtype=dtypes.short(operation.case.dtype),
        in_place=operation.case.in_place,
        nbytes=operation.nbytes,
        count=operation.count,
        backend=backend,
        us=round(us, 3),
        us_median=round(times.median / repeats, 3),
        us_p50=None if times.p50 is None else round(times.p50 / repeats, 3),
        us_p99=None if times.p99 is None else round(times.p99 / repeats, 3),
        algbw=float(f"{algbw:.4g}"),
        busbw=float(f"{algbw * operation.load:.4g}"),
        wrong=wrong,
        overlap=None if hidden is None else round(hidden, 1),
    )
