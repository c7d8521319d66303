"""The trainer: a small convolutional network learns handwritten digits, and may be interrupted at any time.

After Ctrl-C, `kill` or a time limit run the command again: training resumes from the checkpoint. Once training is
complete, a further run reports that. `--dir` is the checkpoint directory.

    $ mpirun -n 4 python -m mpicomm.examples.trainer
    epoch 1/12  step 1  loss -  1,185 samples/s    9%  0:14 left
    epoch 1: loss 0.9985  eval_loss 0.5460  accuracy 0.9306
    epoch 2: loss 0.1804  eval_loss 0.1914  accuracy 0.9583
    epoch 3: loss 0.1132  eval_loss 0.1604  accuracy 0.9556
    epoch 4: loss 0.0804  eval_loss 0.1132  accuracy 0.9722
    epoch 5: loss 0.0386  eval_loss 0.0969  accuracy 0.9722
    epoch 6: loss 0.0292  eval_loss 0.0800  accuracy 0.9833
    epoch 7: loss 0.0192  eval_loss 0.0897  accuracy 0.9778
    epoch 8: loss 0.0180  eval_loss 0.0805  accuracy 0.9778
    epoch 9: loss 0.0101  eval_loss 0.0784  accuracy 0.9806
    epoch 10: loss 0.0088  eval_loss 0.0805  accuracy 0.9778
    epoch 11: loss 0.0074  eval_loss 0.0826  accuracy 0.9833
    epoch 12: loss 0.0066  eval_loss 0.0815  accuracy 0.9861
    run
    ┌────────────────┬─────────────────────────────────────────┐
    │ steps          │ 144 in 12 epochs                        │
    │ time           │ 0:04 (evaluation 0:00)                  │
    │ samples/s      │ 4,184 on 4 ranks                        │
    │ rank 0's steps │ 4% data, 62% compute, 35% communication │
    │ laptop         │ 4 ranks on cpu, peak 426 MiB per rank   │
    └────────────────┴─────────────────────────────────────────┘
    test accuracy 98.6% of 360 images

With `--recover` training continues if a rank fails: without this rank, or with a spare in its place. `--kill` kills
ranks (SIGKILL), one in each of these steps, and implies `--recover`:

    $ mpicomm run -n 5 --spares 1 -m mpicomm.examples.trainer --dir runs/killed --kill 60
    ...
    rank 0 on laptop failed: ...; continued from step 59 on 4 ranks, 1 of them spares, after 0.62 s without a step
    ...
    test accuracy 98.1% of 360 images
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable

import torch
from torch import nn

import mpicomm
from mpicomm.examples.ddp import load_digits, share_cores

GOAL = 0.97


def main() -> None:
    arguments = parse_arguments()
    on_failure = "recover" if arguments.recover or arguments.kill else "abort"
    train_set, test_set = load_digits()  # before bootstrap(), in which a spare waits: the other ranks wait for the rest
    world = mpicomm.bootstrap(device=arguments.device, on_failure=on_failure)
    share_cores(world)
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    steps = arguments.epochs * -(-len(train_set) // (32 * world.size))
    trainer = mpicomm.Trainer(
        model,
        optimizer,
        nn.functional.cross_entropy,
        scheduler=torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=steps),
        precision=arguments.precision,
        max_grad_norm=1.0,
        checkpoint_dir=arguments.dir,
        seed=0,
        on_failure=on_failure,
    )
    if arguments.kill:
        trainer.loss_fn = killing(trainer, arguments.kill)
    history = trainer.fit(train_set, arguments.epochs, eval_data=test_set, metrics={"accuracy": is_correct})
    last = history[-1]
    if trainer.world.rank == 0:  # its rank after a recovery may differ from that of bootstrap()
        print(f"test accuracy {last['accuracy']:.1%} of {last['eval_samples']} images", flush=True)
    if last["accuracy"] < GOAL:
        sys.exit(1)  # on all ranks: the values are the same on each


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="number of epochs (%(default)s)")
    parser.add_argument("--dir", default="runs/digits", help="checkpoint directory (%(default)s)")
    parser.add_argument("--precision", default="float32", help="float32, bfloat16 or float16 (%(default)s)")
    parser.add_argument("--device", help="device of each rank, such as cpu or xpu:1 (default: chosen by bootstrap())")
    parser.add_argument("--recover", action="store_true", help="continue if a rank fails (run --fault-tolerant)")
    parser.add_argument("--kill", type=int, nargs="+", default=[], metavar="STEP", help="kill a rank in these steps")
    return parser.parse_args()


def make_model() -> nn.Module:
    """Return a network for images of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64 * 4 * 4, 10),
    )


def killing(trainer: mpicomm.Trainer, steps: list[int]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss function, in which rank k (from 0) kills itself in the k-th of the steps.

    Args:
        trainer: The trainer.
        steps: The steps, in ascending order.
    """

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        world, number = trainer.world, trainer.world.recoveries
        if number < len(steps) and world.rank == number % world.size and trainer.position.step + 1 >= steps[number]:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(outputs, labels)

    return loss


def is_correct(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return for each image whether the prediction is correct."""
    return outputs.argmax(dim=1) == labels


if __name__ == "__main__":
    main()
