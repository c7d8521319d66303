"""A training run with steps of half a second: `mpicomm run -n 2 -m tests.slow_run DIRECTORY [STEPS]`.

With STEPS, the number of steps on two ranks, it saves every second step, and the first attempt blocks once it has
begun. Rank 0 creates DIRECTORY/begun in its third step, and each rank writes its PID namespace and its pid to
DIRECTORY/pid-<rank>.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import mpicomm
from mpicomm.training.trainer import Trainer

STEPS = 200
BATCH = 2
SECONDS = 0.5
BEGUN_AFTER = 3
LONGEST = 400.0


class Ones(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(4), torch.tensor(index % 2)


class Slow(nn.Module):
    """A layer that takes half a second."""

    def __init__(self, begun: Path | None, *, blocks: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.begun = begun
        self.blocks = blocks
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        self.calls += 1
        if self.calls == BEGUN_AFTER and self.begun is not None:
            self.begun.touch()
        if self.calls > BEGUN_AFTER and self.blocks:
            time.sleep(LONGEST)
        return self.layer(x)


def main() -> None:
    world = mpicomm.bootstrap(timeout=12)
    directory = Path(sys.argv[1])
    (directory / f"pid-{world.rank}").write_text(f"{Path('/proc/self/ns/pid').readlink()} {os.getpid()}")
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else None
    begun = directory / "begun"
    is_restarted = begun.exists()
    mpicomm.barrier()
    model = Slow(begun if world.rank == 0 else None, blocks=steps is not None and not is_restarted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(
        model,
        optimizer,
        nn.functional.cross_entropy,
        batch_size=BATCH,
        checkpoint_dir=directory / "checkpoints",
        save_every=None if steps is None else 2,
        progress="none",
    )
    trainer.fit(Ones(2 * BATCH * (steps or STEPS)), epochs=1)
    print(f"came through on {world.size}")


if __name__ == "__main__":
    main()
