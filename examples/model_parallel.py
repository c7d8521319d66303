"""Model parallelism: each rank holds some layers of a network, and the ranks communicate with send and recv.

For a model that does not fit on one device. In the forward pass every rank receives activations from the previous rank
and sends its own to the next one; in the backward pass it receives the gradient of its output, runs autograd from
there, and sends the gradient of its input. Only the last rank has the loss.

Each rank also trains the whole network by itself for comparison: the parameters of its part are the same, to 1e-12 in
float64. So the losses do not depend on the number of ranks. Only one rank computes at a time while the others wait;
`mpicomm.examples.pipeline` keeps all of them busy.

    $ mpirun -n 4 python -m mpicomm.examples.model_parallel
    step 10: loss 0.392829
    step 20: loss 0.314607
    step 30: loss 0.255360
    step 40: loss 0.217086
    step 50: loss 0.188565
    parameters of all parts equal those of a network trained on one rank
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import mpicomm

DEPTH, WIDTH = 6, 32  # layers, and the width of each
BATCH, STEPS, SEED = 64, 50, 0


def main() -> None:
    world = mpicomm.bootstrap(device=parse_arguments().device)
    if world.size > DEPTH:
        if world.rank == 0:
            print(f"expected at most {DEPTH} ranks, got {world.size}; start with `mpirun -n {DEPTH}`", flush=True)
        return
    own = slice(world.rank * DEPTH // world.size, (world.rank + 1) * DEPTH // world.size)
    part = network(world)[own]
    inputs, targets = data(world)
    optimizer = optimizer_of(part)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = forward_and_backward(world, part, inputs, targets)
        optimizer.step()
        if loss is not None and (number + 1) % 10 == 0:
            print(f"step {number + 1}: loss {loss.item():.6f}", flush=True)

    for mine, same in zip(part.parameters(), trained_alone(world)[own].parameters(), strict=True):
        torch.testing.assert_close(mine, same, rtol=0, atol=1e-12)
    dist.barrier()
    if world.rank == 0:
        print("parameters of all parts equal those of a network trained on one rank", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="device of each rank, such as cpu or xpu:1 (default: chosen by bootstrap())")
    return parser.parse_args()


def forward_and_backward(
    world: mpicomm.World, part: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor | None:
    """Compute the gradients of this rank's part; return the loss on the last rank (collective)."""
    before, after = world.rank - 1, world.rank + 1
    if world.rank > 0:
        inputs = torch.empty_like(inputs)  # activations have the shape of the inputs
        dist.recv(inputs, before)
        inputs.requires_grad_()
    outputs = part(inputs)
    loss = None
    if after < world.size:
        dist.send(outputs.detach(), after)
        gradient = torch.empty_like(outputs)
        dist.recv(gradient, after)
        torch.autograd.backward(outputs, gradient)
    else:
        loss = mse_loss(outputs, targets)
        loss.backward()
    if inputs.grad is not None:
        dist.send(inputs.grad, before)
    return loss


def network(world: mpicomm.World) -> nn.Sequential:
    """Return the whole network, the same on all ranks; if it were large, each rank would create only its own part."""
    torch.manual_seed(SEED)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    return nn.Sequential(*layers).double().to(world.device)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)


def data(world: mpicomm.World) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs, for the first rank, and the targets, for the last one."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)
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
