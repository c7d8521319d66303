"""A small training loop that runs for minutes: `srun -N2 python -m tests.cluster.loop BEGUN`.

Rank 0 creates the file BEGUN once every rank has completed some steps.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpicomm

STEPS = 10_000
BEGUN_AFTER = 20
SECONDS = 0.02  # pause of each step, which leaves CPU time to other jobs on this machine


def main() -> None:
    world = mpicomm.bootstrap("mpi", timeout=12)
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        time.sleep(SECONDS)
        if step == BEGUN_AFTER and world.rank == 0:
            Path(sys.argv[1]).touch()
    print("came through")


if __name__ == "__main__":
    main()
