"""The data of a run: what every rank takes in each step, so that no sample is taken twice in an epoch and none is lost.

The order of an epoch is the same on all ranks, whatever their number, and a step takes the next samples of it. Where
the steps of an epoch were interrupted is therefore one number, from which any number of ranks can go on.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from mpicomm.training import preemption, randomness
from mpicomm.training.batches import count_samples

_SEED_BITS = 63
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # odd, so that no two (epoch, sample) are one seed by chance


@dataclasses.dataclass(slots=True)
class Batch:
    """What goes through the model at once."""

    content: Any
    """Inputs and targets in any structure (`mpicomm.training.batches`), as the loader made them."""

    count: int
    """How many samples it stands for; 0 if it only keeps this rank in step with the others."""

    indices: Sequence[int] | None = None
    """Which samples they are, where that is known."""


@dataclasses.dataclass(slots=True)
class Step:
    """What one rank takes in one step of the optimizer."""

    batches: Sequence[Batch]
    total: int | None = None
    """How many samples all ranks take, where each knows that by itself."""

    @property
    def count(self) -> int:
        """How many samples this rank takes."""
        return sum(batch.count for batch in self.batches)

    def stand_in(self) -> Step:
        """Return a step of the same length without samples that count."""
        return Step([dataclasses.replace(batch, count=0, indices=()) for batch in self.batches])

    def of_length(self, number: int) -> Step:
        """Return a step of so many batches, of which those that are added do not count; nothing comes of nothing."""
        more = list(self.stand_in().batches[:1]) * (number - len(self.batches))
        return dataclasses.replace(self, batches=[*self.batches[:number], *more])


class DataSource(Protocol):
    """The data of a run, as one rank takes them."""

    is_counted: bool
    """Whether every step has its `total`."""

    is_shared: bool
    """Whether the ranks share the samples, so that another number of them can go on."""

    def steps(self, epoch: int, consumed: int, steps: int) -> Iterator[Step]:
        """Return what is left of an epoch.

        Args:
            epoch: Its number, from 0.
            consumed: How many samples of it all ranks have taken before.
            steps: In how many steps.
        """

    def total(self) -> int | None:
        """Return the number of samples in an epoch, of all ranks; None if nobody knows."""

    def first(self) -> Step:
        """Return some batch of this rank's, or of any; nothing if there is none."""

    def close(self) -> None:
        """End the processes that load the data."""


@dataclasses.dataclass(frozen=True)
class LoaderOptions:
    """How data are loaded."""

    batch_size: int = 32
    """Samples per rank that go through the model at once."""

    grad_accum_steps: int = 1
    """Batches per step."""

    num_workers: int = 0
    """Processes per rank that load data."""

    pin_memory: bool = False
    seed: int = 0
    shuffle: bool = True


@dataclasses.dataclass(frozen=True)
class DataRank:
    """Which of the ranks this is."""

    rank: int
    size: int


def make_source(data: Any, options: LoaderOptions, place: DataRank) -> DataSource:
    """Return the data of a run as this rank takes them.

    Args:
        data: A dataset, with indices or without, or a DataLoader. Datasets are shared among the ranks; so is what an
            ordinary DataLoader loads, in batches of its size. A DataLoader with a sampler of the user's own, or with a
            dataset without indices, is taken as it is: its ranks must have shares of their own.

    Raises:
        TypeError: If it is none of these.
        ValueError: If there are no samples.
    """
    if isinstance(data, DataLoader):
        return _feed_of_loader(data, options, place)
    if isinstance(data, IterableDataset):
        return IterableSource(data, options, place)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return IndexedSource(data, options, place)
    raise TypeError(
        f"expected a dataset (with __getitem__ and __len__, or an IterableDataset) or a DataLoader, got a "
        f"{type(data).__name__}.\n"
        f"Wrap tensors in torch.utils.data.TensorDataset(inputs, targets)."
    )


