"""ZeroRedundancyOptimizer shards the optimizer state over the ranks: its updates equal those of the plain optimizer."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import mpicomm
from tests.features.problem import (
    SMALL_BUCKETS,
    assert_identical_on_all_ranks,
    assert_same,
    batches,
    dense_model,
    loss_of,
    train,
)

STEPS = 4
ADAM = {"lr": 0.01, "weight_decay": 0.1}
UPDATES_MISSED = 2  # overlapping starts after DDP has rebuilt its buckets and the optimizer has recorded them


@pytest.mark.filterwarnings("ignore:.*TorchScript:DeprecationWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("shard_buckets", [False, True], ids=["whole-buckets", "split-buckets"])
@pytest.mark.parametrize("hook", [hook_with_zero_step, hook_with_zero_step_interleaved])
def test_updates_during_the_backward_pass(world: mpicomm.World, hook: Callable, shard_buckets: bool) -> None:
    """Each rank updates its buckets and broadcasts them in DDP's hook; if interleaved, in callbacks of the reductions.

    Rank 0 delays each gradient: its callbacks run before it starts the next reduction, those of other ranks afterwards.
    """
    if "requires NCCL" in " ".join(inspect.getsource(hook).replace('"', "").split()):
        pytest.skip("torch's hook is for NCCL alone")
    data = batches(world, UPDATES_MISSED + STEPS)
    model = dense_model()
    alone = copy.deepcopy(model)
    train(alone, torch.optim.AdamW(alone.parameters(), **ADAM), data[UPDATES_MISSED:].flatten(1, 2))

    parallel = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS)
    optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAM)
    parallel.register_comm_hook(None, hook(allreduce_hook, parallel, optimizer, shard_buckets))
    for parameter in parallel.parameters():
        parameter.register_hook(lambda _gradient: time.sleep(0.005 * (world.rank == 0)))
    for samples in data[:, world.rank]:
        parallel.zero_grad()
        loss_of(parallel, samples).backward()
    assert_same(model, alone)
    assert_identical_on_all_ranks(model)
