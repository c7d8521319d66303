"""A job of 4 ranks and a spare, in which ranks die one after the other; `test_recovery` starts it and reads its output.

Each rank checks the errors and the new worlds itself. The last rank that is left prints that it has finished.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.job import recovery

MANY = 2**24  # elements of 64 MiB


def main() -> None:
    world = mpicomm.bootstrap(on_failure="recover")
    if world.recoveries == 0:
        check_world(world, 4, world.rank)
        world = rank_0_dies_in_a_large_all_reduce(world)
    # The spare joins here.
    check_world(world, 4, None if world.rank == 0 else world.rank)
    world = rank_2_dies_in_a_barrier_and_rank_3_in_the_recovery(world)
    check_world(world, 2, world.rank)
    world = rank_0_dies_in_a_backward_pass(world)
    check_world(world, 1, 1)
    print("the last rank has finished", flush=True)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def check_world(world: mpicomm.World, size: int, previous_rank: int | None) -> None:
    """Check what describes the world, and that operations work in it (collective)."""
    rank = world.rank
    assert (world.size, world.previous_rank) == (size, previous_rank)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size) == (world.comm.rank, world.comm.size)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(size))
    assert mpicomm.current_world() is world
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    assert total.item() == size * (size + 1) // 2
    assert mpicomm.all_gather_object(10 * rank) == [10 * each for each in range(size)]
    got = mpicomm.sendrecv(torch.tensor([rank]), (rank + 1) % size, (rank - 1) % size) if size > 1 else None
    assert got is None or got.item() == (rank - 1) % size
    half = dist.new_group(range((size + 1) // 2))
    if rank < (size + 1) // 2:
        dist.all_reduce(total := torch.ones(1), group=half)
        assert total.item() == (size + 1) // 2


def all_operations() -> list[Callable[[], object]]:
    """Return calls that must raise the error of a failed rank."""
    tensor = torch.ones(8)
    rank, size = dist.get_rank(), dist.get_world_size()
    return [
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_reduce(torch.ones(MANY)),
        lambda: dist.all_reduce(tensor, async_op=True).wait(),
        lambda: dist.all_reduce(tensor, async_op=True).get_future().wait(),
        lambda: dist.recv(tensor, (rank + 1) % size),
        lambda: dist.isend(torch.ones(MANY), (rank + 1) % size).wait(),
        dist.group.WORLD.monitored_barrier,
        dist.barrier,
        mpicomm.barrier,
        lambda: mpicomm.all_gather_object(rank),
        lambda: mpicomm.recv((rank + 1) % size),
        lambda: dist.new_group([0, 1, 2]) and dist.barrier(),
    ]


def rank_0_dies_in_a_large_all_reduce(world: mpicomm.World) -> mpicomm.World:
    if world.rank == 0:
        threading.Timer(0.5, die).start()
    old = dist.group.WORLD
    with pytest.raises(mpicomm.RankFailedError) as caught:
        reduce_for_ever()
    assert (caught.value.ranks, caught.value.hosts) == ((0,), (world.hosts[0],))
    assert "its process ended" in caught.value.reason
    for call in all_operations():
        with pytest.raises(mpicomm.RankFailedError, match="rank 0 of 4"):
            call()
    recovered = mpicomm.recover()
    assert recovered.recoveries == 1
    with pytest.raises(mpicomm.MpicommError, match=r"its world has ended.*\nUse the default group"):
        old.allreduce([torch.ones(1)])
    with pytest.raises(mpicomm.MpicommError, match="no rank has failed"):
        mpicomm.recover()
    assert str(world).startswith(f"rank {world.rank} of 4"), "the old World stays readable"
    return recovered


def reduce_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(MANY))


def rank_2_dies_in_a_barrier_and_rank_3_in_the_recovery(world: mpicomm.World) -> mpicomm.World:
    if world.rank == 2:
        time.sleep(0.5)  # the others are in the barrier
        die()
    if world.rank == 3:  # after the ranks that are left have agreed on rank 2
        find_survivors = recovery.find_survivors
        recovery.find_survivors = lambda *args, **options: (find_survivors(*args, **options), die())[0]
    with pytest.raises(mpicomm.RankFailedError, match="rank 2 of 4"):
        dist.barrier()
    return mpicomm.recover()


def rank_0_dies_in_a_backward_pass(world: mpicomm.World) -> mpicomm.World:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    before = [each.detach().clone() for each in model.parameters()]
    for _ in range(2):  # after the first pass, the forward pass communicates once
        model(torch.ones(2, 4)).sum().backward()
    if world.rank == 0:
        time.sleep(0.5)  # the other rank waits for the gradients
        die()
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(mpicomm.RankFailedError, match="rank 0 of 2"):
        loss.backward()
    assert all(map(torch.equal, before, model.parameters()))
    return mpicomm.recover()


if __name__ == "__main__":
    main()
