"""A job in which a rank dies at the end of a call of the trainer, after another rank has completed the call."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist

import mpicomm
from mpicomm.job import session
from mpicomm.training.trainer import Trainer


def call() -> int:
    """Return the number of recoveries; in the first world rank 2 dies, which rank 0 notices and rank 1 does not."""
    dist.barrier()
    if session.recoveries() == 0:
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 0:
            dist.barrier()
    return session.recoveries()


def main() -> None:
    mpicomm.bootstrap(on_failure="recover")
    model = torch.nn.Linear(2, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss(), on_failure="recover")
    result = trainer._run_call(call)
    print(f"the call returned in world {result}", flush=True)


if __name__ == "__main__":
    main()
