"""A training run that can be stopped at any point: `mpirun -n 4 python -m tests.training.job DIRECTORY`.

It uses every component that has state: dropout, batch normalization, random augmentation in the dataset, an optimizer
with moments, a scheduler, gradient accumulation, uneven last steps, an evaluation. Each rank writes its final state to
DIRECTORY/final-<rank>.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import Dataset

import mpicomm
from mpicomm.training import run_directory
from mpicomm.training.data import Step
from mpicomm.training.run_directory import RunDirectory
from mpicomm.training.trainer import Trainer
from mpicomm.training.training_loop import TrainingLoop

SAMPLES, EVAL_SAMPLES, FEATURES = 203, 37, 12
EPOCHS = 8
SAVE_EVERY = 3

POINTS = ("renaming", "marking", "writing", "removing")
"""The points at which a job can be killed: just before the directory of the written files is renamed; just before the
marker is written; while the files are being written; between the removal of the marker of an old checkpoint and the
removal of its files."""


class Samples(Dataset[Any]):
    """Samples with random noise, which differs at each access."""

    def __init__(self, count: int, seed: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, FEATURES, generator=generator)
        self.y = (self.x[:, :3].sum(dim=1) > 0).long()
        self.noise = noise
        self.taken: list[int] = []

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.taken.append(index)
        drawn = 0.01 * (random.random() + np.random.random())
        return self.x[index] + self.noise * torch.randn(FEATURES) + drawn, self.y[index]


def make_model() -> nn.Module:
    """Return a network in which two forward passes with the same input differ."""
    return nn.Sequential(
        nn.Linear(FEATURES, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 24), nn.Linear(24, 2)
    )


def make_trainer(directory: str | Path, **options: Any) -> Trainer:
    """Return the trainer of the test jobs, with further arguments of `Trainer`."""
    torch.manual_seed(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return Trainer(
        model,
        optimizer,
        nn.functional.cross_entropy,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.97),
        batch_size=8,
        grad_accum_steps=2,
        max_grad_norm=1.0,
        checkpoint_dir=directory,
        log_every=4,
        seed=5,
        **options,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--kill", default="", help="POINT:NUMBER, at that checkpoint of this process's")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each step takes longer")
    parser.add_argument("--leave-at", type=int, default=0, help="the step after which to leave")
    parser.add_argument("--record", action="store_true", help="write which samples each rank takes")
    parser.add_argument("--progress", default="none")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    world = mpicomm.bootstrap("mpi")
    pids = mpicomm.all_gather_object(os.getpid())
    if arguments.kill:
        point, _, number = arguments.kill.partition(":")
        kill_at(point, int(number), world.rank, pids)
    trainer = make_trainer(
        arguments.directory,
        save_every=SAVE_EVERY,
        keep_checkpoints=2,
        progress=arguments.progress,
    )
    train, test = Samples(SAMPLES, 2, 0.1), Samples(EVAL_SAMPLES, 3, 0.0)
    if arguments.pause:
        slow_down(trainer, arguments.pause)
    if arguments.record or arguments.leave_at:
        watch(trainer, Path(arguments.directory, f"taken-{world.size}-{world.rank}.jsonl"), arguments.leave_at)
    if world.rank == 0:
        sys.stdout.write(f"pids {' '.join(map(str, pids))}\n")
        sys.stdout.flush()
    history = trainer.fit(train, arguments.epochs, eval_data=test, metrics={"accuracy": is_right})
    final = {"digest": digest(trainer), "history": history, "step": trainer.position.step}
    Path(arguments.directory, f"final-{world.rank}.json").write_text(json.dumps(final))


def is_right(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(dim=1) == labels


def digest(trainer: Trainer) -> str:
    """Return a digest of this rank's part of the parameters, the buffers and the optimizer state."""
    tensors = [*trainer.wrapped.inner.state_dict().values()]
    for state in trainer.optimizer.state.values():
        tensors += [each for each in state.values() if isinstance(each, torch.Tensor)]
    found = hashlib.sha256()
    for each in tensors:
        local = each.to_local() if hasattr(each, "to_local") else each
        found.update(local.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def slow_down(trainer: Trainer, seconds: float) -> None:
    loss_fn = trainer.loss_fn

    def slowly(*arguments: Any) -> torch.Tensor:
        time.sleep(seconds)
        return loss_fn(*arguments)

    trainer.loss_fn = slowly


def watch(trainer: Trainer, path: Path, leave_at: int) -> None:
    """Record the samples of each step, and request a stop in the step `leave_at`."""
    take_step = TrainingLoop._take_step

    def taking(loop: TrainingLoop, step: Step, count: int) -> None:
        if trainer.position.step + 1 == leave_at:
            trainer._stop_request.why = "enough"
        take_step(loop, step, count)
        indices = [index for batch in step.batches for index in batch.indices or ()]
        with path.open("a") as file:
            file.write(json.dumps({"epoch": trainer.position.epoch, "indices": indices}) + "\n")

    TrainingLoop._take_step = taking  # type: ignore[method-assign]


# -- killing -----------------------------------------------------------------------------------------------------------


def kill_at(point: str, number: int, rank: int, pids: list[int]) -> None:
    """Kill all processes of the job when it reaches a point of saving for the `number`-th time."""
    countdown = iter(range(number - 1, -1, -1))

    def kill() -> None:
        if next(countdown, 1) == 0:
            for pid in (*[each for each in pids if each != os.getpid()], os.getpid()):
                os.kill(pid, signal.SIGKILL)

    if point == "writing":
        if rank == number % len(pids):
            _before(dcp.FileSystemWriter, "write_data", lambda *_: threading.Timer(0.001, kill).start())
    elif rank == 0 and point == "marking":
        _before(RunDirectory, "_mark", lambda *_: kill())
    elif rank == 0 and point == "renaming":
        _before(Path, "rename", lambda path, *_: kill() if path.suffix == ".partial" else None)
    elif rank == 0 and point == "removing":
        _before(run_directory, "remove_tree", lambda *_, **__: kill())


def _before(owner: Any, name: str, act: Callable[..., object]) -> None:
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    main()
