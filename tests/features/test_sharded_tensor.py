"""ShardedTensor, which chooses the device of its collectives from the devices that the backend is registered for."""

from __future__ import annotations

import pytest
import torch
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

import mpicomm

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")]


def test_gather(world: mpicomm.World) -> None:
    placements = [f"rank:{rank}/{world.device}" for rank in range(world.size)]
    whole = torch.empty(2 * world.size, 3, device=world.device) if world.rank == 0 else None
    sharded_tensor.ones(ChunkShardingSpec(0, placements), 2 * world.size, 3).gather(0, whole)
    if whole is not None:
        assert torch.equal(whole, torch.ones(2 * world.size, 3, device=world.device))
