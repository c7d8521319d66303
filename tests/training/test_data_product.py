"""Kinds of data x workers x ranks, interrupted after each step of two epochs: no sample is lost, repeated or replaced.

The sources of all ranks run in one process, in which the steps are taken as the trainer takes them; under mpirun, the
trainer itself takes them. The reference is torch's DataLoader in a single process without workers.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import mpicomm
from mpicomm.training.data import Batch, DataRank, LoaderOptions, Step
from mpicomm.training.data_argument import make_source

LENGTH = 23  # uneven for 2 to 4 ranks
BATCH = 2
EPOCHS = range(2)
SIZES = range(1, 5)

Taken = list[list[list[int]]]
"""The samples of a step by rank and batch."""


def tensors(samples: Iterable[int]) -> TensorDataset:
    return TensorDataset(*[torch.tensor(list(samples))] * 2)


class Numbers(Dataset[Any]):
    """A dataset with indices whose samples are their own indices."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return (torch.tensor(index),) * 2


class Stream(IterableDataset[Any]):
    def __init__(self, samples: Sequence[int] = range(LENGTH)) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(tensors(self.samples))


class StreamByWorker(Stream):
    """Divides its samples among the workers, as in torch's documentation."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return itertools.islice(super().__iter__(), first, None, step)


class ShuffledStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        return iter(tensors(random.sample(self.samples, len(self.samples))))


class StreamOfEpoch(Stream):
    """Begins with another sample in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        first = 5 * (self.epoch + 1)
        return iter(tensors([*self.samples[first:], *self.samples[:first]]))


class StreamOfLength(Stream):
    """Has a length, which can be an estimate."""

    length = LENGTH

    def __len__(self) -> int:
        return self.length


class StreamOfWrongLength(StreamOfLength):
    length = 4 * BATCH


class Remembering:
    """A sampler whose order depends on the earlier epochs."""

    def __init__(self) -> None:
        self.random = random.Random(1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(LENGTH), LENGTH))


class FirstBatches(DataLoader[Any]):
    """A DataLoader with an __iter__ of its own."""

    def __iter__(self) -> Any:
        return itertools.islice(super().__iter__(), 5)


@dataclasses.dataclass(frozen=True)
class Row:
    """A kind of data, and what the documentation promises for it."""

    data: Callable[[DataRank, int, int], Any]
    """Returns the data that a rank passes, with a batch size and a number of workers."""

    shard: bool | None = None
    is_drawn: bool = False
    """Whether the order of an epoch is random."""

    repeats_samples: bool = False
    drops_last: bool = False
    changes: bool = False
    """Whether the order depends on the epoch, without being random."""

    inexact: bool = False
    """Whether a run that resumes within an epoch may take other samples."""


def loader(dataset: Any = Numbers, **options: Any) -> Callable[[DataRank, int, int], Any]:
    """Return a function that makes a DataLoader; an option that is a function gets the rank."""

    def data(place: DataRank, batch: int, workers: int) -> Any:
        given = {name: each(place) if callable(each) else each for name, each in options.items()}
        sizes = {} if "batch_sampler" in given else {"batch_size": batch}
        return DataLoader(dataset(), **{**sizes, **given}, num_workers=workers)  # type: ignore[arg-type]

    return data


def share(place: DataRank) -> range:
    """Return the samples of a rank, of which the ranks have different numbers."""
    return range(place.rank, LENGTH - 6 * (place.rank == 1), place.size)


def seeded(kind: Any, *arguments: Any) -> Any:
    return kind(*arguments, generator=torch.Generator().manual_seed(5))


def first_batches(place: DataRank, batch: int, workers: int) -> Any:
    return FirstBatches(Numbers(), batch, num_workers=workers)


def by_rank(**options: Any) -> Callable[[DataRank], Any]:
    return lambda place: DistributedSampler(Numbers(), place.size, place.rank, **options)  # type: ignore[arg-type]


