"""The interval of checkpoints that loses the least time to saves and to failures, by Young and Daly.

A save delays training, and a failure loses the steps since the last save. The best interval is about the square root of
2 x delay x mean time between failures. The trainer measures the delay, which depends on the model, the ranks and the
file system; the failure rate is a fact about the machine, such as the node hours of past jobs divided by the number of
their failures. If a node fails every 20,000 hours, a job on 100 nodes fails every 200 hours, and a save that delays it
by 5 s is due every 45 minutes. A value that is wrong by a factor of 4 doubles the interval, which costs a quarter more.

The failure rate of the command is that high so that a run of seconds saves more than once. A line appears when the
interval changes by a quarter; the entries "save_interval" of runs/interval/metrics.jsonl have each of them.

    $ mpirun -n 4 python -m mpicomm.examples.checkpoint_interval --node-mtbf-hours 0.01
    a checkpoint every 0.354 s: a save delays training by 0.00175 s, the mean time between failures is 0.01 h
    a checkpoint every 0.626 s: a save delays training by 0.0055 s, the mean time between failures is 0.01 h
    epoch 1: loss 1.8610
    epoch 2: loss 0.8276
    epoch 3: loss 0.3971
    test accuracy 92.5% of 360 images
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import mpicomm
from mpicomm.examples.ddp import load_digits, share_cores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node-mtbf-hours", type=float, required=True, help="mean time between failures of a node")
    node_mtbf_hours = parser.parse_args().node_mtbf_hours
    train_set, test_set = load_digits()
    world = mpicomm.bootstrap()
    share_cores(world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    trainer = mpicomm.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=4e-3),
        nn.functional.cross_entropy,
        checkpoint_dir="runs/interval",
        save_every="auto",
        node_mtbf_hours=node_mtbf_hours,
    )
    trainer.fit(train_set, epochs=3)
    means = trainer.evaluate(test_set, {"accuracy": lambda outputs, labels: outputs.argmax(dim=1) == labels})
    if world.rank == 0:
        print(f"test accuracy {means['accuracy']:.1%} of {means['samples']} images", flush=True)


if __name__ == "__main__":
    main()
