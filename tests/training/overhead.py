"""What the trainer adds to a step: `mpirun -n 2 python -m tests.training.overhead`.

Beside it is a loop written by hand, with the same model of 530,000 parameters, DDP, loader and optimizer. Rank 0 writes
docs/results/trainer-<ranks>-<MPI>.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import mpicomm
from mpicomm.training.data import Feed
from tests import figures

ROUNDS, STEPS, BATCH = 60, 50, 64


def main() -> None:
    """Measure, and write what was found."""
    torch.set_num_threads(1)
    with mpicomm.bootstrap("mpi") as world:
        count = STEPS * BATCH * world.size
        tensors = TensorDataset(torch.randn(count, 784), torch.zeros(count).long())
        datasets = {"a dataset of the user's": Pairs(tensors), "a TensorDataset": tensors}
        found = {name: measure(world, data) for name, data in datasets.items()}
    if world.rank == 0:
        figures.write(f"trainer-{world.size}", world.size, "tests.training.overhead", milliseconds_of_a_step=found)


class Pairs(Dataset[Any]):
    """A dataset of which the trainer knows nothing."""

    def __init__(self, pairs: TensorDataset) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Any:
        return self._pairs[index]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


def by_hand(world: mpicomm.World, data: Any) -> Callable[[int], None]:
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


def measure(world: mpicomm.World, data: Any) -> dict[str, float]:
    """Return milliseconds of a step: an epoch of the trainer's and one by hand in turn (collective)."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trainer = mpicomm.Trainer(model, optimizer, nn.functional.cross_entropy, batch_size=BATCH, show="none")
    epoch_by_hand = by_hand(world, data)
    ours: list[float] = []
    hand: list[float] = []
    train_epoch = trainer._train_epoch

    def both(feed: Feed) -> None:
        ours.append(_time(lambda: train_epoch(feed)))
        hand.append(_time(lambda: epoch_by_hand(trainer.position.epoch)))

    trainer._train_epoch = both  # type: ignore[method-assign]
    trainer.fit(data, ROUNDS + 1)
    ours, hand = ours[1:], hand[1:]  # the first have warmed up
    added = [100 * (mine / theirs - 1) for mine, theirs in zip(ours, hand, strict=True)]
    return {
        "by hand, least": round(min(hand), 3),
        "trainer, least": round(min(ours), 3),
        "by hand, median": round(statistics.median(hand), 3),
        "trainer, median": round(statistics.median(ours), 3),
        "added, percent of the least": round(100 * (min(ours) / min(hand) - 1), 1),
        "added, percent, median of the rounds": round(statistics.median(added), 1),
    }


def _time(epoch: Callable[[], None]) -> float:
    """Return the milliseconds of a step of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    epoch()
    slowest = torch.tensor(1e3 * (time.perf_counter() - start) / STEPS)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


if __name__ == "__main__":
    main()
