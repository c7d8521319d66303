"""Without MPI: a program that starts its own processes, on one machine.

`torch.multiprocessing.spawn` starts processes that run one function, and they meet in a file of a temporary directory.
One does so in a notebook, in a test, or where there is no MPI. It ends at the edge of the machine; and the program says
itself what `mpicomm.bootstrap()` would find out: who is who, where they meet, and who has which device.

The processes talk over Gloo, or over NCCL where each has a GPU of its own. MPI is of no use to them: its ranks are the
processes that mpirun or srun has started. So under mpirun this program fails, and says what to do.

    $ python -m mpicomm.examples.spawn
    rank 0 of 4: cpu, gloo, sum 10
    rank 3 of 4: cpu, gloo, sum 10
    rank 1 of 4: cpu, gloo, sum 10
    rank 2 of 4: cpu, gloo, sum 10
    $ mpirun -n 4 python -m mpicomm.examples.spawn
    this program starts its own processes, but a launcher started it on several ranks (OMPI_COMM_WORLD_RANK is set).
    Run it without mpirun, srun or torchrun: python -m mpicomm.examples.spawn
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

# By these launchers tell their processes the rank: Open MPI's, that of MPICH and Intel MPI, srun, torchrun.
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "RANK")


def main() -> None:
    parser = argparse.ArgumentParser(description="Start processes that sum their ranks.")
    parser.add_argument("--processes", type=int, default=4)
    size = parser.parse_args().processes
    if (name := variable_of_launcher()) is not None:
        if os.environ[name] != "0":
            return  # rank 0's status and message are the job's
        sys.exit(
            f"this program starts its own processes, but a launcher started it on several ranks ({name} is set).\n"
            f"Run it without mpirun, srun or torchrun: python -m mpicomm.examples.spawn"
        )
    with tempfile.TemporaryDirectory() as directory:
        # Returns when all have ended; raises with the traceback of the first that fails, and ends the others.
        torch.multiprocessing.spawn(work, args=(size, Path(directory, "rendezvous")), nprocs=size)


def variable_of_launcher() -> str | None:
    """Return the variable that holds this process's rank, if a launcher started it as one of several."""
    return next((name for name in RANKS if name in os.environ), None)


def work(rank: int, size: int, file: Path) -> None:
    """Sum the ranks plus one; each process runs this."""
    device = device_of(rank, size)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=size)
    tensor = torch.full((2,), 1.0 + rank, device=device)
    dist.all_reduce(tensor)
    # One write, newline included, so that the lines of several processes do not mix.
    print(f"rank {rank} of {size}: {device}, {backend}, sum {tensor[0]:.0f}\n", end="", flush=True)
    dist.destroy_process_group()


def device_of(rank: int, size: int) -> torch.device:
    """Return a GPU of the process's own, if there are enough for all."""
    if dist.is_nccl_available() and torch.cuda.device_count() >= size:
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    return torch.device("cpu")


if __name__ == "__main__":
    main()