SHARED = {
    "tensors": Row(lambda *_: tensors(range(LENGTH)), is_drawn=True),
    "dataset": Row(lambda *_: Numbers(), is_drawn=True),
    "fewer samples than ranks": Row(lambda *_: tensors(range(3)), is_drawn=True),
    "loader in order": Row(loader()),
    "loader that shuffles": Row(loader(shuffle=True), is_drawn=True),
    "loader with drop_last": Row(loader(drop_last=True), drops_last=True),
    "loader that shuffles with drop_last": Row(loader(shuffle=True, drop_last=True), is_drawn=True, drops_last=True),
    "sampler over a part": Row(loader(sampler=SequentialSampler(range(16)))),
    "random sampler over a part": Row(loader(sampler=RandomSampler(range(16))), is_drawn=True),
    "list as sampler": Row(loader(sampler=[*range(20, 3, -1)]), shard=True),
    "random sampler": Row(loader(sampler=lambda _: SubsetRandomSampler(range(5, 22))), shard=True, is_drawn=True),
    "iterable": Row(lambda *_: Stream()),
    "iterable that splits itself by worker": Row(lambda *_: StreamByWorker()),
    "iterable that shuffles": Row(lambda *_: ShuffledStream(), is_drawn=True),
    "iterable of exact length": Row(lambda *_: StreamOfLength()),
    "iterable of wrong length": Row(lambda *_: StreamOfWrongLength()),
    "iterable with set_epoch": Row(lambda *_: StreamOfEpoch(), changes=True),
}
OWN = {
    "own dataset": Row(lambda place, *_: tensors(share(place)), shard=False, is_drawn=True),
    "own sampler in order": Row(loader(sampler=share)),
    "own sampler with drop_last": Row(loader(sampler=share, drop_last=True)),
    "own loader that shuffles": Row(loader(shuffle=True), shard=False, is_drawn=True),
    "DistributedSampler": Row(loader(sampler=by_rank()), changes=True),
    "DistributedSampler with drop_last": Row(loader(sampler=by_rank(drop_last=True), drop_last=True), changes=True),
    "sampler of a part": Row(loader(sampler=lambda place: SubsetRandomSampler(share(place))), is_drawn=True),
    "WeightedRandomSampler": Row(
        loader(sampler=lambda place: WeightedRandomSampler([1.0] * LENGTH, len(share(place)))),
        is_drawn=True,
        repeats_samples=True,
    ),
    "sampler with a generator": Row(
        loader(sampler=lambda _: seeded(RandomSampler, range(LENGTH), True)), is_drawn=True, repeats_samples=True
    ),
    "sampler that remembers": Row(loader(sampler=lambda _: Remembering()), is_drawn=True, inexact=True),
    "batches in a list": Row(loader(batch_sampler=lambda place: [[0, 1, 2], [3], [4, 5], [6]] + [[7, 8]] * place.rank)),
    "batch sampler": Row(
        loader(batch_sampler=lambda place: BatchSampler(SubsetRandomSampler(share(place)), 3, drop_last=False)),
        is_drawn=True,
    ),
    "batch sampler with drop_last": Row(
        loader(batch_sampler=lambda _: BatchSampler(RandomSampler(range(LENGTH)), 3, drop_last=True)),
        is_drawn=True,
        repeats_samples=True,  # which samples it drops is random
    ),
    "loader of whole batches": Row(
        lambda place, _, workers: DataLoader(
            tensors(range(LENGTH)), batch_size=None, sampler=[[0, 1], [2, 3, place.rank], [4]], num_workers=workers
        ),
        inexact=True,
    ),
    "loader of an iterable": Row(
        lambda place, batch, workers: DataLoader(StreamByWorker(share(place)), batch, num_workers=workers), inexact=True
    ),
    "loader with an __iter__": Row(first_batches, shard=False, inexact=True),
    "own iterable": Row(lambda place, *_: Stream(share(place)), shard=False),
    "own iterable that splits itself by worker": Row(lambda place, *_: StreamByWorker(share(place)), shard=False),
}
ROWS = SHARED | OWN

seeds = itertools.count()


def accum_of(size: int) -> int:
    """Return the trainer's `grad_accum_steps` in the tests with a number of ranks."""
    return 2 - size % 2


