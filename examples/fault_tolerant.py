"""Training that continues when a rank dies, without a restart and without a checkpoint.

Rank `--kill` kills itself after half of the steps. On the other ranks the operation in progress raises RankFailedError.
`recover()` forms a world without the failed rank, or with a spare in its place (`--spares`). Then the ranks agree on
the newest step that one of them has completed: parameters change in the optimizer's step only, so each rank has applied
the whole step or nothing of it. A rank that has applied the newest step sends its state to the others. The images of a
step are shared among the ranks of the current world, so each image is used once per epoch.

    $ mpicomm run -n 4 --fault-tolerant -m mpicomm.examples.fault_tolerant --kill 2
    rank 2 dies in step 140
    rank 0 of 3 continues in step 140
    rank 1 of 3 continues in step 140
    rank 2 of 3 continues in step 140
    test accuracy 96.9% of 360 images

    $ mpicomm run -n 5 --spares 1 -m mpicomm.examples.fault_tolerant --kill 0
    rank 0 dies in step 140
    rank 1 of 4 continues in step 140
    rank 2 of 4 continues in step 140
    rank 3 of 4 continues in step 140
    test accuracy 96.9% of 360 images
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpicomm
from mpicomm.examples.ddp import GOAL, SEED, evaluate, load_digits, share_cores

EPOCHS = 20
BATCH_SIZE = 100  # of all ranks together
LEARNING_RATE = 0.1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", type=int, default=-1, metavar="RANK", help="the rank that kills itself")
    victim = parser.parse_args().kill
    world = mpicomm.bootstrap(on_failure="recover")
    share_cores(world)
    train_set, test_set = load_digits()
    torch.manual_seed(SEED)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(world.device)
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, momentum=0.9)

    step, model, accuracy = 0, None, None
    steps = EPOCHS * (len(train_set) // BATCH_SIZE)
    while accuracy is None:
        try:
            if model is None:  # at the start and after each recovery, also on a spare that has joined
                step = newest_state(network, optimizer, step)
                model = DistributedDataParallel(network)
            if step == steps // 2 and victim == world.previous_rank == world.rank and world.recoveries == 0:
                print(f"rank {victim} dies in step {step}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if step < steps:
                train_step(world, model, optimizer, train_set.tensors, step)
                step += 1  # only now: the parameters have changed
            else:
                accuracy = evaluate(world, model, test_set)
        except mpicomm.RankFailedError:
            model = None
            world = mpicomm.recover()
            print(f"rank {world.rank} of {world.size} continues in step {step}\n", end="", flush=True)
    if world.rank == 0:
        print(f"test accuracy {accuracy:.1%} of {len(test_set)} images", flush=True)
    if accuracy < GOAL:
        sys.exit(1)


def newest_state(network: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> int:
    """Give all ranks the state of a rank with the newest step, and return that step (collective)."""
    steps = mpicomm.all_gather_object(step)
    state = network.state_dict(), optimizer.state_dict()
    of_network, of_optimizer = mpicomm.broadcast_object(state, src=steps.index(max(steps)))
    network.load_state_dict(of_network)
    optimizer.load_state_dict(of_optimizer)
    return max(steps)


def train_step(
    world: mpicomm.World, model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[torch.Tensor, ...], step: int
) -> None:
    """Train on this rank's share of the images of a step (collective)."""
    epoch, index = divmod(step, len(data[0]) // BATCH_SIZE)
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(epoch))  # the same on all ranks
    mine = order[index * BATCH_SIZE :][:BATCH_SIZE][world.rank :: world.size]
    x, y = (each[mine].to(world.device) for each in data)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / BATCH_SIZE
    (loss * world.size).backward()  # DDP averages over the ranks, which may have different numbers of images
    optimizer.step()


if __name__ == "__main__":
    main()
