"""DistributedDataParallel on the back end gives the gradients of the same computation in one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpicomm

FEATURES, BATCH = 12, 4  # samples per rank


class Branches(torch.nn.Module):
    """A network with a branch that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(FEATURES, 16)
        self.branches = torch.nn.ModuleList([torch.nn.Linear(16, 1), torch.nn.Linear(16, 1)])

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](torch.tanh(self.trunk(inputs)))


def dense_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    ).double()


def batches(world: mpicomm.World, steps: int) -> torch.Tensor:
    """Return the samples of all ranks, the same on all: (steps, size, BATCH, FEATURES)."""
    generator = torch.manual_seed(1)
    return torch.randn(steps, world.size, BATCH, FEATURES, generator=generator, dtype=torch.float64)


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, *arguments: int) -> torch.Tensor:
    return (model(inputs, *arguments) - inputs.sum(-1, keepdim=True)).pow(2).mean()


def train_alone(model: torch.nn.Module, data: torch.Tensor) -> None:
    """Train on everybody's samples in one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in data:
        optimizer.zero_grad()
        loss_of(model, step.flatten(0, 1)).backward()
        optimizer.step()


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def assert_identical_on_all_ranks(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, parameter.detach())
        assert all(torch.equal(copy_, copies[0]) for copy_ in copies)


@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
    ids=["plain", "many-buckets", "bucket-views", "static-graph"],
)
def test_training_equals_training_alone(world: mpicomm.World, options: dict) -> None:
    data = batches(world, steps=5)
    model = dense_model()
    alone = copy.deepcopy(model)
    train_alone(alone, data)

    parallel = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
    for step in data:
        optimizer.zero_grad()
        loss_of(parallel, step[world.rank]).backward()
        optimizer.step()
    assert_same(model, alone)
    assert_identical_on_all_ranks(model)


def test_the_start_is_rank_0s(world: mpicomm.World) -> None:
    torch.manual_seed(world.rank)
    parallel = DistributedDataParallel(torch.nn.Linear(3, 3))
    torch.manual_seed(0)
    expected = torch.nn.Linear(3, 3)
    assert torch.equal(parallel.module.weight, expected.weight)


def test_no_sync_accumulates(world: mpicomm.World) -> None:
    data = batches(world, steps=2)
    alone = dense_model()
    for step in data:
        loss_of(alone, step.flatten(0, 1)).backward()

    parallel = DistributedDataParallel(dense_model())
    with parallel.no_sync():
        loss_of(parallel, data[0, world.rank]).backward()
    loss_of(parallel, data[1, world.rank]).backward()
    for mine, theirs in zip(parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-11)


def test_unused_parameters(world: mpicomm.World) -> None:
    """Every rank leaves out another branch, and its gradient is the mean over those that used it and zeros."""
    torch.manual_seed(0)
    model = Branches().double()
    alone = copy.deepcopy(model)
    data = batches(world, steps=1)[0]
    sum(loss_of(alone, data[rank], rank % 2) for rank in range(world.size)).backward()

    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    loss_of(parallel, data[world.rank], world.rank % 2).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        if theirs.grad is not None:  # with one rank, the branch that nobody used
            torch.testing.assert_close(mine.grad, theirs.grad / world.size, rtol=1e-9, atol=1e-11)


def test_buffers_follow_rank_0(world: mpicomm.World) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.BatchNorm1d(8)).double()
    parallel = DistributedDataParallel(model)
    for step in batches(world, steps=3):
        parallel(step[world.rank]).sum().backward()
    parallel(batches(world, steps=1)[0, world.rank])
    norm = model[1]
    counts = [torch.empty_like(norm.num_batches_tracked) for _ in range(world.size)]
    dist.all_gather(counts, norm.num_batches_tracked)
    assert {int(count) for count in counts} == {4}


def test_fp16_compression(world: mpicomm.World) -> None:
    data = batches(world, steps=1).float()[0]
    alone = dense_model().float()
    loss_of(alone, data.flatten(0, 1)).backward()
    parallel = DistributedDataParallel(dense_model().float())
    parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    loss_of(parallel, data[world.rank]).backward()
    for mine, theirs in zip(parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-3)


def test_powersgd(world: mpicomm.World) -> None:
    """Its hook waits for an operation inside a callback. With full rank it approximates nothing."""
    state = PowerSGDState(None, matrix_approximation_rank=64, start_powerSGD_iter=2, min_compression_rate=0.1)
    torch.manual_seed(0)
    model = torch.nn.Linear(FEATURES, 8)
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(state, powerSGD_hook)
    for step in batches(world, steps=4).float():
        parallel.zero_grad()
        parallel(step[world.rank]).pow(2).mean().backward()
    alone = copy.deepcopy(model)
    alone.zero_grad()
    alone(batches(world, steps=4).float()[3].flatten(0, 1)).pow(2).mean().backward()
    torch.testing.assert_close(model.weight.grad, alone.weight.grad, rtol=1e-2, atol=1e-3)
    assert_identical_on_all_ranks(model)


def test_fully_sharded(world: mpicomm.World) -> None:
    """FSDP2 gathers its parameters in place, and reduces by AVG."""
    data = batches(world, steps=3)
    model = dense_model()
    alone = copy.deepcopy(model)
    mesh = dist.init_device_mesh("cpu", (world.size,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in data:
        optimizer.zero_grad()
        loss_of(model, step[world.rank]).backward()
        optimizer.step()
    train_alone(alone, data)
    for sharded, whole in zip(model.parameters(), alone.parameters(), strict=True):
        shards = whole.detach().chunk(world.size)
        expected = shards[world.rank] if world.rank < len(shards) else whole.detach()[:0]
        torch.testing.assert_close(sharded.to_local(), expected, rtol=1e-9, atol=1e-11)


def test_on_a_part_of_the_world(world: mpicomm.World) -> None:
    evens = [rank for rank in range(world.size) if rank % 2 == 0]
    group = dist.new_group(evens)
    if world.rank in evens:
        parallel = DistributedDataParallel(dense_model(), process_group=group)
        loss_of(parallel, batches(world, steps=1)[0, world.rank]).backward()
        gradient = parallel.module[0].weight.grad
        gathered = [torch.empty_like(gradient) for _ in evens]
        dist.all_gather(gathered, gradient, group=group)
        assert all(torch.equal(each, gradient) for each in gathered)
        dist.destroy_process_group(group)
