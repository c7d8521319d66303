"""Partition of an epoch into steps and batches: each sample once, for any number of ranks and any interruption."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from mpicomm.training.data import DataRank, LoaderOptions, Step
from mpicomm.training.data_argument import make_source
from mpicomm.training.indexed_data import EpochPartition, IndexedSource
from mpicomm.training.streamed_data import IterableSource, LoaderSource

sizes = st.integers(1, 7)


@given(st.integers(1, 200), sizes, sizes, sizes)
def test_every_sample_is_in_one_batch_of_one_rank(
    length: int, batch_size: int, grad_accum_steps: int, size: int
) -> None:
    partition = EpochPartition(length, batch_size, grad_accum_steps, size)
    taken = []
    for start, end in partition.bounds(0):
        ranks = [partition.batches(start, end, rank) for rank in range(size)]
        assert len({len(batches) for batches in ranks}) == 1
        lengths = [len(range(length)[each]) for batches in ranks for each in batches]
        assert max(lengths) <= batch_size + 1
        assert max(lengths) - min(lengths) <= 1 or end - start < size * grad_accum_steps
        taken += [index for batches in ranks for each in batches for index in range(length)[each]]
    assert sorted(taken) == list(range(length))


def numbers(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length), torch.arange(length))


def taken(steps: list[list[Step]]) -> list[int]:
    """Return the counted samples of all ranks."""
    batches = [batch for of_rank in steps for step in of_rank for batch in step.batches]
    return [int(each) for batch in batches for each in batch.content[0][: batch.count]]


def test_a_drop_last_that_drops_all_samples_is_refused() -> None:
    with pytest.raises(ValueError, match=r"drop_last=True requires .* step of 30 x 1 x 2 samples .*, got 20\."):
        make_source(DataLoader(numbers(20), batch_size=30, drop_last=True), LoaderOptions(), DataRank(0, 2))


class Numbers(IterableDataset[torch.Tensor]):
    def __init__(self, length: int, start: int = 0) -> None:
        self.length, self.start = length, start

    def __iter__(self):
        return iter(zip(*[torch.arange(self.start, self.start + self.length)] * 2, strict=True))


@pytest.mark.parametrize("shard", [None, True])
def test_a_stream_that_splits_itself_by_rank_has_other_first_samples(shard: bool | None) -> None:
    sources = [IterableSource(Numbers(8, rank), LoaderOptions(4), DataRank(rank, 2), shard) for rank in range(2)]
    for each in sources:
        next(each.steps(0, 0, 0), None)
    assert sources[0].first_samples != sources[1].first_samples
    assert sources[0].is_first_compared == (shard is None)


class Shuffled(Numbers):
    def __iter__(self) -> Iterator[Any]:
        numbers = list(super().__iter__())
        return iter(random.sample(numbers, len(numbers)))


def test_own_shares_shuffle_differently_on_each_rank() -> None:
    sources = [make_source(Shuffled(64), LoaderOptions(), DataRank(rank, 2), shard=False) for rank in range(2)]
    assert taken([list(sources[0].steps(0, 0, 0))]) != taken([list(sources[1].steps(0, 0, 0))])


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return itertools.islice(super().__iter__(), 1)


@pytest.mark.parametrize(
    ("loader", "shard", "message"),
    [
        (Own(numbers(8), 2), None, r"Own has an __iter__ of its own.*\nSet shard=False"),
        (DataLoader(numbers(8), batch_sampler=[[0, 1]]), True, r"shard=True requires .* batch_sampler"),
        (DataLoader(Numbers(8), 2), True, r"shard=True requires .* iterable-style"),
        (DataLoader(numbers(8), sampler=DistributedSampler(numbers(8), 2, 0)), True, "got a DistributedSampler"),
    ],
)
def test_loaders_that_cannot_be_shared_are_refused(loader: Any, shard: bool | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_source(loader, LoaderOptions(), DataRank(0, 2), shard=shard)


class Noisy(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + torch.rand(()), y


def test_random_samples_of_workers_depend_on_seed_epoch_and_sample_alone() -> None:
    def content(num_workers: int, epoch: int, consumed: int) -> torch.Tensor:
        data = Noisy(torch.zeros(12), torch.zeros(12))
        shared = IndexedSource(data, LoaderOptions(3, 1, num_workers, seed=9, shuffle=False), DataRank(0, 1))
        steps = list(shared.steps(epoch, consumed, 0))
        found = torch.cat([each.content[0] for step in steps for each in step.batches])
        shared.close()
        return found

    before = torch.get_rng_state()
    whole = content(1, 1, 0)
    assert torch.equal(torch.get_rng_state(), before), "the program's own numbers are left alone"
    torch.manual_seed(1)
    assert torch.equal(content(2, 1, 0), whole)
    assert torch.equal(content(1, 1, 6), whole[6:])
    assert not torch.equal(content(1, 2, 0), whole)
    assert len(set(whole.tolist())) == 12
    torch.manual_seed(7)
    drawn = torch.rand(12)
    torch.manual_seed(7)
    assert torch.equal(content(0, 1, 0), drawn), "without workers they are the program's own"


def test_unsupported_data_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a dataset .* or a DataLoader, got a generator"):
        make_source((each for each in range(3)), LoaderOptions(), DataRank(0, 1))
    with pytest.raises(ValueError, match="the dataset must have at least one sample, got 0"):
        make_source(numbers(0), LoaderOptions(), DataRank(0, 1))


class Remembering:
    """A sampler whose order depends on a state of its own."""

    def __init__(self) -> None:
        self.random = random.Random(1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(20), 20))


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(numbers(20), sampler=range(3)), None),
        (DataLoader(numbers(20), sampler=DistributedSampler(numbers(20), 2, 0)), None),
        (
            DataLoader(numbers(20), sampler=Remembering()),
            r"Remembering has no set_epoch.*\nGive Remembering a set_epoch",
        ),
        (
            DataLoader(numbers(20), sampler=range(3), num_workers=1),
            r"random numbers after a resume.*\nSet num_workers=0",
        ),
        (DataLoader(Numbers(20), batch_size=2), r"DataLoader of Numbers are read again.*\nMake them depend only on"),
    ],
)
def test_data_that_cannot_be_resumed_exactly_have_a_reason(loader: Any, reason: str | None) -> None:
    found = make_source(loader, LoaderOptions(), DataRank(0, 2)).inexact_reason
    assert found is None if reason is None else re.match(f".*{reason}", found)


def test_the_remedy_for_a_share_of_each_rank_is_not_what_the_user_has_passed() -> None:
    found = make_source(numbers(20), LoaderOptions(num_workers=1), DataRank(0, 2), shard=False).inexact_reason
    assert found is not None
    assert found.endswith("Set num_workers=0 unless the dataset draws no random numbers")


@pytest.mark.parametrize(
    "sampler", [RandomSampler(range(20), num_samples=7), RandomSampler(range(20), replacement=True)]
)
def test_a_sampler_of_torchs_that_takes_others_is_taken_as_it_is(sampler: RandomSampler) -> None:
    assert isinstance(
        make_source(DataLoader(numbers(20), batch_size=3, sampler=sampler), LoaderOptions(), DataRank(0, 2)),
        LoaderSource,
    )
