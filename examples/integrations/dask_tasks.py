"""Dask on the ranks of the job: rank 0 submits a graph of tasks, the other ranks run them.

`mpicomm.integrations.dask.cluster` starts the scheduler on rank 0 and a worker on each other rank. The tasks estimate
pi from random points, and add the estimates up in a tree. With `torchrun`, the same program needs no MPI.

    $ mpirun -n 4 python -m mpicomm.examples.integrations.dask_tasks
    workers: ranks 1, 2, 3
    pi is about 3.145, from 64 tasks
    $ torchrun --nproc-per-node 2 examples/integrations/dask_tasks.py
    workers: ranks 1
    pi is about 3.145, from 64 tasks
"""

from __future__ import annotations

import numpy as np
from distributed import Client

import mpicomm
from mpicomm.integrations.dask import cluster

TASKS, POINTS = 64, 20_000


def main() -> None:
    world = mpicomm.bootstrap()
    with cluster(world) as client:
        if client is not None:  # on rank 0
            drive(client)


def drive(client: Client) -> None:
    """Submit the tasks, and print the result."""
    names = sorted(int(info["name"]) for info in client.scheduler_info(n_workers=-1)["workers"].values())
    print(f"workers: ranks {', '.join(map(str, names))}", flush=True)
    counts = client.map(points_in_circle, range(TASKS))
    while len(counts) > 1:
        counts = client.map(lambda left, right: left + right, counts[::2], counts[1::2])
    estimate = 4 * counts[0].result() / (TASKS * POINTS)
    print(f"pi is about {estimate:.3f}, from {TASKS} tasks", flush=True)
    assert abs(estimate - np.pi) < 0.01


def points_in_circle(seed: int) -> int:
    """Return how many random points of the unit square are in the unit circle."""
    points = np.random.default_rng(seed).random((POINTS, 2))
    return int((np.square(points).sum(axis=1) < 1).sum())


if __name__ == "__main__":
    main()
