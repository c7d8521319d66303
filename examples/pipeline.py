"""Pipeline parallelism with one stage per rank, by PyTorch's own `torch.distributed.pipelining`.

As in `mpicomm.examples.model_parallel` each rank holds a part of the network. Here a batch is split into microbatches:
while one rank computes the second, the next rank computes the first. With p stages and m microbatches a rank is idle
(p - 1) / (m + p - 1) of the time: 3 / 11 for 4 ranks and 8 microbatches. The schedule 1F1B alternates forward and
backward steps, so no rank keeps the activations of more than p microbatches.

The gradients of a batch are the mean of those of its microbatches: the parameters equal those of a network that one
rank trains alone, to 1e-12 in float64. Only the last rank has the losses.

    $ mpirun -n 4 python -m mpicomm.examples.pipeline
    step 10: loss 0.359947
    step 20: loss 0.262429
    step 30: loss 0.200253
    step 40: loss 0.159569
    step 50: loss 0.128904
    parameters of all stages equal those of a network trained on one rank
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

import mpicomm

ROWS, WIDTH = 8, 32  # shape of a microbatch
STEPS, SEED = 50, 0


def main() -> None:
    world = mpicomm.bootstrap()
    module = network(world)[world.rank]
    train(world, module)

    for mine, same in zip(module.parameters(), trained_alone(world)[world.rank].parameters(), strict=True):
        torch.testing.assert_close(mine, same, rtol=0, atol=1e-12)
    dist.barrier()
    if world.rank == 0:
        print("parameters of all stages equal those of a network trained on one rank", flush=True)


def train(world: mpicomm.World, module: nn.Module) -> None:
    """Train this rank's stage; print the losses on the last rank (collective)."""
    stage = PipelineStage(module, world.rank, world.size, world.device)
    schedule = Schedule1F1B(stage, microbatches(world), loss_fn=mse_loss)
    optimizer = optimizer_of(module)
    inputs, targets = data(world)
    for number in range(STEPS):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []  # one per microbatch
        schedule.step(
            *([inputs] if stage.is_first else []),
            target=targets if stage.is_last else None,
            losses=losses if stage.is_last else None,
        )
        optimizer.step()
        if losses and (number + 1) % 10 == 0:
            print(f"step {number + 1}: loss {torch.stack(losses).mean().item():.6f}", flush=True)


def microbatches(world: mpicomm.World) -> int:
    """Return the number of microbatches in a batch; 1F1B needs at least as many as there are stages."""
    return max(8, world.size)


def network(world: mpicomm.World) -> nn.Sequential:
    """Return the whole network, the same on all ranks; if it were large, each rank would create only its own stage."""
    torch.manual_seed(SEED)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(world.size)]
    return nn.Sequential(*stages).double().to(world.device)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)


def data(world: mpicomm.World) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs, for the first rank, and the targets, for the last one."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(microbatches(world) * ROWS, WIDTH, dtype=torch.float64, generator=generator)
    return inputs.to(world.device), inputs.roll(1, dims=1).sin().to(world.device)


def trained_alone(world: mpicomm.World) -> nn.Sequential:
    """Return the whole network, trained on this rank alone."""
    whole = network(world)
    inputs, targets = data(world)
    optimizer = optimizer_of(whole)
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse_loss(whole(inputs), targets).backward()
        optimizer.step()
    return whole


if __name__ == "__main__":
    main()
