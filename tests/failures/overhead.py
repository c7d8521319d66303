"""The overhead of the flight recorder, the watchdog and `MPICOMM_ON_TIMEOUT=raise`.

Run it with `mpirun -n 2 python -m tests.failures.overhead`.

Rank 0 writes docs/results/overhead-<ranks>-<MPI>.json.

Rounds with and without them alternate in one run, because the machine is noisy; the figures are medians of the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import mpicomm
from mpicomm.backend.executor import Executor
from mpicomm.watchdog import agent, flight_recorder
from tests import figures as results

ROUNDS, CALLS = 101, 500


class Unrecorded:
    """A no-op replacement for a recorded operation."""

    def finish(self) -> None:
        pass


UNRECORDED = Unrecorded()
NOTE = flight_recorder.note


def main() -> None:
    """Measure, and print on rank 0."""
    world = mpicomm.bootstrap("mpi")
    figures = {}
    for count, label in ((1, "4 B"), (4_000_000, "16 MB")):
        calls = CALLS if count == 1 else 4
        rounds = ROUNDS if count == 1 else 15
        tensor = torch.zeros(count)
        figures[label] = _measure(lambda tensor=tensor: dist.all_reduce(tensor), calls, rounds)
    if world.rank == 0:
        what = "of a synchronous float32 all_reduce, medians of interleaved rounds"
        results.write(f"overhead-{world.size}", world.size, "tests.failures.overhead", what=what, microseconds=figures)


def _measure(call: Callable[[], object], calls: int, rounds: int) -> dict[str, float]:
    """Return the median microseconds of a call in each state, and of the differences to the state "off"."""
    states = {"off": _off, "on": _on, "on, timeouts raise": _on_and_raising}
    times: dict[str, list[float]] = {state: [] for state in states}
    for _ in range(rounds):
        for state, enter in states.items():
            enter()
            times[state].append(_time(call, calls))
    _on()
    figures = {state: round(statistics.median(each), 3) for state, each in times.items()}
    for state in list(states)[1:]:
        added = [one - bare for one, bare in zip(times[state], times["off"], strict=True)]
        figures[f"{state}: added"] = round(statistics.median(added), 3)
    return figures


def _time(call: Callable[[], object], calls: int) -> float:
    for _ in range(max(1, calls // 50)):
        call()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - start) / calls


def _off() -> None:
    flight_recorder.note = lambda *_arguments: UNRECORDED  # type: ignore[assignment,return-value]
    _watchdog()._next_tick = time.monotonic() + 1e6
    _executor()._raises_timeouts = False


def _on() -> None:
    flight_recorder.note = NOTE
    _watchdog()._next_tick = 0.0
    _watchdog()._channel.wake()
    _executor()._raises_timeouts = False


def _on_and_raising() -> None:
    _on()
    _executor()._raises_timeouts = True


def _watchdog() -> agent.Watchdog:
    watch = agent.current()
    assert watch is not None
    return watch


def _executor() -> Executor:
    return dist.group.WORLD._operations.executor


if __name__ == "__main__":
    main()
