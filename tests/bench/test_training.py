"""`mpicomm bench ddp`: the parts of a step, with communication and without."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.bench import compared_backends, training
from mpicomm.bench.timing import Bench

STRATEGIES = ("ddp", "fsdp")


@pytest.mark.mpi(min_size=2)
def test_a_step_is_measured_with_and_without_communication(world: mpicomm.World) -> None:
    bench = Bench(mpicomm.all_gather_object, dist.barrier, lambda: None, rounds=1, seconds=1e-4)
    groups = {compared_backends.OURS: dist.group.WORLD}
    groups[compared_backends.NOTHING] = compared_backends.group(compared_backends.NOTHING, world)
    cases = [("small", strategy) for strategy in STRATEGIES]
    rows = training.measure(cases, groups, bench, torch.device("cpu"))
    assert [(row.strategy, row.backend) for row in rows] == [(each, name) for each in STRATEGIES for name in groups]
    for row in rows:
        assert row.ms == pytest.approx(row.data_ms + row.compute_ms + row.communication_ms, abs=1e-3)
    dist.destroy_process_group(groups[compared_backends.NOTHING])
