"""A parameter server: rank 0 holds the parameters, the workers push gradients and pull parameters at their own pace.

No worker waits for the slowest rank, as with all_reduce. Rank 0 receives from any rank (`dist.recv` without `src`
returns the sender), takes a step at once, and sends the parameters back. This is asynchronous SGD: a gradient is stale
by the number of steps that the other workers triggered in the meantime. Small steps tolerate that. The workers differ
in speed on purpose: rank r pauses 3 r milliseconds before each push.

The problem is linear least squares: find the weights of noisy sums.

    $ mpirun -n 4 python -m mpicomm.examples.parameter_server
    loss 312.4008 at the start
    rank 1 pushed 52.3% of 600 gradients
    rank 2 pushed 28.0% of 600 gradients
    rank 3 pushed 19.7% of 600 gradients
    loss 0.0115 at the end: good
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import mpicomm

WEIGHTS, BATCH, NOISE = 10, 64, 0.1
PUSHES = 600  # of all workers together
LEARNING_RATE = 0.02
SERVER = 0
GOAL = 2 * NOISE**2  # the noise itself contributes NOISE ** 2


def main() -> None:
    world = mpicomm.bootstrap()
    if world.size == 1:
        print("needs 2 ranks or more, got 1; start with `mpirun -n 4 python -m mpicomm.examples.parameter_server`")
    elif world.rank == SERVER:
        serve(world)
    else:
        work(world)


def serve(world: mpicomm.World) -> None:
    """Take a step with each gradient in the order of arrival, and print the result."""
    # A message is the weights, and a last element that is 1 to continue and 0 to stop. It is in host memory: NCCL
    # cannot receive from any rank.
    message = torch.cat([torch.zeros(WEIGHTS), torch.ones(1)])
    parameters, gradient = message[:-1], torch.empty(WEIGHTS)
    print(f"loss {loss(parameters):.4f} at the start", flush=True)
    for worker in range(1, world.size):
        dist.send(message, worker)
    pushes = dict.fromkeys(range(1, world.size), 0)
    for _ in range(PUSHES):
        worker = dist.recv(gradient)
        parameters -= LEARNING_RATE * gradient
        pushes[worker] += 1
        dist.send(message, worker)
    message[-1] = 0
    for _ in range(1, world.size):  # each worker still sends one gradient
        dist.send(message, dist.recv(gradient))

    for worker, count in pushes.items():
        print(f"rank {worker} pushed {count / PUSHES:.1%} of {PUSHES} gradients")
    print(f"loss {loss(parameters):.4f} at the end: {'good' if loss(parameters) < GOAL else 'NOT good'}", flush=True)
    assert loss(parameters) < GOAL


def work(world: mpicomm.World) -> None:
    """Pull parameters, compute a gradient on this rank's samples and push it, until the server stops."""
    generator = torch.Generator().manual_seed(world.rank)
    message = torch.empty(WEIGHTS + 1)
    dist.recv(message, SERVER)
    while message[-1] == 1:
        parameters = message[:-1].to(world.device, copy=True).requires_grad_()
        x, y = samples(generator)
        error = ((x.to(world.device) @ parameters - y.to(world.device)) ** 2).mean()
        (gradient,) = torch.autograd.grad(error, parameters)
        time.sleep(0.003 * world.rank)
        dist.send(gradient.cpu(), SERVER)
        dist.recv(message, SERVER)


def samples(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random x, and the sums of its columns with the weights 0, 1, 2 and so on, plus noise."""
    x = torch.randn(BATCH, WEIGHTS, generator=generator)
    return x, x @ torch.arange(WEIGHTS).float() + NOISE * torch.randn(BATCH, generator=generator)


def loss(parameters: torch.Tensor) -> float:
    """Return the mean squared error on samples that no worker uses."""
    x, y = samples(torch.Generator().manual_seed(0))
    return ((x @ parameters - y) ** 2).mean().item()


if __name__ == "__main__":
    main()
