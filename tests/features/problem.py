"""A small regression problem: each rank has its own samples, and one process can train on the samples of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

import mpicomm

FEATURES, BATCH = 12, 4  # samples per rank and step
SMALL_BUCKETS = 1e-4  # DDP's bucket_cap_mb: a bucket for nearly every parameter
RATE, MOMENTUM = 0.05, 0.9


class Weight(torch.nn.Module):
    """A parameter whose gradient is the input."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(numbers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.weight * inputs).sum()


def numbers_of(rank: int) -> torch.Tensor:
    """Return numbers from 1 to 16: after rounding to fp16 or bfloat16, their float32 sum is exact in any order."""
    return 1 + 15 * torch.rand(1000, generator=torch.Generator().manual_seed(rank))


def dense_model() -> torch.nn.Module:
    """Return a float64 network with equal parameters on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    ).double()


def batches(world: mpicomm.World, steps: int) -> torch.Tensor:
    """Return the samples of all ranks, equal on all ranks: (steps, size, BATCH, FEATURES)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(steps, world.size, BATCH, FEATURES, generator=generator, dtype=torch.float64)


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, *arguments: int) -> torch.Tensor:
    return (model(inputs, *arguments) - inputs.sum(-1, keepdim=True)).pow(2).mean()


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: torch.Tensor) -> None:
    for samples in steps:
        optimizer.zero_grad()
        loss_of(model, samples).backward()
        optimizer.step()


def train_alone(model: torch.nn.Module, data: torch.Tensor) -> None:
    """Train on the samples of all ranks in one process."""
    train(model, sgd(model), data.flatten(1, 2))


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def assert_identical_on_all_ranks(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    for parameter in model.parameters():
        copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size(group))]
        dist.all_gather(copies, parameter.detach(), group=group)
        assert all(torch.equal(copy, copies[0]) for copy in copies)
