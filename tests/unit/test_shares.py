"""Partition of an epoch into steps and batches: each sample once, for any number of ranks and any interruption."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from mpicomm.training.data import (
    DataRank,
    EpochPartition,
    IndexedSource,
    IterableSource,
    LoaderOptions,
    LoaderSource,
    Step,
    make_source,
)

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


@given(st.integers(1, 200), sizes, sizes, st.integers(1, 4), st.integers(1, 4), st.integers(0, 30))
def test_another_number_of_ranks_resumes(
    length: int, batch_size: int, grad_accum_steps: int, before: int, after: int, steps: int
) -> None:
    first, second = (EpochPartition(length, batch_size, grad_accum_steps, size) for size in (before, after))
    bounds = list(first.bounds(0))[:steps]
    consumed = bounds[-1][1] if bounds else 0
    taken = [index for start, end in bounds for index in _of(first, start, end)]
    taken += [index for start, end in second.bounds(consumed) for index in _of(second, start, end)]
    assert sorted(taken) == list(range(length))


def _of(partition: EpochPartition, start: int, end: int) -> list[int]:
    return [
        index
        for rank in range(partition.size)
        for each in partition.batches(start, end, rank)
        for index in range(end)[each]
    ]


@given(st.integers(1, 100), sizes, sizes, sizes)
def test_steps_are_whole_where_the_last_is_dropped(
    length: int, batch_size: int, grad_accum_steps: int, size: int
) -> None:
    whole = batch_size * grad_accum_steps * size
    bounds = list(EpochPartition(length, batch_size, grad_accum_steps, size, drop_last=True).bounds(0))
    assert bounds == [(start, start + whole) for start in range(0, length - whole + 1, whole)]


def numbers(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length), torch.arange(length))


def taken(steps: list[list[Step]]) -> list[int]:
    """Return the counted samples of all ranks."""
    batches = [batch for of_rank in steps for step in of_rank for batch in step.batches]
    return [int(each) for batch in batches for each in batch.content[0][: batch.count]]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("length", "size"), [(37, 3), (2, 4), (64, 2)])
def test_ranks_share_a_dataset(length: int, size: int, num_workers: int) -> None:
    orders = []
    for epoch in range(2):
        steps = []
        for rank in range(size):
            shared = IndexedSource(numbers(length), LoaderOptions(4, 2, num_workers, seed=3), DataRank(rank, size))
            steps.append(list(shared.steps(epoch, 0, 0)))
            shared.close()
        assert len({len(of_rank) for of_rank in steps}) == 1
        orders.append(taken(steps))
        assert sorted(orders[-1]) == list(range(length))
    assert length < 3 or orders[0] != orders[1], "each epoch has an order of its own"
    for step in (step for of_rank in steps for step in of_rank):
        for each in step.batches:
            assert list(each.content[0][: each.count]) == list(each.indices or ())


def test_a_loader_of_the_usual_kind_is_shared() -> None:
    loader = DataLoader(numbers(20), batch_size=3, collate_fn=lambda pairs: (torch.stack([x for x, _ in pairs]), None))
    steps = [list(make_source(loader, LoaderOptions(99, 2), DataRank(rank, 2)).steps(0, 0, 0)) for rank in range(2)]
    assert taken(steps[:1])[:3] == [0, 2, 4], "it does not shuffle, since the loader does not"
    assert sorted(taken(steps)) == list(range(20))


def test_drop_last_of_the_loader_is_respected() -> None:
    loader = DataLoader(numbers(20), batch_size=3, drop_last=True)
    shared = make_source(loader, LoaderOptions(), DataRank(0, 2))
    assert (shared.total(), len(list(shared.steps(0, 0, 0)))) == (18, 3)
    with pytest.raises(ValueError, match=r"drop_last=True requires .* step of 30 x 1 x 2 samples .*, got 20\."):
        make_source(DataLoader(numbers(20), batch_size=30, drop_last=True), LoaderOptions(), DataRank(0, 2))


def test_a_sampler_of_the_users_own_is_taken_as_it_is() -> None:
    loader = DataLoader(numbers(20), batch_size=3, sampler=WeightedRandomSampler(torch.ones(20), 10))
    own = make_source(loader, LoaderOptions(grad_accum_steps=2), DataRank(1, 2))
    assert isinstance(own, LoaderSource)
    assert not own.is_shared
    assert [len(step.batches) for step in own.steps(0, 0, 0)] == [2, 2]
    assert [step.count for step in own.steps(0, 0, 1)] == [4]


def test_a_sampler_of_the_users_own_gets_the_number_of_the_epoch() -> None:
    samplers = [DistributedSampler(numbers(20), 2, rank) for rank in range(2)]
    feeds = [
        make_source(DataLoader(numbers(20), 4, sampler=each), LoaderOptions(), DataRank(0, 2)) for each in samplers
    ]
    first, second = ([taken([list(each.steps(epoch, 0, 0))]) for each in feeds] for epoch in range(2))
    for shares in (first, second):
        assert sorted(shares[0] + shares[1]) == list(range(20))
    assert first != second, "each epoch has its own order"


class Numbers(IterableDataset[torch.Tensor]):
    def __init__(self, length: int, start: int = 0) -> None:
        self.length, self.start = length, start

    def __iter__(self):
        return iter(zip(*[torch.arange(self.start, self.start + self.length)] * 2, strict=True))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("length", [1, 23, 48])
def test_ranks_share_a_stream(length: int, num_workers: int) -> None:
    size = 2
    feeds = [
        IterableSource(Numbers(length), LoaderOptions(4, 2, num_workers), DataRank(rank, size)) for rank in range(size)
    ]
    steps = [list(each.steps(0, 0, 0)) for each in feeds]
    assert sorted(taken(steps)) == list(range(length))
    first = [of_rank[:1] for of_rank in steps]
    consumed = len(taken(first))
    others = [IterableSource(Numbers(length), LoaderOptions(4, 2, num_workers), DataRank(rank, 3)) for rank in range(3)]
    rest = [list(each.steps(0, consumed, 1)) for each in others]
    assert sorted(taken(first) + taken(rest)) == list(range(length)), "three ranks go on where two were"
    for each in (*feeds, *others):
        each.close()


class SplitByWorker(Numbers):
    """Divides its samples among the workers, as in torch's documentation."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return itertools.islice(super().__iter__(), first, None, step)


