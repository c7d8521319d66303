"""Data without indices that the ranks share: iterable-style datasets, and DataLoaders that each rank uses unchanged."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate, get_worker_info

from mpicomm import torch_internals
from mpicomm.training import randomness
from mpicomm.training.batches import count_samples
from mpicomm.training.data import (
    Batch,
    DataRank,
    DataSource,
    EpochOrder,
    LoaderOptions,
    Step,
    digest,
    inexact_order,
    mixed_seed,
    set_epoch_of,
    start_worker,
    unchanged,
)


class IterableSource(DataSource):
    """An iterable-style dataset. If the ranks share it, each reads all of it and keeps every n-th batch, with n ranks.

    The share of a rank (`shard=False`) is divided among its workers in the same way.
    """

    def __init__(
        self, dataset: IterableDataset[Any], options: LoaderOptions, data_rank: DataRank, shard: bool | None = None
    ) -> None:
        self.is_shared = shard is not False
        self._share = _SharedStream(dataset, options.batch_size, data_rank if self.is_shared else DataRank(0, 1))
        sizes = {"batch_size": options.batch_size, "grad_accum_steps": options.grad_accum_steps}
        if self.is_shared:
            kind = "an iterable-style dataset that the ranks share"
            self.layout = {"kind": kind, "number of samples": self.total(), **sizes, "shard": shard}
            self.order_settings = {"kind": kind, "seed": options.seed}
        else:
            kind = "an iterable-style dataset of each rank"
            self.order_settings = {"kind": kind, **sizes, "seed": options.seed}
        self.is_first_compared = shard is not True
        self._seed = options.seed if self.is_shared else _seed_of_rank(options, data_rank)
        self._generator = torch.Generator()  # for the seeds of workers; leaves the program's generator unchanged
        self._grad_accum_steps = options.grad_accum_steps
        self._readers = max(1, options.num_workers)
        self._loader: DataLoader[Any] = DataLoader(
            self._share,
            batch_size=None,
            num_workers=options.num_workers,
            pin_memory=options.pin_memory,
            collate_fn=unchanged,
            generator=self._generator,
            worker_init_fn=functools.partial(start_worker, None),
        )

    def total(self) -> int | None:
        """Return the number of samples of all ranks in an epoch, if the ranks share a dataset that has a length."""
        return operator.length_hint(self._share.dataset) or None if self.is_shared else None

    def steps(self, epoch: int, consumed: int, num_steps: int) -> Iterator[Step]:
        """Return the remaining steps of an epoch for this rank."""
        own = num_steps * self._grad_accum_steps * self._share.batch_size
        self._share.start, self._share.seed = consumed if self.is_shared else own, mixed_seed(self._seed, epoch, 0)
        self._generator.manual_seed(self._share.seed)
        set_epoch_of(self._share.dataset, epoch)
        loaded = self._loaded = iter(self._loader)
        digests = [next(loaded) for _ in range(self._readers)]
        self.first_samples = type(self._share.dataset).__name__, digests
        return _grouped(loaded, self._grad_accum_steps)

    def first(self) -> Step:
        """Return the first batch of the dataset, whichever rank it belongs to."""
        samples = list(itertools.islice(self._share.dataset, self._share.batch_size))
        return Step([Batch(default_collate(samples), 0)] if samples else [])


class _SharedStream(IterableDataset[Any]):
    """The batches of one rank: batches go to the ranks round-robin, and those of a rank to its workers round-robin.

    Each process reads all samples, with the same random numbers and without `get_worker_info()`, so that a dataset that
    shuffles, or divides its samples among workers, yields the same samples in the same order in each of them.
    """

    def __init__(self, dataset: IterableDataset[Any], batch_size: int, data_rank: DataRank) -> None:
        self.dataset = dataset
        self.start = self.seed = 0
        self.batch_size = batch_size
        self._data_rank = data_rank

    def __iter__(self) -> Iterator[Any]:
        """Yield a digest of the first sample of the dataset, then the batches of this process."""
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        reading = randomness.drawn(self._read, self.seed)

        def read() -> Any:
            with torch_internals.outside_workers():
                return next(reading, [])

        yield read()
        for number, samples in enumerate(iter(read, [])):
            turn, rank = divmod(number, self._data_rank.size)
            if rank == self._data_rank.rank and turn % workers == worker:
                yield _counted(default_collate, samples)

    def _read(self) -> Iterator[Any]:
        """Yield a digest of the first sample, then the batches of all ranks."""
        samples = iter(self.dataset)
        first = list(itertools.islice(samples, 1))
        yield digest(first)
        remaining = itertools.islice(itertools.chain(first, samples), self.start, None)
        while batch := list(itertools.islice(remaining, self.batch_size)):
            yield batch


class LoaderSource(DataSource):
    """A DataLoader of the user, used unchanged. Each rank has its own share of the samples."""

    is_shared = False

    def __init__(self, loader: DataLoader[Any], options: LoaderOptions, data_rank: DataRank) -> None:
        self._user = loader
        self._loader = _counting(loader)
        self._grad_accum_steps = options.grad_accum_steps
        self._seed = _seed_of_rank(options, data_rank)
        self._order: EpochOrder | None = None
        if self._loader is not loader and not isinstance(loader.dataset, IterableDataset):
            self._order = EpochOrder(loader.batch_sampler)
            torch_internals.set_batch_sampler(self._loader, self._order)
            self._loader.generator = torch.Generator()  # for the seeds of workers
        self.inexact_reason = _inexact_reason(loader, is_drawn=self._order is not None)
        self.order_settings = {
            "kind": self.layout["kind"],
            "batch_size": loader.batch_size,
            "grad_accum_steps": options.grad_accum_steps,
            "sampler": type(loader.sampler).__name__,
            "seed": None if self._order is None else options.seed,
        }

    def total(self) -> None:
        """Return None: the number of samples that other ranks load is unknown."""

    def close(self) -> None:
        """Terminate the worker processes, and restore the generators of the user."""
        super().close()
        if self._order is not None:
            self._order.close()

    def steps(self, epoch: int, consumed: int, num_steps: int) -> Iterator[Step]:  # noqa: ARG002  as in DataSource
        """Return the remaining steps of an epoch for this rank.

        The order of an epoch is drawn again from its start. Without an order, batches already taken are loaded again.
        """
        inner = getattr(self._user.batch_sampler, "sampler", None)
        for part in (self._user.sampler, self._user.batch_sampler, inner, self._user.dataset):
            set_epoch_of(part, epoch)
        if self._order is not None:
            self._order.start, self._order.seed = num_steps * self._grad_accum_steps, mixed_seed(self._seed, epoch, 0)
            self._order.epoch = epoch
            self._loader.generator.manual_seed(self._order.seed)
        self._loaded = iter(self._loader)
        grouped = _grouped(self._loaded, self._grad_accum_steps)
        for _ in range(num_steps if self._order is None else 0):
            next(grouped, None)
        return grouped

    def first(self) -> Step:
        """Return the first batch of the loader."""
        if self._order is not None:
            self._order.start = 0
        return next(_grouped(iter(self._loader), 1), Step([]))


def _inexact_reason(loader: DataLoader[Any], *, is_drawn: bool) -> str | None:
    """Return why a resume within an epoch may not be exact for a user's loader; None if it is."""
    if not is_drawn:
        return (
            f"the batches of {type(loader).__name__} of {type(loader.dataset).__name__} are read again from the start "
            f"of the epoch.\nMake them depend only on set_epoch(epoch) of the dataset"
        )
    batch_sampler: Any = loader.batch_sampler
    order = batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler
    if why := inexact_order(order):
        return why
    if not loader.num_workers:
        return None
    return (
        "the workers of the DataLoader draw other random numbers after a resume.\n"
        "Set num_workers=0 unless the dataset draws no random numbers"
    )


