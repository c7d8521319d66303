"""Tensors with more than 2^31 - 1 elements: `mpirun -n 2 python -m tests.limits.large`, with 16 GiB of memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import mpicomm

COUNT = 2_200_000_000
PERIOD = 7  # not a power of two, so that misplaced parts are detected
PATTERN = torch.arange(PERIOD, dtype=torch.int8).repeat(10_000_000)


def fill(tensor: torch.Tensor, factor: int) -> None:
    """Write a pattern that depends on the position of each element."""
    for part in tensor.split(len(PATTERN)):
        torch.mul(PATTERN[: len(part)], factor, out=part)


def is_right(tensor: torch.Tensor, factor: int) -> bool:
    expected = PATTERN * factor
    return all(torch.equal(part, expected[: len(part)]) for part in tensor.split(len(PATTERN)))


def all_reduce(world: mpicomm.World, tensor: torch.Tensor) -> int:
    fill(tensor, 1 + world.rank)
    dist.all_reduce(tensor)
    return sum(range(1, world.size + 1))


def broadcast(world: mpicomm.World, tensor: torch.Tensor) -> int:
    fill(tensor, 5 if world.rank == world.size - 1 else 1)
    dist.broadcast(tensor, world.size - 1)
    return 5


def message(world: mpicomm.World, tensor: torch.Tensor) -> int:
    if world.rank == 0:
        fill(tensor, 3)
        dist.send(tensor, world.size - 1)
    elif world.rank == world.size - 1:
        tensor.zero_()
        dist.recv(tensor, 0)
    else:
        fill(tensor, 3)
    return 3


def main() -> None:
    cases: list[Callable[[mpicomm.World, torch.Tensor], int]] = [all_reduce, broadcast, message]
    with mpicomm.bootstrap("mpi") as world:
        tensor = torch.empty(COUNT, dtype=torch.int8)
        for case in cases:
            start = time.monotonic()
            factor = case(world, tensor)
            if not is_right(tensor, factor):
                raise SystemExit(f"rank {world.rank}: {case.__name__} of {COUNT} int8 is wrong")
            dist.barrier()
            if world.rank == 0:
                print(f"{case.__name__} of {COUNT} int8 is correct on all ranks: {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