class Shuffled(Numbers):
    """Yields its samples in a random order."""

    def __iter__(self):
        return iter(random.sample(list(super().__iter__()), self.length))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [SplitByWorker, Shuffled])
def test_ranks_share_a_stream_that_splits_itself_by_worker_or_shuffles(kind: type[Numbers], num_workers: int) -> None:
    feeds = [IterableSource(kind(64), LoaderOptions(4, 2, num_workers), DataRank(rank, 2)) for rank in range(2)]
    before = random.getstate()
    steps = [list(each.steps(0, 0, 0)) for each in feeds]
    assert sorted(taken(steps)) == list(range(64))
    assert random.getstate() == before
    assert len({digest for each in feeds for digest in each.first_samples[1]}) == 1
    assert taken([list(feeds[0].steps(0, 32, 2))]) == taken([steps[0][2:]]), "it resumes with the same samples"
    for each in feeds:
        each.close()


@pytest.mark.parametrize("shard", [None, True])
def test_a_stream_that_splits_itself_by_rank_has_other_first_samples(shard: bool | None) -> None:
    sources = [IterableSource(Numbers(8, rank), LoaderOptions(4), DataRank(rank, 2), shard) for rank in range(2)]
    for each in sources:
        next(each.steps(0, 0, 0), None)
    assert sources[0].first_samples != sources[1].first_samples
    assert sources[0].is_first_compared == (shard is None)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [numbers, Numbers, SplitByWorker, Shuffled])
