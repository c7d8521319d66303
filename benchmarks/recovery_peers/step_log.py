"""The training step that all compared systems run, and the log of it.

Also imported by an interpreter without mpicomm, so this module imports nothing but torch.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH = 512  # of two linear layers: 525 k parameters
BATCH = 32  # samples per process and step
LEARNING_RATE = 0.01


def make_network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with the same parameters in every process, and its optimizer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return network, torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train on one batch (collective)."""
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


class StepLog:
    """The attempted steps of one process, one line each, when they end."""

    def __init__(self, directory: Path, number: int, limit: int) -> None:
        """Choose the file, whose name contains the number and the ID of this process.

        Args:
            directory: The directory of the logs of all processes.
            number: The rank, or the number of the replica group.
            limit: Seconds after which this process is terminated.
        """
        signal.alarm(limit)  # no process survives a benchmark that was killed
        self._path = Path(directory, f"{number}-{os.getpid()}.jsonl")

    def write(self, *, step: int, size: int, applied: bool, received: bool) -> None:
        """Write a line.

        Args:
            step: The number of steps that the parameters have had.
            size: The number of processes whose gradients were averaged.
            applied: Whether the parameters have changed.
            received: Whether this process received the parameters of another one before the step ended.
        """
        line: dict[str, Any] = {"step": step, "size": size, "applied": applied, "received": received}
        with self._path.open("a") as file:
            file.write(json.dumps({"time": time.monotonic(), **line}) + "\n")
