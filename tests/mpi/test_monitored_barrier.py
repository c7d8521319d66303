"""torch's monitored barrier if one rank is late at two consecutive barriers."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

import mpicomm

SHORT = datetime.timedelta(seconds=0.1)


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
