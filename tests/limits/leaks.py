"""Memory does not grow: `mpirun -n 4 python -m tests.limits.leaks` runs thousands of operations and groups."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import mpicomm

OPERATIONS, GROUPS, ROUNDS = 10_000, 3_000, 5
ALLOWED = 4.0  # MiB that the last three rounds may add: the memory of Python and malloc varies slightly


def resident() -> float:
    """Return the memory of this process in MiB, after a garbage collection."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def some_operations(count: int, seed: int) -> None:
    """Call operations of all kinds, in the same order on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    order = random.Random(seed)
    for _ in range(count):
        kind, elements = order.randrange(12), order.choice([1, 100, 10_000])
        is_async, dtype = order.random() < 0.5, order.choice([torch.float32, torch.bfloat16, torch.int64])
        work = _call(kind, torch.ones(elements, dtype=dtype), is_async, rank, size)
        if is_async and work is not None and order.random() < 0.9:  # the other Work objects are dropped without wait()
            work.wait()


def _call(kind: int, tensor: torch.Tensor, is_async: bool, rank: int, size: int) -> dist.Work | None:
    right, left = (rank + 1) % size, (rank - 1) % size
    many = tensor.repeat(size)
    calls: list[Callable[[], dist.Work | None]] = [
        lambda: dist.all_reduce(tensor, async_op=is_async),
        lambda: dist.all_reduce(many[::size], dist.ReduceOp.MAX, async_op=is_async),
        lambda: dist.broadcast(tensor, size - 1, async_op=is_async),
        lambda: dist.reduce(tensor, 0, async_op=is_async),
        lambda: dist.all_gather(list(many.chunk(size)), tensor, async_op=is_async),
        lambda: dist.all_gather_single(many, tensor, async_op=is_async),
        lambda: dist.reduce_scatter_single(tensor, many, async_op=is_async),
        lambda: dist.all_to_all_single(many.clone(), many, async_op=is_async),
        lambda: dist.gather(tensor, list(many.chunk(size)) if rank == 0 else None, async_op=is_async),
        lambda: dist.scatter(tensor, list(many.chunk(size)) if rank == 0 else None, async_op=is_async),
        lambda: dist.barrier(async_op=is_async),
        lambda: _ring(tensor, right, left),
    ]
    return calls[kind]()


def _ring(tensor: torch.Tensor, right: int, left: int) -> None:
    if right == dist.get_rank():
        return
    works = [dist.isend(tensor, right), dist.irecv(torch.empty_like(tensor), left)]
    works[0].get_future()
    for work in works:
        work.wait()


def some_groups(count: int) -> None:
    """Create groups, use them and destroy them."""
    everyone = list(range(dist.get_world_size()))
    for number in range(count):
        group = dist.new_group(everyone)
        dist.all_reduce(torch.ones(1), group=group, async_op=number % 2 == 1)
        dist.destroy_process_group(group)


def watch(title: str, count: int, run: Callable[[int], None]) -> None:
    """Run in rounds, and end the job if memory grows after the second round."""
    start = time.monotonic()
    sizes = []
    for round_ in range(ROUNDS):
        run(round_)
        sizes.append(resident())
    grown = sizes[-1] - sizes[1]
    if dist.get_rank() == 0:
        seen = ", ".join(f"{size:.1f}" for size in sizes)
        print(f"{count} {title}: {seen} MiB after each of {ROUNDS} rounds; {time.monotonic() - start:.0f} s")
    if grown > ALLOWED:
        raise SystemExit(f"rank {dist.get_rank()}: memory grew by {grown:.1f} MiB in {ROUNDS - 2} rounds of {title}")


def main() -> None:
    with mpicomm.bootstrap("mpi"):
        watch("operations", OPERATIONS, lambda round_: some_operations(OPERATIONS // ROUNDS, round_))
        watch("groups", GROUPS, lambda _: some_groups(GROUPS // ROUNDS))


if __name__ == "__main__":
    main()
