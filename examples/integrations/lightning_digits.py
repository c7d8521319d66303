"""Lightning's Trainer with DDP, on the images of handwritten digits of the example `ddp`.

`mpicomm run -n 4 -m mpicomm.examples.integrations.lightning_digits` and torchrun start the same program.

    $ mpirun -n 4 python -m mpicomm.examples.integrations.lightning_digits
    DDPStrategy on 4 ranks, backend mpicomm
    test accuracy 96.7% of 360 images
    parameters identical on all ranks
"""

from __future__ import annotations

import sys

import lightning
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import mpicomm
from mpicomm.examples import ddp
from mpicomm.integrations.lightning import WorldEnvironment


class Digits(lightning.LightningModule):
    """A network with one hidden layer."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def test_step(self, batch: list[torch.Tensor]) -> None:
        """Log the accuracy of a batch."""
        x, y = batch
        self.log("accuracy", (self.network(x).argmax(dim=1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


def main() -> None:
    world = mpicomm.bootstrap()
    ddp.share_cores(world)
    train_set, test_set = ddp.load_digits()
    lightning.seed_everything(ddp.SEED, verbose=False)
    trainer = lightning.Trainer(
        accelerator=world.device.type,
        devices=world.local_size,
        num_nodes=world.num_nodes,
        strategy="ddp",
        plugins=[WorldEnvironment()],
        max_epochs=ddp.EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits(ddp.LEARNING_RATE * world.size)

    # Lightning partitions the data among the ranks.
    trainer.fit(model, DataLoader(train_set, ddp.BATCH_SIZE, shuffle=True))
    (result,) = trainer.test(model, DataLoader(test_set, len(test_set)), verbose=False)

    identical = ddp.parameters_are_identical(world, model)
    if world.rank == 0:
        print(f"{type(trainer.strategy).__name__} on {trainer.world_size} ranks, backend {dist.get_backend()}")
        print(f"test accuracy {result['accuracy']:.1%} of {len(test_set)} images")
        print(f"parameters {'identical' if identical else 'DIFFERENT'} on all ranks", flush=True)
    if result["accuracy"] < ddp.GOAL or not identical:
        sys.exit(1)  # on all ranks: both values are the same on each


if __name__ == "__main__":
    main()
