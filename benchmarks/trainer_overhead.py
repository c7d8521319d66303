"""The time that the trainer adds to a training step: `mpirun -n 2 python -m benchmarks.trainer_overhead`.

The reference is a loop written by hand, with the same model of 530,000 parameters, DDP, loader and optimizer, which
also adds up its losses. Rank 0 writes docs/results/trainer-<ranks>-<MPI>.json.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import mpicomm
from benchmarks import rank_results
from mpicomm.training.training_loop import TrainingLoop

MODELS, ROUNDS, STEPS, BATCH = 6, 12, 50, 64


def main() -> None:
    """Measure, and write the results on rank 0."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the ranks share the samples
    with mpicomm.bootstrap("mpi") as world:
        count = STEPS * BATCH * world.size
        tensors = TensorDataset(torch.randn(count, 784), torch.zeros(count).long())
        datasets = {"a dataset of the user's": _Pairs(tensors), "a TensorDataset": tensors}
        found = {name: _measure(world, data) for name, data in datasets.items()}
    if world.rank == 0:
        what = "a training step by hand and with the trainer; epochs alternate"
        rank_results.write(f"trainer-{world.size}", world.size, what, milliseconds_of_a_step=found)


class _Pairs(Dataset[Any]):
    """A dataset of a type that the trainer does not optimise."""

    def __init__(self, pairs: TensorDataset) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Any:
        return self._pairs[index]


def _make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


def _make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _by_hand(world: mpicomm.World, data: Any, model: nn.Module) -> Callable[[int], float]:
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = _make_optimizer(model)
    sampler: DistributedSampler[int] = DistributedSampler(data, world.size, world.rank, seed=0)
    loader = DataLoader(data, BATCH, sampler=sampler)

    def epoch(number: int) -> float:
        sampler.set_epoch(number)
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total / len(loader)

    return epoch


def _measure(world: mpicomm.World, data: Any) -> dict[str, Any]:
    """Return milliseconds of a step (collective).

    The position of a model in memory changes the time by some percent, so the result includes several models of each
    kind.
    """
    ours: list[float] = []
    hand: list[float] = []
    of_models = []
    for number in range(MODELS):
        mine, theirs = _in_turn(world, data, ours_first=number % 2 == 0)
        of_models.append(_added(mine, theirs))
        ours += mine
        hand += theirs
    return {
        "by hand, least": round(min(hand), 3),
        "trainer, least": round(min(ours), 3),
        "by hand, median": round(statistics.median(hand), 3),
        "trainer, median": round(statistics.median(ours), 3),
        "added, percent of the least": round(100 * (min(ours) / min(hand) - 1), 1),
        "added, percent, median of the rounds": _added(ours, hand),
        "the same for each pair of models": sorted(of_models),
    }


def _added(ours: list[float], hand: list[float]) -> float:
    return round(statistics.median(100 * (mine / theirs - 1) for mine, theirs in zip(ours, hand, strict=True)), 1)


def _in_turn(world: mpicomm.World, data: Any, *, ours_first: bool) -> tuple[list[float], list[float]]:
    """Return the times of alternating epochs of the trainer and of the loop by hand (collective)."""
    models = [_make_model(), _make_model()]
    epoch_by_hand = _by_hand(world, data, models.pop(ours_first))
    model = models.pop()
    ours: list[float] = []
    hand: list[float] = []

    train_epoch = TrainingLoop._train_epoch

    def both(loop: TrainingLoop) -> bool:
        turns = [(ours, lambda: train_epoch(loop)), (hand, lambda: epoch_by_hand(loop.position.epoch))]
        for times, epoch in turns if len(ours) % 2 else reversed(turns):
            times.append(_time(epoch))
        return True

    with tempfile.TemporaryDirectory() as own:
        trainer = mpicomm.Trainer(
            model,
            _make_optimizer(model),
            nn.functional.cross_entropy,
            batch_size=BATCH,
            progress="none",
            checkpoint_dir=mpicomm.broadcast_object(own, src=0),
            save_every=STEPS * (ROUNDS + 1),
        )
        with mock.patch.object(TrainingLoop, "_train_epoch", both):
            trainer.fit(data, ROUNDS + 1)
    return ours[1:], hand[1:]  # without the first epochs, which are the warm-up


def _time(epoch: Callable[[], object]) -> float:
    """Return the milliseconds per step on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    epoch()
    slowest = torch.tensor(1e3 * (time.perf_counter() - start) / STEPS)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


if __name__ == "__main__":
    main()
