"""`mpirun -n 2 --bind-to core python -m tests.load` measures the backend's overhead under load, compared with Gloo.

The figures go to docs/results/load-<ranks>-<cores of each>-<MPI>.json.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import mpicomm
from mpicomm import mpi
from tests import figures as results
from tests.load import calls, steps


def main() -> None:
    torch.set_num_threads(1)
    with mpicomm.bootstrap("mpi") as world:
        ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
        bound = mpi.job_comm().allgather(len(os.sched_getaffinity(0)))
        found = {"microseconds": calls.measure(ours, gloo), "milliseconds of a step": steps.measure(ours, gloo)}
        dist.destroy_process_group(gloo)
    if world.rank == 0:
        cores = max(bound)
        results.write(f"load-{world.size}-{cores}", world.size, "tests.load", f", {cores} for each rank", **found)


if __name__ == "__main__":
    main()