class Ranks:
    """The data sources of all ranks of a new job, in one process."""

    def __init__(self, row: Row, size: int, workers: int = 0, batch: int = BATCH, data: Sequence[Any] = ()) -> None:
        seed = next(seeds)  # the random states of the program differ from those of the job before
        torch.manual_seed(seed)
        random.seed(seed)
        options = LoaderOptions(batch, accum_of(size), workers, seed=3)
        places = [DataRank(rank, size) for rank in range(size)]
        self.data = data or [row.data(place, batch, workers) for place in places]
        self.sources = [
            make_source(data, options, place, shard=row.shard) for data, place in zip(self.data, places, strict=True)
        ]

    def steps(self, epoch: int, consumed: int = 0, steps: int = 0) -> list[Taken]:
        """Return the samples of the remaining steps, until no rank has samples left, as `aligned_steps`."""
        remaining = [source.steps(epoch, consumed, steps) for source in self.sources]
        found = []
        for of_ranks in iter(lambda: [next(each, Step([])) for each in remaining], None):
            if not (count := sum(step.count for step in of_ranks)):
                break
            assert not self.sources[0].is_counted or {step.total for step in of_ranks} == {count}
            found.append([[samples_of(batch) for batch in step.batches if batch.count] for step in of_ranks])
        firsts = [set(each.first_samples[1]) for each in self.sources if each.first_samples]
        assert all(len(of_rank) == 1 for of_rank in firsts)
        assert not self.sources[0].is_shared or len(set().union(*firsts)) <= 1
        return found

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.sources:
            each.close()


def samples_of(batch: Batch) -> list[int]:
    samples = batch.content[0][: batch.count].tolist()
    assert batch.indices in (None, samples)
    return samples


def flat(nested: Any) -> list[int]:
    return [nested] if isinstance(nested, int) else [sample for each in nested for sample in flat(each)]


def alone(row: Row, place: DataRank, epoch: int, batch: int, workers: int = 0) -> list[list[int]]:
    """Return the batches of torch's DataLoader for the data of a rank."""
    data = row.data(place, batch, workers)
    own = data if isinstance(data, DataLoader) else DataLoader(data, batch)
    for each in (own.sampler, own.dataset):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
    return [each[0].tolist() for each in own]


def order_of(row: Row, epoch: int) -> list[int]:
    """Return the order in which one process takes the samples that the ranks share."""
    whole = flat(alone(row, DataRank(0, 1), epoch, 1))
    with Ranks(row, 1, batch=1) as single:
        order = flat(single.steps(epoch))
    assert sorted(order) == sorted(whole)
    assert order == whole or row.is_drawn
    return order


def check_shared(row: Row, whole: int, steps: list[Taken], order: list[int]) -> None:
    """Compare steps of `whole` samples with an order: each takes the next samples, drop_last drops those at its end."""
    sizes = [len(flat(step)) for step in steps]
    for size, step in zip(sizes, steps, strict=True):
        assert sorted(flat(step)) == sorted(order[:size])
        order = order[size:]
    assert set(sizes[:-1]) <= {whole}
    assert (set(sizes) <= {whole} and len(order) < whole) if row.drops_last else not order


def check_own(row: Row, batches: list[list[int]], expected: list[list[int]]) -> None:
    """Compare the batches of a rank with those of its DataLoader."""
    if row.is_drawn:
        assert [len(each) for each in batches] == [len(each) for each in expected]
        assert sorted(flat(batches)) == sorted(flat(expected)) or row.repeats_samples
    else:
        assert batches == expected


