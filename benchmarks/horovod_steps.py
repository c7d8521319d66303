"""A step with hvd.DistributedOptimizer, compared with one with torch's DDP on the same backend.

`mpirun -n 2 python -m benchmarks.horovod_steps`; rank 0 writes docs/results/horovod-steps-<ranks>-<MPI>.json. The steps
run in turn, in rounds. The position of a model in memory changes the time by some percent, so each kind has several
models.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpicomm
import mpicomm.horovod as hvd
from benchmarks import rank_results
from mpicomm.bench import timing
from mpicomm.bench.training import WIDTHS

MODELS, ROUNDS, SECONDS, BATCH = 4, 11, 0.1, 32
_OURS, _DDP = "hvd.DistributedOptimizer", "DistributedDataParallel"


def main() -> None:
    """Measure, and write the results on rank 0."""
    torch.set_num_threads(1)
    world = mpicomm.bootstrap("mpi")
    hvd.init()
    found = {name: _measure(world, width) for name, width in WIDTHS.items()}
    if world.rank == 0:
        what = "milliseconds of a training step on the slowest rank; the kinds of steps run in turn"
        rank_results.write(f"horovod-steps-{world.size}", world.size, what, steps=found)
    hvd.shutdown()


def _measure(world: mpicomm.World, width: int) -> dict[str, Any]:
    """Return the times of the steps of models of one width (collective)."""
    bench = timing.on_ranks_of(world, ROUNDS, seconds=SECONDS)
    ours: list[float] = []
    ddp: list[float] = []
    for number in range(MODELS):
        steps = {_OURS: _with_horovod(width), _DDP: _with_ddp(width)}
        order = list(steps) if number % 2 else list(reversed(steps))
        times = timing.in_turn(bench, {name: steps[name] for name in order}, times_calls=False)
        ours += times[_OURS].rounds
        ddp += times[_DDP].rounds
    return {
        "parameters": sum(each.numel() for each in _make_model(width).parameters()),
        **{f"{name}, least": round(min(each) / 1e3, 4) for name, each in ((_OURS, ours), (_DDP, ddp))},
        **{f"{name}, median": round(statistics.median(each) / 1e3, 4) for name, each in ((_OURS, ours), (_DDP, ddp))},
        "ratio, median of the rounds": round(statistics.median(a / b for a, b in zip(ours, ddp, strict=True)), 3),
        "ratio of the least": round(min(ours) / min(ddp), 3),
    }


def _make_model(width: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def _with_horovod(width: int) -> Callable[[], None]:
    model = _make_model(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return _step(model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()), width)


def _with_ddp(width: int) -> Callable[[], None]:
    model = DistributedDataParallel(_make_model(width))
    return _step(model, torch.optim.SGD(model.parameters(), lr=1e-3), width)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> Callable[[], None]:
    inputs, targets = torch.randn(BATCH, width), torch.randn(BATCH, width)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
