"""Lightning's Fabric with DDP and FSDP2: the gradients are formulas in rank and size."""

from __future__ import annotations

import lightning
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mpicomm
from mpicomm.integrations.lightning import WorldEnvironment

RATE = 0.1


def main() -> None:
    world = mpicomm.bootstrap(timeout=120)
    sharded = ModelParallelStrategy(shard, data_parallel_size=world.size, tensor_parallel_size=1)
    for strategy in ("ddp", sharded):
        fabric = lightning.Fabric(
            accelerator="cpu",
            devices=world.local_size,
            num_nodes=world.num_nodes,
            strategy=strategy,
            plugins=[WorldEnvironment()],
        )
        fabric.launch()
        assert (fabric.global_rank, fabric.world_size, fabric.local_rank) == (world.rank, world.size, world.local_rank)
        check_step(world, fabric, is_sharded=strategy is sharded)
        check_collectives(world, fabric)
    print(f"rank {world.rank} has passed\n", end="", flush=True)


def shard(model, mesh):
    return fully_shard(model, mesh=mesh["data_parallel"])


def check_step(world, fabric, *, is_sharded):
    torch.manual_seed(0)
    model = fabric.setup(nn.Linear(4, 8))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=RATE))
    before = whole(model.weight).detach().clone()
    fabric.backward(model(torch.full((3, 4), world.rank + 1.0)).sum())
    optimizer.step()
    mean = 3 * (world.size + 1) / 2  # of the ranks' sums of three rows
    assert isinstance(model.weight, DTensor) == is_sharded
    assert not is_sharded or model.weight.to_local().numel() == 32 // world.size
    torch.testing.assert_close(whole(model.weight.grad), torch.full((8, 4), mean))
    torch.testing.assert_close(whole(model.weight).detach(), before - RATE * mean)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_collectives(world, fabric):
    rank, size = world.rank, world.size
    assert fabric.broadcast(rank, src=size - 1) == size - 1
    assert fabric.all_gather(torch.tensor(rank)).tolist() == list(range(size))
    assert fabric.all_reduce(torch.tensor(rank), reduce_op="sum").item() == size * (size - 1) // 2


if __name__ == "__main__":
    main()
