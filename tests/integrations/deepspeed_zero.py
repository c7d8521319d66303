"""DeepSpeed's ZeRO-1 after bootstrap(): it learns, and each rank holds a part of the optimizer's parameters."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import mpicomm
from mpicomm.examples import ddp

CONFIG = {
    "train_micro_batch_size_per_gpu": ddp.BATCH_SIZE,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 0.002, "torch_adam": True}},
}
EPOCHS = 20


def main() -> None:
    world = mpicomm.bootstrap(timeout=300)  # DeepSpeed compiles its shared-memory library the first time
    train_set, test_set = ddp.load_digits()
    torch.manual_seed(ddp.SEED)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    engine, optimizer, loader, _ = deepspeed.initialize(
        model=network, model_parameters=network.parameters(), training_data=train_set, config=CONFIG
    )
    for _ in range(EPOCHS):
        for x, y in loader:
            engine.backward(nn.functional.cross_entropy(engine(x), y))
            engine.step()
    held = sum(each.numel() for group in optimizer.optimizer.param_groups for each in group["params"])
    whole = sum(each.numel() for each in network.parameters())
    assert whole / world.size <= held < 1.1 * whole / world.size, (held, whole)  # padded to equal parts
    accuracy, identical = ddp.evaluate(world, network, test_set), ddp.parameters_are_identical(world, network)
    if world.rank == 0:
        print(f"ZeRO stage {engine.zero_optimization_stage()} on {world.size} ranks, backend {dist.get_backend()}")
        print(f"test accuracy {accuracy:.1%} of {len(test_set)} images")
        print(f"parameters {'identical' if identical else 'DIFFERENT'} on all ranks", flush=True)


if __name__ == "__main__":
    main()
