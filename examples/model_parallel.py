"""Layers spread over the ranks: each rank holds a part of the network, and the parts talk by send and recv.

For a model that does not fit on one device. On the way forward every rank receives activations from the rank before and
sends its own to the next; on the way back it receives the gradient of what it has sent, lets autograd go on from there,
and sends the gradient of what it has received. Only the last rank knows the loss.

Each rank also trains the whole network by itself: its part has the same parameters there, to 1e-12 in float64. So the
losses are these on any number of ranks. Only one rank works at a time here while the others wait;
`mpicomm.examples.pipeline` keeps them busy.

    $ mpirun -n 4 python -m mpicomm.examples.model_parallel
    step 10: loss 0.392829
    step 20: loss 0.314607
    step 30: loss 0.255360
    step 40: loss 0.217086
    step 50: loss 0.188565
    the parts together are the network that one rank trains alone
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import mpicomm

DEPTH, WIDTH = 6, 32  # layers, and how wide they all are
BATCH, STEPS, SEED = 64, 50, 0


def main() -> None:
    world = mpicomm.bootstrap()
    if world.size > DEPTH:
        if world.rank == 0:
            print(f"{DEPTH} layers are too few for {world.size} ranks; start me with `mpirun -n {DEPTH}`", flush=True)
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
        print("the parts together are the network that one rank trains alone", flush=True)


def forward_and_backward(
    world: mpicomm.World, part: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor | None:
    """Compute the gradients of this rank's part; return the loss on the last rank (collective)."""
    before, after = world.rank - 1, world.rank + 1
    if world.rank > 0:
        inputs = torch.empty_like(inputs)  # activations are as wide as the inputs are
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
    """Return the whole network, the same on all ranks; if it were large, each rank would make its own part alone."""
    torch.manual_seed(SEED)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    return nn.Sequential(*layers).double().to(world.device)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)


def data(world: mpicomm.World) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs, which the first rank needs, and targets, which the last one needs."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)
    return inputs.to(world.device), inputs.roll(1, dims=1).sin().to(world.device)


def trained_alone(world: mpicomm.World) -> nn.Sequential:
    """Train the whole network on this rank, and return it."""
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