def _feed_of_loader(loader: DataLoader[Any], options: LoaderOptions, place: DataRank) -> DataSource:
    if isinstance(loader.dataset, IterableDataset) or not _is_usual(loader):
        return LoaderSource(loader, options.grad_accum_steps)
    assert loader.batch_size is not None
    options = dataclasses.replace(
        options,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        shuffle=isinstance(loader.sampler, RandomSampler),
    )
    more = {
        "collate_fn": None if loader.collate_fn is default_collate else loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
        "timeout": loader.timeout,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    return IndexedSource(loader.dataset, options, place, drop_last=loader.drop_last, **more)


def _is_usual(loader: DataLoader[Any]) -> bool:
    """Tell whether a loader takes every sample of its dataset once, in order or in any."""
    sampler: Any = loader.sampler
    if loader.batch_size is None or type(sampler) not in (RandomSampler, SequentialSampler):
        return False
    return not getattr(sampler, "replacement", False) and len(sampler) == len(sampler.data_source)


# -- datasets with indices ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class EpochPartition:
    """How an epoch is cut into steps, and these into the batches of the ranks."""

    length: int
    """The number of samples in an epoch."""

    batch_size: int
    grad_accum_steps: int
    size: int
    """The number of ranks."""

    drop_last: bool = False

    def bounds(self, consumed: int) -> Iterator[tuple[int, int]]:
        """Return where each step begins and ends.

        The last step is smaller than the others; if it had fewer samples than there are ranks, it is one with the step
        before, so that every rank takes part in every step.
        """
        whole = self.size * self.batch_size * self.grad_accum_steps
        while consumed < self.length:
            end = min(consumed + whole, self.length)
            if self.length - end < self.size and not self.drop_last:
                end = self.length
            if end - consumed < whole and self.drop_last:
                return
            yield consumed, end
            consumed = end

    def batches(self, start: int, end: int, rank: int) -> list[slice]:
        """Return the places in the epoch's order of the batches that a rank takes in a step.

        All ranks take equally many batches, whose lengths differ by one at most.
        """
        mine = len(range(start + rank, end, self.size))
        least = (end - start) // self.size
        number = max(1, min(self.grad_accum_steps, -(-(end - start) // (self.size * self.batch_size)), least))
        edges = [mine * each // number for each in range(number + 1)]
        first = start + rank
        return [
            slice(first + self.size * low, first + self.size * (high - 1) + 1 if high > low else first, self.size)
            for low, high in itertools.pairwise(edges)
        ]


class IndexedSource:
    """A dataset with indices, of which each rank takes its part."""

    is_counted = is_shared = True

    def __init__(
        self, dataset: Any, options: LoaderOptions, place: DataRank, *, drop_last: bool = False, **loading: Any
    ) -> None:
        """Share a dataset.

        Args:
            loading: More of DataLoader's arguments.

        Raises:
            ValueError: If there are no samples.
        """
        length = len(dataset)
        if not length:
            raise ValueError("the dataset has no samples.\nLook at where it is read from.")
        self.partition = EpochPartition(length, options.batch_size, options.grad_accum_steps, place.size, drop_last)
        if drop_last and not any(True for _ in self.partition.bounds(0)):
            raise ValueError(
                f"drop_last leaves no step of {length} samples: one takes {options.batch_size} x "
                f"{options.grad_accum_steps} of {place.size} ranks.\nMake the batches smaller, or do not drop the last."
            )
        self._rank = place.rank
        self._seed, self._shuffle = options.seed, options.shuffle
        self._plan = _Plan()
        if options.num_workers:
            loading.setdefault("persistent_workers", True)
        else:
            loading = {name: value for name, value in loading.items() if name in {"collate_fn", "worker_init_fn"}}
        self._loaded: Iterator[Any] = iter(())
        plan: Any = self._plan  # it need not be lists that a dataset is asked for
        if type(dataset) is TensorDataset and not loading.get("collate_fn"):
            source: Dataset[Any] = _Rows(dataset)
            loading["collate_fn"] = _as_it_is
        else:
            source = _Reproducible(dataset, options.seed)
        loading["worker_init_fn"] = _Undisturbed(loading.get("worker_init_fn"))
        self._loader = DataLoader(
            source,
            batch_sampler=plan,
            num_workers=options.num_workers,
            pin_memory=options.pin_memory,
            generator=torch.Generator().manual_seed(options.seed),
            **loading,
        )

    def total(self) -> int:
        """Return the number of samples in an epoch, of all ranks."""
        return max(end for _, end in self.partition.bounds(0))

    def first(self) -> Step:
        """Return nothing: every rank has a part of every step."""
        return Step([])

    def order(self, epoch: int) -> torch.Tensor:
        """Return the order of an epoch's samples, the same on all ranks."""
        if not self._shuffle:
            return torch.arange(self.partition.length)
        generator = torch.Generator().manual_seed(_mixed(self._seed, epoch, 0))
        return torch.randperm(self.partition.length, generator=generator)

    def steps(self, epoch: int, consumed: int, steps: int) -> Iterator[Step]:  # noqa: ARG002  as in DataSource
        """Return what is left of an epoch for this rank."""
        self._plan.make = lambda: self._planned(epoch, consumed)
        loaded = self._loaded = iter(self._loader)
        batches: list[Batch] = []
        for content in loaded:
            indices = self._plan.given.popleft()  # the plan is ahead of what is loaded
            batches.append(Batch(content, indices.count, indices.samples[: indices.count]))
            if indices.total is not None:
                yield Step(batches, indices.total)
                batches = []

    def _planned(self, epoch: int, consumed: int) -> Iterator[Indices]:
        order = self.order(epoch).numpy()  # whose slices take half the time of a tensor's
        for start, end in self.partition.bounds(consumed):
            batches = self.partition.batches(start, end, self._rank)
            for number, each in enumerate(batches, start=1):
                samples = order[each].tolist()
                total = end - start if number == len(batches) else None
                # A rank for which nothing is left goes through the step with a sample that does not count.
                yield Indices(epoch, samples or [int(order[start])], len(samples), total)

    def close(self) -> None:
        """End the processes that load the data."""
        _end_workers(self._loaded)


@dataclasses.dataclass(slots=True)
class Indices:
    """The samples of a batch, and the epoch in which they are taken."""

    epoch: int
    samples: list[int]
    count: int
    total: int | None
    """How many samples all ranks take in the step that this batch ends; None if it does not end one."""


class _Plan:
    """A batch sampler that says what it was told, and remembers what it has said."""

    def __init__(self) -> None:
        self.make: Callable[[], Iterator[Indices]] = lambda: iter(())
        self.given: collections.deque[Indices] = collections.deque()

    def __iter__(self) -> Iterator[Indices]:
        self.given.clear()
        for indices in self.make():
            self.given.append(indices)
            yield indices


class _Rows(Dataset[Any]):
    """Tensors, of which a batch is taken at once."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    def __getitems__(self, indices: Indices) -> list[torch.Tensor]:
        """Return a batch."""
        return [each[indices.samples] for each in self._tensors]

    def __getitem__(self, _index: int) -> Any:
        raise AssertionError("batches are taken whole")


def _as_it_is(batch: Any) -> Any:
    return batch


class _Reproducible(Dataset[Any]):
    """A dataset whose random numbers (augmentation) depend on seed, epoch and sample alone, if workers load it.

    Otherwise workers, whose states nobody keeps, would draw others after an interruption. In the rank's own process the
    program's generators are used, which checkpoints hold.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitems__(self, indices: Indices) -> list[Any]:
        """Return the samples of a batch."""
        samples = indices.samples
        if get_worker_info() is not None:
            randomness.seed_all(_mixed(self._seed, indices.epoch, 1 + samples[0]))
        if (many := getattr(self._dataset, "__getitems__", None)) is not None:
            return many(samples)
        return [self._dataset[each] for each in samples]

    def __getitem__(self, _index: int) -> Any:
        raise AssertionError("batches are taken whole")


def _mixed(seed: int, epoch: int, sample: int) -> int:
    """Return a seed that belongs to all three."""
    value = seed + _FACTORS[0] * (epoch + 1) + _FACTORS[1] * sample
    value &= (1 << 64) - 1
    value ^= value >> 31
    return (value * _FACTORS[0] & ((1 << 64) - 1)) >> (64 - _SEED_BITS)


# -- datasets without indices ------------------------------------------------------------------------------------------


class IterableSource:
    """A dataset without indices: every rank reads all of it, and takes each n-th batch."""

    is_counted, is_shared = False, True

    def __init__(self, dataset: IterableDataset[Any], options: LoaderOptions, place: DataRank) -> None:
        self._share = _Share(dataset, options.batch_size, place)
        self._seed = options.seed
        self._generator = torch.Generator()  # of the workers' seeds; the program's own is left alone
        self._grad_accum_steps = options.grad_accum_steps
        self._loader: DataLoader[Any] = DataLoader(
            self._share,
            options.batch_size,
            num_workers=options.num_workers,
            pin_memory=options.pin_memory,
            collate_fn=_Counting(default_collate),
            generator=self._generator,
            worker_init_fn=_Undisturbed(None),
        )
        self._loaded: Iterator[Any] = iter(())

    def total(self) -> int | None:
        """Return the number of samples, if the dataset tells it."""
        try:
            return len(self._share.dataset)  # type: ignore[arg-type]
        except TypeError:
            return None

    def steps(self, epoch: int, consumed: int, steps: int) -> Iterator[Step]:  # noqa: ARG002  as in DataSource
        """Return what is left of an epoch for this rank."""
        self._share.start = consumed
        self._generator.manual_seed(_mixed(self._seed, epoch, 0))
        _set_epoch(self._share.dataset, epoch)
        self._loaded = iter(self._loader)
        return _grouped(self._loaded, self._grad_accum_steps)

    def first(self) -> Step:
        """Return the stream's first samples."""
        samples = list(itertools.islice(self._share.dataset, self._share.batch_size))
        return Step([Batch(default_collate(samples), 0)] if samples else [])

    def close(self) -> None:
        """End the processes that load the data."""
        _end_workers(self._loaded)


class _Share(IterableDataset[Any]):
    """A rank's samples of a stream: batch by batch in turn, and each batch by one worker."""

    def __init__(self, dataset: IterableDataset[Any], batch_size: int, place: DataRank) -> None:
        self.dataset = dataset
        self.start = 0
        self.batch_size = batch_size
        self._place = place

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for number, sample in enumerate(self.dataset, -self.start):
            turn, rank = divmod(number // self.batch_size, self._place.size)
            if number >= 0 and rank == self._place.rank and turn % workers == worker:
                yield sample


class LoaderSource:
    """A DataLoader of the user's, taken as it is."""

    is_counted = is_shared = False

    def __init__(self, loader: DataLoader[Any], grad_accum_steps: int) -> None:
        self._loader = _counting(loader)
        self._grad_accum_steps = grad_accum_steps
        self._loaded: Iterator[Any] = iter(())

    def total(self) -> None:
        """Return None: what the other ranks load is not known."""

    def steps(self, epoch: int, consumed: int, steps: int) -> Iterator[Step]:  # noqa: ARG002  as in DataSource
        """Return what is left of an epoch for this rank; what went before is loaded and left out."""
        for part in (self._loader.sampler, self._loader.batch_sampler, self._loader.dataset):
            _set_epoch(part, epoch)
        self._loaded = iter(self._loader)
        grouped = _grouped(self._loaded, self._grad_accum_steps)
        for _ in range(steps):
            next(grouped, None)
        return grouped

    def first(self) -> Step:
        """Return the loader's first batch."""
        return next(_grouped(iter(self._loader), 1), Step([]))

    def close(self) -> None:
        """End the processes that load the data."""
        _end_workers(self._loaded)


def _set_epoch(part: Any, epoch: int) -> None:
    setter: Callable[[int], None] | None = getattr(part, "set_epoch", None)
    if setter is not None:
        setter(epoch)


class _Counted(NamedTuple):  # of which DataLoader pins the content
    """A batch, and of how many samples it was made."""

    content: Any
    samples: int


class _Counting:
    """Makes a batch of samples, and counts them."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> _Counted:
        return _Counted(self._collate(samples), len(samples))


def _counting(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader with a `collate_fn` that counts, where it makes the batches itself and as DataLoader does."""
    if type(loader) is not DataLoader or loader.batch_sampler is None:
        return loader
    same = copy.copy(loader)  # the sampler and the dataset are the user's
    same.collate_fn = _Counting(loader.collate_fn)
    same._iterator = None  # persistent workers have begun with the other collate_fn
    return same


def _grouped(loaded: Iterator[Any], number: int) -> Iterator[Step]:
    """Return batches, so many at once, and what remains at the end."""
    while of_step := [_batch(each) for each in itertools.islice(loaded, number)]:
        yield Step(of_step)


def _batch(loaded: Any) -> Batch:
    if isinstance(loaded, _Counted):
        return Batch(loaded.content, loaded.samples)
    return Batch(loaded, count_samples(loaded))


class _Undisturbed:
    """Begins a worker: signals that make a run leave go to all processes, and batches are needed until it does."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        for number in preemption.SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if self._then is not None:
            self._then(worker)


def _end_workers(loaded: Iterator[Any]) -> None:
    shut_down = getattr(loaded, "_shutdown_workers", None)  # of what a DataLoader with workers returns
    if shut_down is not None:
        shut_down()
    for worker in getattr(loaded, "_workers", ()):
        if worker.is_alive():
            worker.kill()  # it does not listen to less
