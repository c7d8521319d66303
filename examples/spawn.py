"""Without MPI: a program that starts its own processes, on one machine.

`torch.multiprocessing.spawn` starts processes that run one function; their rendezvous is a file in a temporary
directory. This is for a notebook, a test, or a machine without MPI. It is limited to one machine, and the program
itself must set what `mpicomm.bootstrap()` would determine: the ranks, the rendezvous, and the device of each process.

The processes communicate over Gloo, or over the library of the vendor (NCCL, XCCL) if each has its own GPU. They cannot
use MPI, whose ranks are the processes that mpirun or srun has started. So under mpirun this program fails with a
message that names the remedy.

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

# Rank variables of the launchers: Open MPI, MPICH and Intel MPI, srun, torchrun.
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "RANK")


def main() -> None:
    parser = argparse.ArgumentParser(description="Start processes that sum their ranks.")
    parser.add_argument("--processes", type=int, default=4)
    size = parser.parse_args().processes
    if (name := variable_of_launcher()) is not None:
        if os.environ[name] != "0":
            return  # only rank 0 exits with a status and a message
        sys.exit(
            f"this program starts its own processes, but a launcher started it on several ranks ({name} is set).\n"
            f"Run it without mpirun, srun or torchrun: python -m mpicomm.examples.spawn"
        )
    with tempfile.TemporaryDirectory() as directory:
        # Returns when all processes have ended; if one fails, terminates the others and raises with its traceback.
        torch.multiprocessing.spawn(work, args=(size, Path(directory, "rendezvous")), nprocs=size)


def variable_of_launcher() -> str | None:
    """Return the variable with this process's rank, if a launcher started it as one of several."""
    return next((name for name in RANKS if name in os.environ), None)


def work(rank: int, size: int, file: Path) -> None:
    """Sum the ranks plus one; each process runs this."""
    device = device_of(rank, size)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=size)
    tensor = torch.full((2,), 1.0 + rank, device=device)
    dist.all_reduce(tensor)
    # One write, newline included, so that the lines of several processes do not mix.
    print(f"rank {rank} of {size}: {device}, {backend}, sum {tensor[0]:.0f}\n", end="", flush=True)
    dist.destroy_process_group()


def device_of(rank: int, size: int) -> torch.device:
    """Return a GPU for this process alone if there are enough GPUs for all processes, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or torch.accelerator.device_count() < size:
        return torch.device("cpu")
    if not dist.is_backend_available(dist.get_default_backend_for_device(accelerator)):
        return torch.device("cpu")
    torch.accelerator.set_device_index(rank)
    return torch.device(accelerator.type, rank)


if __name__ == "__main__":
    main()
