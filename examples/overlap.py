"""Overlap of communication and computation: an asynchronous all_reduce during matrix products.

`dist.all_reduce(tensor, async_op=True)` returns at once, and the ranks compute before they call `wait()`. The hidden
part of the communication is measured by the method of the OSU benchmarks: the communication alone, then about as much
computation alone, then both together, and

    hidden = 1 - (together - computation) / communication, and not less than 0

Communication over MPI runs on the progress thread of the rank: it needs an idle core, or a GPU that computes instead of
the core. Below, four ranks share two cores and hide nothing: both together take longer than one after the other. Where
each rank can have two cores, OMP_NUM_THREADS=1 leaves one of them free, and Open MPI assigns them with
`mpirun -n 4 --map-by slot:PE=2`.

    $ mpirun -n 4 python -m mpicomm.examples.overlap
    communication     21.42 ms
    computation       17.11 ms
    both              58.56 ms
    hidden             0.0%
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import mpicomm

COUNT = 4 * 1024 * 1024  # elements of float32, 16 MiB
WIDTH = 384  # rows and columns of the matrices
TRIES = 3


def main() -> None:
    world = mpicomm.bootstrap()
    if world.size == 1:
        print("needs 2 ranks or more, got 1; start with `mpirun -n 4 python -m mpicomm.examples.overlap`", flush=True)
        return
    tensor = torch.zeros(COUNT, device=world.device)
    matrix = torch.full((WIDTH, WIDTH), 1 / WIDTH, device=world.device)  # all of its powers are equal

    communication = milliseconds(world, lambda: dist.all_reduce(tensor))
    product = milliseconds(world, lambda: compute(matrix, 10)) / 10
    products = max(1, round(communication / product))  # the same number on all ranks, since the times are
    computation = milliseconds(world, lambda: compute(matrix, products))
    together = milliseconds(world, lambda: compute_while_communicating(tensor, matrix, products))

    if world.rank == 0:
        print(f"communication  {communication:8.2f} ms")
        print(f"computation    {computation:8.2f} ms")
        print(f"both           {together:8.2f} ms")
        print(f"hidden         {hidden(communication, computation, together):8.1%}", flush=True)


def compute_while_communicating(tensor: torch.Tensor, matrix: torch.Tensor, products: int) -> None:
    """Start an all_reduce, compute, and then wait for it (collective)."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None  # it is None only on a rank outside the group
    compute(matrix, products)  # do not use `tensor` before wait() returns
    work.wait()


def compute(matrix: torch.Tensor, products: int) -> None:
    result = matrix
    for _ in range(products):
        result = result @ matrix


def hidden(communication: float, computation: float, together: float) -> float:
    """Return the hidden part of the communication, from 0 to 1."""
    return max(0.0, 1 - (together - computation) / communication)


def milliseconds(world: mpicomm.World, action: Callable[[], object]) -> float:
    """Return the milliseconds of the action on the slowest rank, the minimum of several tries (collective)."""
    times = torch.empty(TRIES, device=world.device)
    for number in range(TRIES):
        dist.barrier()
        start = time.perf_counter()
        action()
        if world.device.type != "cpu":
            torch.accelerator.synchronize()  # calls on a GPU are asynchronous
        times[number] = 1000 * (time.perf_counter() - start)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.min().item()


if __name__ == "__main__":
    main()
