"""A loop with accelerate, on the images of handwritten digits of the example `ddp`.

The only line for mpicomm is `bootstrap()`, before `Accelerator()`. The same program also runs under `mpicomm run` and
torchrun.

    $ mpirun -n 4 python -m mpicomm.examples.integrations.accelerate_digits
    DistributedType.MULTI_CPU on 4 ranks, backend mpicomm
    test accuracy 97.8% of 360 images
    parameters identical on all ranks
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

import mpicomm
from mpicomm.examples import ddp

EPOCHS = 20


def main() -> None:
    world = mpicomm.bootstrap()
    ddp.share_cores(world)
    accelerator = Accelerator()
    train_set, test_set = ddp.load_digits()
    set_seed(ddp.SEED)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=ddp.LEARNING_RATE * world.size, momentum=0.9)
    # accelerate partitions the data among the ranks.
    model, optimizer, loader, test_loader = accelerator.prepare(
        network, optimizer, DataLoader(train_set, ddp.BATCH_SIZE, shuffle=True), DataLoader(test_set, ddp.BATCH_SIZE)
    )

    model.train()
    for _ in range(EPOCHS):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

    model.eval()
    correct = 0
    for x, y in test_loader:
        with torch.no_grad():
            hits = model(x).argmax(dim=1) == y
        correct += int(accelerator.gather_for_metrics(hits).sum())

    accuracy, identical = correct / len(test_set), ddp.parameters_are_identical(world, model)
    if accelerator.is_main_process:
        kind, size = accelerator.distributed_type, accelerator.num_processes
        print(f"{kind} on {size} ranks, backend {dist.get_backend()}")
        print(f"test accuracy {accuracy:.1%} of {len(test_set)} images")
        print(f"parameters {'identical' if identical else 'DIFFERENT'} on all ranks", flush=True)
    if accuracy < ddp.GOAL or not identical:
        sys.exit(1)  # on all ranks: both values are the same on each


if __name__ == "__main__":
    main()
