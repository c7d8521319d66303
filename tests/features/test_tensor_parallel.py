"""Tensor parallelism on the backend: outputs and gradients equal those of the plain module."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import mpicomm

FEATURES, HIDDEN = 12, 24  # divisible by 1, 2, 3 and 4 ranks
BATCH, LENGTH = 2, 12
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


class Block(torch.nn.Module):
    """A layer norm and a feed-forward network with a residual connection, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(FEATURES)
        self.widen = torch.nn.Linear(FEATURES, HIDDEN)
        self.narrow = torch.nn.Linear(HIDDEN, FEATURES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.narrow(torch.nn.functional.gelu(self.widen(self.norm(inputs))))


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block().double()


def numbers(*shape: int) -> torch.Tensor:
    """Return numbers that are equal on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def assert_same_gradients(mine: torch.nn.Module, plain: torch.nn.Module) -> None:
    for parameter, expected in zip(mine.parameters(), plain.parameters(), strict=True):
        gradient = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(whole, expected.grad, **CLOSE)


def test_a_sequence_in_parts(mesh: dist.DeviceMesh, block: Block) -> None:
    """The norm processes shards of the sequence; the network processes all of it with shards of its weights."""
    plan = {
        "norm": SequenceParallel(),
        "widen": ColwiseParallel(input_layouts=Shard(1)),
        "narrow": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallel = parallelize_module(copy.deepcopy(block), mesh, plan)
    inputs = numbers(BATCH, LENGTH, FEATURES)
    output, expected = parallel(distribute_tensor(inputs, mesh, [Shard(1)])), block(inputs)
    assert list(output.placements) == [Shard(1)]
    torch.testing.assert_close(output.full_tensor(), expected, **CLOSE)
    output.pow(2).sum().full_tensor().backward()
    expected.pow(2).sum().backward()
    assert_same_gradients(parallel, block)


@pytest.mark.mpi(min_size=2)
def test_with_sharded_data_parallelism(world: mpicomm.World, block: Block) -> None:
    """Each pair of ranks shards the weights by rows and columns; FSDP shards them further across the pairs.

    The pairs train on different samples.
    """
    if world.size % 2:
        pytest.skip("needs pairs of ranks")
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("data", "tensor"))
    parallel = copy.deepcopy(block)
    parallelize_module(parallel, mesh["tensor"], {"widen": ColwiseParallel(), "narrow": RowwiseParallel()})
    fully_shard([parallel.widen, parallel.narrow], mesh=mesh["data"])
    fully_shard(parallel, mesh=mesh["data"])
    data = numbers(world.size // 2, BATCH, FEATURES)

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (parallel, block)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        parallel(data[mesh["data"].get_local_rank()]).pow(2).mean().backward()
        block(data.flatten(0, 1)).pow(2).mean().backward()
        assert_same_gradients(parallel, block)
        for optimizer in optimizers:
            optimizer.step()
    for parameter, expected in zip(parallel.parameters(), block.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected, **CLOSE)