def check(
    name: str, workers: int, size: int, interrupts: Callable[[int], Iterable[int]], others: Iterable[int] = ()
) -> None:
    """Compare the epochs of a job with one process, and the rest of an epoch after an interruption with the whole.

    Args:
        name: The name of the row.
        workers: The number of workers.
        size: The number of ranks.
        interrupts: Returns after how many steps to interrupt an epoch, which has the number of steps that it gets.
        others: Other numbers of ranks, on which to resume if the ranks share the samples.
    """
    row, is_own = ROWS[name], name in OWN
    # 1. two epochs, which leave the generators as they were, those of the program and of the samplers
    with Ranks(row, size, workers) as ranks:
        before = random.getstate(), torch.get_rng_state().tolist()
        epochs = [ranks.steps(epoch) for epoch in EPOCHS]
        assert (random.getstate(), torch.get_rng_state().tolist()) == before or row.inexact
        for source in ranks.sources:
            assert source.is_shared != is_own
            assert not source.is_counted or source.total() == len(flat(epochs[0]))
            has_own_workers = is_own and workers > 0 and not isinstance(ranks.data[0], IterableDataset)
            assert (source.inexact_reason is not None) == (row.inexact or has_own_workers)
    if not (workers or row.inexact):
        with Ranks(row, size, data=ranks.data) as ranks:
            assert ranks.steps(0) == epochs[0]
    assert (epochs[0] != epochs[1]) == (row.is_drawn or row.changes)
    # 2. their samples
    orders = [[] if is_own else order_of(row, epoch) for epoch in EPOCHS]
    for epoch, steps in enumerate(epochs):
        if not is_own:
            check_shared(row, BATCH * accum_of(size) * size, steps, orders[epoch])
            continue
        for rank in range(size):
            own_workers = workers if row.inexact else 0  # the order of an iterable dataset depends on them
            expected = alone(row, DataRank(rank, size), epoch, BATCH, own_workers)
            check_own(row, [batch for step in steps for batch in step[rank]], expected)
    # 3. interruptions, which may not change what the sources of new processes take
    for epoch, steps in enumerate(epochs):
        for number in interrupts(len(steps)) if not (row.inexact and row.is_drawn) else ():
            consumed = len(flat(steps[:number]))
            with Ranks(row, size, workers) as resumed:
                assert resumed.steps(epoch, consumed, number) == steps[number:]
            for other in others if not is_own else ():
                with Ranks(row, other, workers) as resumed:
                    rest = resumed.steps(epoch, consumed, number)
                check_shared(row, BATCH * accum_of(other) * other, rest, orders[epoch][consumed:])


def with_workers(*numbers: int) -> pytest.MarkDecorator:
    """Return the parameters of a test: each row with each number of workers."""
    return pytest.mark.parametrize(("name", "workers"), itertools.product(ROWS, numbers))


@pytest.mark.parametrize("size", SIZES)
@with_workers(0)
def test_each_interruption(name: str, workers: int, size: int) -> None:
    check(name, workers, size, lambda steps: range(steps + 1), [size % 4 + 1])


@with_workers(2)
def test_an_interruption_with_workers(name: str, workers: int) -> None:
    check(name, workers, 3, lambda steps: [steps // 2])


@pytest.mark.parametrize("size", SIZES)
@with_workers(0, 2, 4)
def test_whole_product(name: str, workers: int, size: int) -> None:
    check(name, workers, size, lambda steps: range(steps + 1), [] if workers else SIZES)


class Weights(nn.Module):
    """A model with a weight for each sample, whose gradient in a step is the share of the sample in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(LENGTH, dtype=torch.float64))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return self.weights[samples]


RESUMED = ("loader with drop_last", "random sampler", "iterable", "batch sampler", "loader of an iterable")
"""The rows in which a new trainer resumes from a checkpoint before each step; in the others, the trainer continues."""


@pytest.mark.mpi
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not (row.inexact and row.is_drawn)])
def test_a_trainer_interrupted_after_each_step(world: mpicomm.World, directory: Path, name: str) -> None:
    row, accum = ROWS[name], accum_of(world.size)
    with Ranks(row, world.size) as ranks:
        epochs = [ranks.steps(epoch) for epoch in EPOCHS]
    steps = [torch.tensor(flat(step)) for steps in epochs for step in steps]
    options = {"batch_size": BATCH, "grad_accum_steps": accum, "seed": 3, "progress": "none"}
    if name in RESUMED:
        options["checkpoint_dir"] = directory
    weights = torch.zeros(LENGTH, dtype=torch.float64)
    for number in range(len(steps) + 1):  # the last call ends the epoch of data whose end was unknown
        if name in RESUMED or not number:
            model = Weights()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            trainer = mpicomm.Trainer(model, optimizer, lambda outputs, _: -outputs.mean(), **options)
        data = row.data(DataRank(world.rank, world.size), BATCH, 0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore" if row.inexact else "error", "a run that resumes from a checkpoint within")
            history = trainer.fit(data, len(EPOCHS), max_steps=number + 1, shard=row.shard)
        if number == len(steps) - 1 and (name == "iterable of exact length" or (name in SHARED and "iter" not in name)):
            assert len(history) == len(EPOCHS)  # the length is known
        for step in steps[number : number + 1]:
            weights += torch.bincount(step, minlength=LENGTH).double() / len(step)
        torch.testing.assert_close(model.weights.detach(), weights)
    assert [each["samples"] for each in history] == [len(flat(each)) for each in epochs]
