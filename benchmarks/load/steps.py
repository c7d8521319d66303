"""DDP training steps with the backend and with Gloo, in interleaved rounds: times, and a comparison of the results."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpicomm.bench import timing
from mpicomm.bench.timing import Bench

WIDTHS = {"34 k": (64, 8), "530 k": (256, 8), "8.4 M": (1024, 8)}  # width and number of layers
BATCH = 8


def measure(ours: dist.ProcessGroup, gloo: dist.ProcessGroup, bench: Bench) -> dict[str, float]:
    """Return milliseconds of a step, the minimum of interleaved rounds (collective)."""
    figures: dict[str, float] = {}
    for name, (width, depth) in WIDTHS.items():
        runs = {"mpicomm": _Run(width, depth, ours), "Gloo": _Run(width, depth, gloo)}
        times = timing.in_turn(bench, {each: run.step for each, run in runs.items()})
        ms = {each: of_one.least / 1e3 for each, of_one in times.items()}
        figures |= {f"{name} parameters, {each}": round(of_one, 2) for each, of_one in ms.items()}
        figures[f"{name} parameters: Gloo's time to ours"] = round(ms["Gloo"] / ms["mpicomm"], 2)
        figures[f"{name} parameters: the same bits"] = float(runs["mpicomm"].is_equal_to(runs["Gloo"]))
    return figures


class _Run:
    """A model in training, with about one bucket per layer."""

    def __init__(self, width: int, depth: int, group: dist.ProcessGroup) -> None:
        torch.manual_seed(1)
        layers = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(depth)])
        cap = 4 * width * width / 2**20
        self.model = DistributedDataParallel(layers, process_group=group, bucket_cap_mb=cap)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._batch = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def is_equal_to(self, other: _Run) -> bool:
        """Return whether the parameters have the same bits."""
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)

    def step(self) -> None:
        """Train one step (collective)."""
        self._optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        self._optimizer.step()
