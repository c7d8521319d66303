"""The overhead of the watchdog and `MPICOMM_ON_TIMEOUT=raise` in an all_reduce.

`mpirun -n 2 python -m benchmarks.watchdog_overhead` measures it; rank 0 writes
docs/results/overhead-<ranks>-<MPI>.json.

Rounds with and without them alternate in one run, because the machine is noisy; the figures are medians of the rounds.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import mpicomm
from benchmarks import rank_results
from mpicomm.bench import timing
from mpicomm.bench.timing import Bench, Timed
from mpicomm.watchdog import agent

ROUNDS = {1: 101, 4_000_000: 15}  # by the number of elements
SECONDS = 0.01  # of a round


def main() -> None:
    """Measure, and write the results on rank 0."""
    world = mpicomm.bootstrap("mpi")
    figures = {}
    for count, label in ((1, "4 B"), (4_000_000, "16 MB")):
        bench = timing.on_ranks_of(world, ROUNDS[count], seconds=SECONDS)
        figures[label] = _measure(functools.partial(dist.all_reduce, torch.zeros(count)), bench)
    if world.rank == 0:
        what = "a synchronous float32 all_reduce, a sum of zeros; medians of interleaved rounds"
        rank_results.write(f"overhead-{world.size}", world.size, what, microseconds=figures)


def _measure(call: Callable[[], object], bench: Bench) -> dict[str, float]:
    """Return the median microseconds of a call in each state, and of the differences to the state "off"."""
    states = {"off": _off, "on": _on, "on, timeouts raise": _on_and_raising}
    timed = {state: Timed(call, before_round=enter) for state, enter in states.items()}
    found = timing.in_turn(bench, timed, times_calls=False)
    _on()
    figures = {state: round(each.median, 3) for state, each in found.items()}
    times = {state: each.rounds for state, each in found.items()}
    for state in list(states)[1:]:
        added = [one - bare for one, bare in zip(times[state], times["off"], strict=True)]
        figures[f"{state}: added"] = round(statistics.median(added), 3)
    return figures


def _off() -> None:
    _watchdog()._next_tick = time.monotonic() + 1e6
    _raise_timeouts(False)


def _on() -> None:
    _watchdog()._next_tick = 0.0
    _watchdog()._channel.wake()
    _raise_timeouts(False)


def _on_and_raising() -> None:
    _on()
    _raise_timeouts(True)


def _raise_timeouts(raises: bool) -> None:
    group: Any = dist.group.WORLD
    plain = _plain_calls(group)
    group._executor._state.raises_timeouts, group._plain = raises, None if raises else plain


@functools.cache
def _plain_calls(group: Any) -> Any:
    return group._plain


def _watchdog() -> agent.Watchdog:
    watch = agent.current()
    assert watch is not None
    return watch


if __name__ == "__main__":
    main()