class _Counted(NamedTuple):  # a NamedTuple, because DataLoader pins the memory of its fields
    """A batch and its number of samples."""

    content: Any
    samples: int


def _counted(collate: Callable[[list[Any]], Any], samples: list[Any]) -> _Counted:
    """Collate a batch, and return the number of its samples along with it."""
    return _Counted(collate(samples), len(samples))


def _counting(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of the loader whose collate_fn counts samples; the loader itself if it does not collate batches.

    Subclasses of DataLoader are also returned unchanged.
    """
    if type(loader) is not DataLoader or loader.batch_sampler is None:
        return loader
    return torch_internals.copy_of_loader(loader, functools.partial(_counted, loader.collate_fn))


def _grouped(loaded: Iterator[Any], number: int) -> Iterator[Step]:
    """Return steps of `number` batches each; the last step has the remaining ones."""
    while of_step := list(itertools.islice(loaded, number)):
        yield Step(
            [Batch(*batch) if isinstance(batch, _Counted) else Batch(batch, count_samples(batch)) for batch in of_step]
        )


def _seed_of_rank(options: LoaderOptions, data_rank: DataRank) -> int:
    """Return the seed of a rank with its own share: ranks draw different samples."""
    return mixed_seed(options.seed, 0, 1 + data_rank.rank)
