"""The ring algorithm of all_reduce, implemented with isend and irecv, in comparison with `dist.all_reduce`.

Every rank splits its tensor into as many chunks as there are ranks, and communicates only with its two neighbours: it
sends to the next rank and receives from the previous one. In size - 1 steps the chunks pass around the ring, and each
rank adds its own chunk to the received one (reduce-scatter); then every rank has one chunk of the sum. In size - 1 more
steps these chunks pass around (all-gather). So a rank sends 2 (size - 1) / size of its tensor: less than two tensors on
any number of ranks, which is optimal (Patarasuk and Yuan, 2009). The cost is the number of steps, which is why MPI
selects other algorithms for small tensors.

The times are those of the slowest rank, the minimum of several tries. They are not meaningful if there are more ranks
than cores.

    $ mpirun -n 4 python -m mpicomm.examples.ring_all_reduce
    4 ranks, 6 steps in the ring
        1,000 elements: equal; ring    4.166 ms, all_reduce    0.528 ms
      100,003 elements: equal; ring    4.465 ms, all_reduce    0.970 ms
    4,000,000 elements: equal; ring   35.394 ms, all_reduce   27.641 ms
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import mpicomm

COUNTS = (1_000, 100_003, 4_000_000)  # elements of float32; 100,003 does not divide evenly
TRIES = 5


def main() -> None:
    world = mpicomm.bootstrap()
    if world.size == 1:
        print(
            "needs 2 ranks or more, got 1; start with `mpirun -n 4 python -m mpicomm.examples.ring_all_reduce`",
            flush=True,
        )
        return
    if world.rank == 0:
        print(f"{world.size} ranks, {2 * (world.size - 1)} steps in the ring", flush=True)
    for count in COUNTS:
        mine = numbers(world, count)
        by_hand, by_library = mine.clone(), mine.clone()
        ring_all_reduce(world, by_hand)
        dist.all_reduce(by_library)
        assert torch.equal(by_hand, by_library), "the ring's sum differs from that of all_reduce"

        ring = milliseconds(world, functools.partial(ring_all_reduce, world, mine.clone()))
        library = milliseconds(world, functools.partial(dist.all_reduce, mine.clone()))
        if world.rank == 0:
            print(f"{count:9,} elements: equal; ring {ring:8.3f} ms, all_reduce {library:8.3f} ms", flush=True)


def ring_all_reduce(world: mpicomm.World, tensor: torch.Tensor) -> None:
    """Replace a contiguous tensor by its sum over the ranks (collective)."""
    chunks = tensor.view(-1).tensor_split(world.size)  # views of the tensor, no copies

    def chunk(number: int) -> torch.Tensor:
        return chunks[number % world.size]

    for step in range(world.size - 1):  # reduce-scatter
        mine = chunk(world.rank - step - 1)
        arrived = torch.empty_like(mine)
        pass_on(world, chunk(world.rank - step), arrived)
        mine += arrived
    # This rank now has the sum of the next rank's chunk.
    for step in range(world.size - 1):  # all-gather
        pass_on(world, chunk(world.rank - step + 1), chunk(world.rank - step))


def pass_on(world: mpicomm.World, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Send a tensor to the next rank and receive one from the previous rank."""
    # As a batch, because NCCL executes single messages in the order of the calls, and all ranks would send first.
    messages = [
        dist.P2POp(dist.isend, outgoing, (world.rank + 1) % world.size),
        dist.P2POp(dist.irecv, incoming, (world.rank - 1) % world.size),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def numbers(world: mpicomm.World, count: int) -> torch.Tensor:
    """Return this rank's tensor: integers, whose sum is exact in any order of summation."""
    generator = torch.Generator().manual_seed(world.rank)
    return torch.randint(-100, 100, (count,), generator=generator).float().to(world.device)


def milliseconds(world: mpicomm.World, operation: Callable[[], object]) -> float:
    """Return the milliseconds of the operation on the slowest rank, the minimum of several tries (collective)."""
    times = torch.empty(TRIES, device=world.device)
    for number in range(TRIES):
        dist.barrier()
        start = time.perf_counter()
        operation()
        if world.device.type != "cpu":
            torch.accelerator.synchronize()  # calls on a GPU are asynchronous
        times[number] = 1000 * (time.perf_counter() - start)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.min().item()


if __name__ == "__main__":
    main()
