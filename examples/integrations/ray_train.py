"""Ray Train on the nodes of the job: DDP learns handwritten digits in Ray's own worker processes.

`mpicomm.integrations.ray.cluster` starts Ray in the allocation of mpirun or srun; it ends with the job. Rank 0 drives
Ray, which starts a worker per core. In the workers, `ray.train` has initialised `torch.distributed` with Gloo or NCCL.

    $ mpirun -n 2 python -m mpicomm.examples.integrations.ray_train
    1 node, 2 workers
    test accuracy 96.4% of 360 images
    $ torchrun --nproc-per-node 2 examples/integrations/ray_train.py
    1 node, 2 workers
    test accuracy 96.4% of 360 images
"""

from __future__ import annotations

import tempfile

import ray
import ray.train
import ray.train.torch
import torch
from torch import nn

import mpicomm
from mpicomm.examples.ddp import load_digits
from mpicomm.integrations.ray import cluster

EPOCHS, BATCH, LEARNING_RATE = 10, 64, 4e-3
GOAL = 0.9


def main() -> None:
    world = mpicomm.bootstrap()
    with cluster(world):
        if world.rank == 0:
            drive()


def drive() -> None:
    """Train on one worker per core, and print the test accuracy."""
    workers = int(ray.cluster_resources()["CPU"])
    count = len(ray.nodes())
    print(f"{count} node{'s' if count > 1 else ''}, {workers} workers", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        result = ray.train.torch.TorchTrainer(
            train,
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(storage_path=directory),
        ).fit()
    accuracy, images = result.return_value  # of the worker of rank 0
    print(f"test accuracy {accuracy:.1%} of {images} images", flush=True)
    assert accuracy > GOAL


def train() -> tuple[float, int]:
    """Train on this worker's part of the images, and return the test accuracy and the number of test images.

    Ray runs this in each worker.
    """
    train_set, test_set = load_digits()
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(train_set, batch_size=BATCH, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    images, labels = test_set.tensors
    with torch.no_grad():
        accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
    return accuracy, len(labels)


if __name__ == "__main__":
    main()
