"""A rank of the job of mpicomm: `mpicomm run --fault-tolerant -m benchmarks.recovery_peers.mpicomm_rank DIR LIMIT`.

DIR is the directory of the logs, LIMIT the number of seconds after which the rank is terminated.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpicomm
from benchmarks.recovery_peers.step_log import StepLog, make_network, take_step
from mpicomm.examples.fault_tolerant import newest_state


def main() -> None:
    """Train until the benchmark terminates the job."""
    world = mpicomm.bootstrap("mpi", on_failure="recover")
    log = StepLog(Path(sys.argv[1]), world.rank, int(sys.argv[2]))
    network, optimizer = make_network()
    model: nn.Module | None = None
    step, received = 0, False
    while True:
        try:
            if model is None:  # at the start and after a recovery
                newest = newest_state(network, optimizer, step)
                received, step = newest > step, newest
                model = DistributedDataParallel(network)
            take_step(model, optimizer)
            step += 1
            log.write(step=step, size=world.size, applied=True, received=received)
            received = False
        except mpicomm.RankFailedError:
            log.write(step=step, size=world.size, applied=False, received=False)
            model = None
            world = mpicomm.recover()


if __name__ == "__main__":
    main()
