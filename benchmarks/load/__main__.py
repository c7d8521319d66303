"""The backend under load, compared with Gloo: `mpirun -n 2 --bind-to core python -m benchmarks.load`.

Rank 0 writes docs/results/load-<ranks>-<cores of each>-<MPI>.json.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import mpicomm
from benchmarks import rank_results
from benchmarks.load import calls, steps
from mpicomm import mpi
from mpicomm.bench import timing

ROUNDS = 7


def main() -> None:
    """Measure, and write the results on rank 0."""
    torch.set_num_threads(1)
    with mpicomm.bootstrap("mpi") as world:
        ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
        assert ours is not None
        cores = max(mpi.job_comm().allgather(len(os.sched_getaffinity(0))))
        bench = timing.on_ranks_of(world, ROUNDS)
        found = {
            "microseconds": calls.measure(ours, gloo, bench),
            "milliseconds of a step": steps.measure(ours, gloo, bench),
        }
        dist.destroy_process_group(gloo)
    if world.rank == 0:
        what = "all_reduce and DDP steps, the fastest round; the all_reduces are sums of zeros"
        name = f"load-{world.size}-{cores}"
        rank_results.write(name, world.size, what, **{"cores of each rank": cores}, **found)


if __name__ == "__main__":
    main()