def test_own_shares_are_used_once_and_resume_at_every_step(kind: Any, num_workers: int) -> None:
    own = make_source(kind(10), LoaderOptions(2, 2, num_workers), DataRank(1, 2), shard=False)
    steps = list(own.steps(0, 0, 0))
    assert sorted(taken([steps])) == list(range(10))
    assert [step.count for step in steps] == [4, 4, 2]
    assert (own.is_shared, own.total(), own.layout) == (False, None, {"kind": "a share of each rank"})
    for number in range(4):
        assert taken([list(own.steps(0, 99, number))]) == taken([steps[number:]])
    own.close()


def test_own_shares_shuffle_differently_on_each_rank() -> None:
    sources = [make_source(Shuffled(64), LoaderOptions(), DataRank(rank, 2), shard=False) for rank in range(2)]
    assert taken([list(sources[0].steps(0, 0, 0))]) != taken([list(sources[1].steps(0, 0, 0))])


@pytest.mark.parametrize("sampler", [SequentialSampler(range(16)), RandomSampler(range(16))])
def test_samples_outside_of_the_sampler_are_not_used(sampler: Any) -> None:
    loader = DataLoader(numbers(64), batch_size=3, sampler=sampler)
    steps = [list(make_source(loader, LoaderOptions(), DataRank(rank, 2)).steps(0, 0, 0)) for rank in range(2)]
    assert sorted(taken(steps)) == list(range(16))


def test_ranks_share_the_samples_of_a_sampler() -> None:
    """All ranks draw the same order, whatever the generators of their programs hold."""
    chosen = range(5, 22)
    loader = DataLoader(numbers(64), batch_size=3, sampler=SubsetRandomSampler(chosen))
    feeds = [make_source(loader, LoaderOptions(), DataRank(rank, 2), shard=True) for rank in range(2)]
    orders = [taken([list(each.steps(epoch, 0, 0)) for each in feeds]) for epoch in range(2)]
    assert [sorted(order) for order in orders] == [list(chosen)] * 2
    assert orders[0] != orders[1]


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


def seeded(kind: Any, *args: Any) -> Any:
    return kind(*args, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "loading",
    [
        lambda: {"sampler": WeightedRandomSampler(torch.ones(20), 14), "batch_size": 2},
        lambda: {"sampler": seeded(RandomSampler, range(20), True), "batch_size": 2, "num_workers": 1},
        lambda: {"sampler": seeded(SubsetRandomSampler, range(14)), "batch_size": 2},
        lambda: {"batch_sampler": BatchSampler(RandomSampler(range(20), num_samples=14), 2, drop_last=True)},
        lambda: {"shuffle": True, "batch_size": 2},
    ],
)
def test_an_own_order_resumes_at_every_step(loading: Callable[[], Any]) -> None:
    """The order depends on the epoch, not on the state of the generators at the resume."""

    def order(source: Any, epoch: int, steps: int) -> list[int]:
        return taken([list(source.steps(epoch, 0, steps))])

    def source() -> Any:
        return make_source(DataLoader(numbers(20), **loading()), LoaderOptions(1, 2), DataRank(1, 2), shard=False)

    whole = source()
    before = torch.get_rng_state()
    orders = [order(whole, epoch, 0) for epoch in range(2)]
    assert torch.equal(torch.get_rng_state(), before), "the generator of the program is unchanged"
    assert orders[0] != orders[1]
    whole.close()
    assert order(whole, 0, 0) == orders[0]
    torch.manual_seed(99)
    for epoch, steps in itertools.product(range(2), range(4)):
        resumed = source()
        assert order(resumed, epoch, steps) == orders[epoch][4 * steps :]
        resumed.close()


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
    found = make_source(loader, LoaderOptions(), DataRank(0, 2)).inexact
    assert found is None if reason is None else re.match(f".*{reason}", found)


def test_the_remedy_for_a_share_of_each_rank_is_not_what_the_user_has_passed() -> None:
    found = make_source(numbers(20), LoaderOptions(num_workers=1), DataRank(0, 2), shard=False).inexact
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
