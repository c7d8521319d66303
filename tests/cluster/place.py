"""Prints the position of each rank as a line of JSON: `srun -N2 python -m tests.cluster.place`."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

import mpicomm
from mpicomm.watchdog import agent


def main() -> None:
    world = mpicomm.bootstrap(timeout=90)
    total = torch.tensor([world.rank])
    dist.all_reduce(total)
    place = {
        "rank": world.rank,
        "size": world.size,
        "local_rank": world.local_rank,
        "local_size": world.local_size,
        "node_rank": world.node_rank,
        "num_nodes": world.num_nodes,
        "hostname": world.hostname,
        "hosts": world.hosts,
        "backend": world.backend,
        "launcher": world.launcher,
        "master_addr": world.master_addr,
        "has_mpi": world.comm is not None,
        "is_watched": agent.current() is not None,
        "sum_of_ranks": total.item(),
        "label": " ".join(sys.argv[1:]),
    }
    os.write(1, f"{json.dumps(place)}\n".encode())  # one write, so that the lines of different ranks do not interleave


if __name__ == "__main__":
    main()
