"""torch's monitored barrier if a rank is late."""

from __future__ import annotations

import datetime
import threading
import time

import pytest
import torch
import torch.distributed as dist

import mpicomm

LONG, SHORT = datetime.timedelta(seconds=60), datetime.timedelta(seconds=0.1)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_was_late_is_missing_at_the_next(world: mpicomm.World) -> None:
    group = dist.new_group(list(range(world.size)))
    for _ in range(2):
        if world.rank == 0:
            with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
                group.monitored_barrier(SHORT)
        elif world.rank > 1:
            with pytest.raises(RuntimeError, match=f"Rank {world.rank} successfully reached monitoredBarrier"):
                group.monitored_barrier(SHORT)
        dist.barrier()
        if world.rank == 1:  # rank 0 no longer waits for it
            with pytest.raises(RuntimeError, match="Rank 1 successfully reached monitoredBarrier"):
                group.monitored_barrier(SHORT)
        dist.barrier()
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == world.size
    dist.destroy_process_group(group)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_waits_notices_the_last_one_soon(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, this_thread, pauses = time.sleep, threading.get_ident(), []

    def record(seconds: float) -> None:
        if threading.get_ident() == this_thread:
            pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", record)
    dist.barrier()
    pauses.clear()
    if world.rank == world.size - 1:
        sleep(0.2)
    dist.group.WORLD.monitored_barrier(LONG)
    assert max(pauses, default=0) <= 1e-3
