"""The delay of another rank by a rank that holds the GIL: `mpirun -n 2 --bind-to core python -m benchmarks.gil`.

Rank 0 starts an all_reduce and runs a loop in pure Python before it waits; rank 1 waits at once. The figures are the
times of rank 1. Rank 0 writes docs/results/gil-<ranks>-<MPI>.json, or the file of the option --json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist

import mpicomm
from benchmarks import rank_results
from mpicomm.bench import overlap, timing
from mpicomm.bench.timing import Bench, Timed

ROUNDS = 15
BYTES = 2**24
LOOP_MS = 28
WITH_LOOP, ALONE = "with the loop", "alone"


def main() -> None:
    """Measure, and write the results on rank 0."""
    arguments = rank_results.options("benchmarks.gil", __doc__, ROUNDS)
    torch.set_num_threads(1)
    with mpicomm.bootstrap("mpi") as world:
        gloo = dist.new_group(backend="gloo")
        found = measure({"mpicomm": dist.group.WORLD, "Gloo": gloo}, timing.on_ranks_of(world, arguments.rounds))
        dist.destroy_process_group(gloo)
    if world.rank == 0:
        what = f"milliseconds of a {BYTES >> 20} MiB all_reduce on rank 1 while rank 0 runs a loop of {LOOP_MS} ms"
        rank_results.write(f"gil-{world.size}", world.size, what, arguments.json, milliseconds=found)


def measure(groups: dict[str, dist.ProcessGroup | None], bench: Bench) -> dict[str, dict[str, float]]:
    """Return the milliseconds of rank 1 with and without the loop on rank 0, and the difference (collective)."""
    tensor = torch.zeros(BYTES // 4)
    amount = overlap.amount_for(_loop, 1e3 * LOOP_MS)
    calls = {}
    for name, group in groups.items():
        calls[f"{name} {ALONE}"] = Timed(_waiting(tensor, group, 0), tensor.zero_)
        calls[f"{name} {WITH_LOOP}"] = Timed(_waiting(tensor, group, amount), tensor.zero_)
    times = timing.in_turn(of_rank_1(bench), calls)
    ms = {name: each.median / 1e3 for name, each in times.items()}  # the fastest round was lucky with the GIL
    return {name: _row(ms[f"{name} {ALONE}"], ms[f"{name} {WITH_LOOP}"]) for name in groups}


def of_rank_1(bench: Bench) -> Bench:
    """Return functions for timing that take the times of rank 1, not of the slowest rank."""
    return dataclasses.replace(bench, gather=lambda mine: bench.gather(mine)[1:2])


def _row(alone: float, waits: float) -> dict[str, float]:
    return {name: round(ms, 2) for name, ms in ((ALONE, alone), (WITH_LOOP, waits), ("longer", waits - alone))}


def _waiting(tensor: torch.Tensor, group: dist.ProcessGroup | None, amount: int) -> Callable[[], None]:
    def call() -> None:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        if dist.get_rank() == 0:
            _loop(amount)
        work.wait()

    return call


def _loop(amount: int) -> None:
    for _ in range(amount):
        pass


if __name__ == "__main__":
    main()
