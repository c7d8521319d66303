"""What the trainer adds to a step: `mpirun -n 2 python -m tests.training.overhead`.

Beside it is a loop written by hand, with the same model of 530,000 parameters, DDP, loader and optimizer. Rank 0 writes
docs/results/trainer-<ranks>-<MPI>.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpicomm
from tests import figures

ROUNDS, STEPS, BATCH = 15, 60, 64


def main() -> None:
    """Measure, and write what was found."""
    torch.set_num_threads(1)
    with mpicomm.bootstrap("mpi") as world:
        data = TensorDataset(
            torch.randn(STEPS * BATCH * world.size, 784), torch.zeros(STEPS * BATCH * world.size).long()
        )
        ways = {"by hand": by_hand(world, data), "trainer": by_trainer(data)}
        found = measure(ways)
    if world.rank == 0:
        figures.write(f"trainer-{world.size}", world.size, "tests.training.overhead", milliseconds_of_a_step=found)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


def by_hand(world: mpicomm.World, data: TensorDataset) -> Callable[[int], None]:
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sampler: DistributedSampler[int] = DistributedSampler(data, world.size, world.rank, seed=0)
    loader = DataLoader(data, BATCH, sampler=sampler)

    def epoch(number: int) -> None:
        sampler.set_epoch(number)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return epoch


def by_trainer(data: TensorDataset) -> Callable[[int], None]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trainer = mpicomm.Trainer(model, optimizer, nn.functional.cross_entropy, batch_size=BATCH, show="none")

    def epoch(number: int) -> None:
        trainer.fit(data, number + 1)

    return epoch


def measure(ways: dict[str, Callable[[int], None]]) -> dict[str, float]:
    """Return milliseconds of a step (collective)."""
    for epoch in ways.values():
        epoch(0)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1, ROUNDS + 1):
        for name, epoch in ways.items():
            dist.barrier()
            start = time.perf_counter()
            epoch(number)
            slowest = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[name].append(slowest.item())
    hand, ours = ([1e3 * each / STEPS for each in seconds[name]] for name in ("by hand", "trainer"))
    return {
        "by hand, least": round(min(hand), 3),
        "trainer, least": round(min(ours), 3),
        "by hand, median": round(statistics.median(hand), 3),
        "trainer, median": round(statistics.median(ours), 3),
        "added, percent of the least": round(100 * (min(ours) / min(hand) - 1), 1),
        "added, median of the rounds' percent": round(
            statistics.median(100 * (b / a - 1) for a, b in zip(hand, ours, strict=True)), 1
        ),
    }


if __name__ == "__main__":
    main()
