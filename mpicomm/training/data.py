"""Data of a run: the batches of each rank in each step. An epoch takes each sample exactly once.

The order of the samples in an epoch is the same on all ranks and for any number of ranks, and each step takes the next
samples of this order. One number, the samples consumed so far, is therefore enough to resume within an epoch on any
number of ranks.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import operator
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from mpicomm import arguments, torch_internals
from mpicomm.training import preemption, randomness
from mpicomm.training.batches import count_samples, mapped

# The attributes of a user's DataLoader that the DataLoader of a rank takes over unchanged.
_PASSED_ON = ("worker_init_fn", "timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")
_SEED_BITS = 63
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # odd multipliers, so that seeds of (epoch, sample) do not collide


@dataclasses.dataclass(slots=True)
class Batch:
    """The samples of one forward and backward pass."""

    content: Any
    """Inputs and targets in any structure (`mpicomm.training.batches`), as the loader returned them."""

    count: int
    """The number of samples; 0 for a padding batch, which only keeps the collective operations of all ranks matched."""

    indices: Sequence[int] | None = None
    """The indices of the samples in the dataset, if known."""


@dataclasses.dataclass(slots=True)
class Step:
    """The batches of one rank in one optimizer step."""

    batches: Sequence[Batch]
    total: int = 0
    """The number of samples of all ranks in this step; 0 until `rank_sync.aligned_steps` has added them up."""

    @property
    def count(self) -> int:
        """The number of samples of this rank."""
        return sum(batch.count for batch in self.batches)

    def as_padding(self) -> Step:
        """Return a step of the same batches with a sample count of 0."""
        return Step([dataclasses.replace(batch, count=0, indices=()) for batch in self.batches])

    def with_length(self, number: int) -> Step:
        """Return the step cut or padded to `number` batches. An empty step stays empty."""
        more = list(self.as_padding().batches[:1]) * (number - len(self.batches))
        return dataclasses.replace(self, batches=[*self.batches[:number], *more])


class DataSource(abc.ABC):
    """The data of a run, as seen by one rank."""

    is_counted = False
    """Whether every step has a `total`, and an epoch has exactly `total()` samples."""

    is_shared = True
    """Whether the ranks share one set of samples, so that another number of ranks can resume within an epoch."""

    first_samples: tuple[str, list[bytes]] | None = None
    """The name of an iterable-style dataset, and digests of the first sample that each process of this rank has read in
    this epoch."""

    is_first_compared = True
    """Whether these must be equal: in all processes of shared data, in those of a rank otherwise."""

    inexact: str | None = None
    """Why a run that resumes within an epoch may differ from an uninterrupted one, and the remedy; None if the data are
    the same."""

    layout: Mapping[str, object] = {"kind": "a share of each rank"}
    """The properties by name that must be equal on all ranks."""

    order_settings: Mapping[str, object] = {}
    """The properties by name that determine, with the position in an epoch, which of its samples remain."""

    _loaded: Iterator[Any] = iter(())
    """The batches of the current epoch, from a DataLoader."""

    @abc.abstractmethod
    def steps(self, epoch: int, consumed: int, steps: int) -> Iterator[Step]:
        """Return the remaining steps of an epoch.

        Args:
            epoch: The number of the epoch, from 0.
            consumed: The number of its samples that all ranks have already taken.
            steps: The number of its steps already taken.
        """

    @abc.abstractmethod
    def total(self) -> int | None:
        """Return the number of samples of all ranks in an epoch; None if unknown. Unless `is_counted`, an estimate."""

    @abc.abstractmethod
    def first(self) -> Step:
        """Return any one batch, as material for padding; an empty step if this rank has no data."""

    def close(self) -> None:
        """Terminate the worker processes."""
        torch_internals.end_workers(self._loaded)


@dataclasses.dataclass(frozen=True)
class LoaderOptions:
    """Options of data loading."""

    batch_size: int = 32
    """Samples per rank and batch."""

    grad_accum_steps: int = 1
    """Batches per rank and optimizer step."""

    num_workers: int = 0
    """Data-loading worker processes per rank."""

    pin_memory: bool = False
    seed: int = 0
    shuffle: bool = True


@dataclasses.dataclass(frozen=True)
class DataRank:
    """The rank and the number of ranks among which the data are shared."""

    rank: int
    size: int


SHARD = arguments.FLAG.or_none()


def make_source(
    data: Any, options: LoaderOptions, place: DataRank, *, shard: bool | None = None, may_drop: bool = True
) -> DataSource:
    """Return the data source of this rank.

    Args:
        data: A map-style or iterable-style dataset, or a DataLoader.
        shard: True: every rank passes the same samples, which the ranks share. False: each rank passes its own share,
            which is used unchanged. None: the ranks share the samples of a dataset, and those of a DataLoader with a
            sequential or shuffled order, in batches of its batch size. Any other DataLoader is used unchanged.
        may_drop: Whether to obey the drop_last of a DataLoader whose samples the ranks share.

    Raises:
        TypeError: If `data` is of another type.
        ValueError: If the dataset is empty, drop_last drops all of its samples, or the ranks cannot share the samples.
    """
    if isinstance(data, DataLoader):
        return _source_of_loader(data, options, place, shard, may_drop)
    is_iterable = isinstance(data, IterableDataset)
    if is_iterable:
        return IterableSource(data, options, place, shard)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        if shard is False:
            shuffle = options.shuffle if len(data) else None  # RandomSampler refuses empty datasets
            workers, pin_memory = options.num_workers, options.pin_memory
            start = functools.partial(_start_worker, None)
            loader = DataLoader(
                data,
                options.batch_size,
                shuffle,
                num_workers=workers,
                pin_memory=pin_memory,
                worker_init_fn=start if workers else None,
            )
            return LoaderSource(loader, options, place)
        return IndexedSource(data, options, place)
    raise TypeError(
        f"expected a dataset (with __getitem__ and __len__, or an IterableDataset) or a DataLoader, got a "
        f"{type(data).__name__}.\n"
        f"Wrap tensors in torch.utils.data.TensorDataset(inputs, targets)."
    )


def _source_of_loader(
    loader: DataLoader[Any], options: LoaderOptions, place: DataRank, shard: bool | None, may_drop: bool
) -> DataSource:
    is_replaced = type(loader).__iter__ is not DataLoader.__iter__
    if shard is None:
        if is_replaced and _is_usual(loader) and place.size > 1:
            raise ValueError(
                f"{type(loader).__name__} has an __iter__ of its own, so the samples that it yields are unknown.\n"
                f"Set shard=False if each rank passes its own share, or shard=True if the ranks are to share the "
                f"samples of its dataset without this __iter__."
            )
        shard = not is_replaced and _is_usual(loader)
    if not shard:
        return LoaderSource(loader, options, place)
    sampler: Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        raise ValueError(
            "shard=True requires a DataLoader of a dataset with indices that has a batch_size, got one with an "
            "iterable-style dataset, a batch_sampler, or without batches.\n"
            "Pass the dataset itself with shard=True, or set shard=False if each rank passes its own share."
        )
    if isinstance(sampler, DistributedSampler):
        raise ValueError(
            "shard=True requires a sampler of all samples, got a DistributedSampler, which selects those of one rank."
            "\nOmit the sampler, or omit shard=True."
        )
    options = dataclasses.replace(
        options,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        shuffle=isinstance(sampler, RandomSampler),
    )
    drop_last = loader.drop_last and may_drop
    own = None if _is_usual(loader) else sampler
    if own is not None and not hasattr(own, "__len__"):
        raise ValueError(
            f"shard=True requires a sampler with a length, got {type(own).__name__} without __len__.\n"
            f"Add __len__ to it, or set shard=False if each rank passes its own share."
        )
    length = len(sampler.data_source) if own is None else len(own)
    loading = {name: getattr(loader, name) for name in _PASSED_ON}
    if loader.collate_fn is not default_collate:
        loading["collate_fn"] = loader.collate_fn
    return IndexedSource(loader.dataset, options, place, length=length, sampler=own, drop_last=drop_last, **loading)


def _is_usual(loader: DataLoader[Any]) -> bool:
    """Return whether a loader takes the samples 0, 1, ... n - 1 of its dataset once, sequentially or shuffled.

    n is the length of the sampler's data source, which can be smaller than that of the dataset.
    """
    sampler: Any = loader.sampler
    if loader.batch_size is None or type(sampler) not in (RandomSampler, SequentialSampler):
        return False
    return not getattr(sampler, "replacement", False) and len(sampler) == len(sampler.data_source)


# -- map-style datasets ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class EpochPartition:
    """The partition of an epoch into steps, and of each step into the batches of the ranks."""

    length: int
    """The number of samples in an epoch."""

    batch_size: int
    grad_accum_steps: int
    size: int
    """The number of ranks."""

    drop_last: bool = False

    def bounds(self, consumed: int) -> Iterator[tuple[int, int]]:
        """Return the start and the end of each step, as positions in the epoch's order.

        The last step may be smaller than the others. If it would have fewer samples than ranks, it is merged with the
        previous step, so that every rank has samples in every step.
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
        """Return the batches of a rank in a step, as slices of the epoch's order.

        All ranks have the same number of batches, whose lengths differ by at most one.
        """
        own = range(start + rank, end, self.size)
        least = (end - start) // self.size
        number = max(1, min(self.grad_accum_steps, -(-(end - start) // (self.size * self.batch_size)), least))
        edges = [len(own) * edge // number for edge in range(number + 1)]
        shares = [own[low:high] for low, high in itertools.pairwise(edges)]
        return [slice(share.start, share.stop, share.step) for share in shares]


class IndexedSource(DataSource):
    """A map-style dataset whose samples the ranks share."""

    is_counted = is_shared = True

    def __init__(
        self,
        dataset: Any,
        options: LoaderOptions,
        place: DataRank,
        *,
        length: int | None = None,
        sampler: Any = None,
        drop_last: bool = False,
        **loading: Any,
    ) -> None:
        """Partition a dataset among the ranks, and create the DataLoader of this rank.

        Args:
            length: The number of samples in an epoch, the first ones of the dataset or those of `sampler`; None for
                all of the dataset.
            sampler: The sampler of the user that orders the samples of all ranks; None for the order of `options`.
            loading: More arguments of DataLoader.

        Raises:
            ValueError: If the dataset is empty, or drop_last drops all of its samples.
        """
        # 1. partition the dataset
        length = len(dataset) if length is None else length
        if not length:
            raise ValueError("the dataset must have at least one sample, got 0.\nCheck the source of the dataset.")
        self.partition = EpochPartition(length, options.batch_size, options.grad_accum_steps, place.size, drop_last)
        if drop_last and not any(True for _ in self.partition.bounds(0)):
            raise ValueError(
                f"drop_last=True requires at least one full step of {options.batch_size} x {options.grad_accum_steps} "
                f"x {place.size} samples (batch_size x grad_accum_steps x ranks), got {length}.\n"
                f"Reduce batch_size or grad_accum_steps, or set drop_last=False."
            )
        self.layout = {
            "kind": "a dataset with indices that the ranks share",
            "number of samples": length,
            "batch_size": options.batch_size,
            "grad_accum_steps": options.grad_accum_steps,
            "drop_last": drop_last,
            "shuffle": options.shuffle,
        }
        whole = dataset
        while type(whole) is Subset:
            self.layout["digest of the indices"] = hashlib.blake2b(repr(list(whole.indices)).encode()).hexdigest()[:8]
            whole = whole.dataset
        if type(whole) is TensorDataset:  # other datasets may have effects at an access
            self.layout["digest of the first sample"] = _digest([whole[0]]).hex()[:8]
        is_random = options.shuffle or sampler is not None
        shared = ("kind", "number of samples", "shuffle", "digest of the indices")
        self.order_settings = {
            **{name: self.layout.get(name) for name in shared},
            "sampler": None if sampler is None else type(sampler).__name__,
            "seed": options.seed if is_random else None,
        }
        # 2. create the loader
        self._rank = place.rank
        self._seed, self._shuffle, self._sampler = options.seed, options.shuffle, sampler
        self._drawn = None if sampler is None else _EpochOrder(sampler)
        self.inexact = _inexact_order(sampler)
        self._plan = _Plan()
        loading.setdefault("persistent_workers", options.num_workers > 0)
        plan: Any = self._plan  # Any: DataLoader accepts a batch sampler of other items than lists
        samples: Dataset[Any] = _Reproducible(dataset, options.seed)
        if type(dataset) is TensorDataset and "collate_fn" not in loading:
            samples, loading["collate_fn"] = _Rows(dataset), _unchanged
        loading["worker_init_fn"] = functools.partial(_start_worker, loading.get("worker_init_fn"))
        self._loader = DataLoader(
            samples,
            batch_sampler=plan,
            num_workers=options.num_workers,
            pin_memory=options.pin_memory,
            generator=torch.Generator().manual_seed(options.seed),
            **loading,
        )

    def total(self) -> int:
        """Return the number of samples of all ranks in an epoch."""
        return max(end for _, end in self.partition.bounds(0))

    def first(self) -> Step:
        """Return an empty step: every rank has samples in every step and needs no padding."""
        return Step([])

    def order(self, epoch: int) -> torch.Tensor:
        """Return the indices of an epoch's samples in their order, the same on all ranks.

        Raises:
            ValueError: If the sampler of the user has another length.
        """
        seed = _mixed(self._seed, epoch, 0)
        if self._drawn is not None:
            _set_epoch(self._sampler, epoch)
            self._drawn.seed, self._drawn.epoch = seed, epoch
            indices = list(self._drawn)
            if len(indices) != self.partition.length:
                raise ValueError(
                    f"the sampler must yield as many samples as its length, {self.partition.length}, got "
                    f"{len(indices)}.\nCorrect its __len__ or its __iter__."
                )
            return torch.tensor(indices)
        if not self._shuffle:
            return torch.arange(self.partition.length)
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(self.partition.length, generator=generator)

    def steps(self, epoch: int, consumed: int, steps: int) -> Iterator[Step]:  # noqa: ARG002  as in DataSource
        """Return the remaining steps of an epoch for this rank."""
        self._plan.make = lambda: self._planned(epoch, consumed)
        loaded = self._loaded = iter(self._loader)
        batches: list[Batch] = []
        for content in loaded:
            indices = self._plan.given.popleft()  # in order: the batch sampler runs ahead of the loader
            batches.append(Batch(content, indices.count, indices.samples[: indices.count]))
            if indices.total is not None:
                yield Step(batches, indices.total)
                batches = []

    def _planned(self, epoch: int, consumed: int) -> Iterator[Indices]:
        order = self.order(epoch).numpy()  # slicing takes half the time of slicing a tensor
        for start, end in self.partition.bounds(consumed):
            batches = self.partition.batches(start, end, self._rank)
            for number, positions in enumerate(batches, start=1):
                samples = order[positions].tolist()
                total = end - start if number == len(batches) else None
                # A rank without samples in this batch loads one as padding, with a count of 0.
                yield Indices(epoch, samples or [int(order[start])], len(samples), total)


@dataclasses.dataclass(slots=True)
class Indices:
    """The indices of a batch's samples, and their epoch."""

    epoch: int
    samples: list[int]
    count: int
    total: int | None
    """The number of samples of all ranks in the step whose last batch this is; None for other batches."""


class _Plan:
    """A batch sampler that yields the batches of `make`, and queues them in `given` until they are loaded."""

    def __init__(self) -> None:
        self.make: Callable[[], Iterator[Indices]] = lambda: iter(())
        self.given: collections.deque[Indices] = collections.deque()

    def __iter__(self) -> Iterator[Indices]:
        self.given.clear()
        for indices in self.make():
            self.given.append(indices)
            yield indices


class _Rows(Dataset[Any]):
    """A TensorDataset that indexes each tensor once per batch, instead of once per sample."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    def __getitems__(self, indices: Indices) -> list[torch.Tensor]:
        """Return the tensors of a batch."""
        return [tensor[indices.samples] for tensor in self._tensors]


def _unchanged(batch: Any) -> Any:
    return batch


class _Reproducible(Dataset[Any]):
    """A dataset whose random numbers (augmentation) in workers depend only on the seed, the epoch and the sample.

    Checkpoints do not contain the generator states of workers, which would therefore differ after a resume. In the
    process of the rank the dataset uses the program's generators, which checkpoints contain.
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
        return [self._dataset[sample] for sample in samples]


def _seed_of(options: LoaderOptions, place: DataRank) -> int:
    """Return the seed of a rank with its own share: ranks draw different samples."""
    return _mixed(options.seed, 0, 1 + place.rank)


def _mixed(seed: int, epoch: int, sample: int) -> int:
    """Return a seed that depends on all three arguments."""
    value = seed + _FACTORS[0] * (epoch + 1) + _FACTORS[1] * sample
    value &= (1 << 64) - 1
    value ^= value >> 31
    return (value * _FACTORS[0] & ((1 << 64) - 1)) >> (64 - _SEED_BITS)


# -- iterable-style datasets and DataLoaders ---------------------------------------------------------------------------


class IterableSource(DataSource):
    """An iterable-style dataset. If the ranks share it, each reads all of it and keeps every n-th batch, with n ranks.

    The share of a rank (`shard=False`) is divided among its workers in the same way.
    """

    def __init__(
        self, dataset: IterableDataset[Any], options: LoaderOptions, place: DataRank, shard: bool | None = None
    ) -> None:
        self.is_shared = shard is not False
        self._share = _Share(dataset, options.batch_size, place if self.is_shared else DataRank(0, 1))
        sizes = {"batch_size": options.batch_size, "grad_accum_steps": options.grad_accum_steps}
        if self.is_shared:
            kind = "an iterable-style dataset that the ranks share"
            self.layout = {"kind": kind, "number of samples": self.total(), **sizes, "shard": shard}
            self.order_settings = {"kind": kind, "seed": options.seed}
        else:
            kind = "an iterable-style dataset of each rank"
            self.order_settings = {"kind": kind, **sizes, "seed": options.seed}
        self.is_first_compared = shard is not True
        self._seed = options.seed if self.is_shared else _seed_of(options, place)
        self._generator = torch.Generator()  # for the seeds of workers; leaves the program's generator unchanged
        self._grad_accum_steps = options.grad_accum_steps
        self._readers = max(1, options.num_workers)
        self._loader: DataLoader[Any] = DataLoader(
            self._share,
            batch_size=None,
            num_workers=options.num_workers,
            pin_memory=options.pin_memory,
            collate_fn=_unchanged,
            generator=self._generator,
            worker_init_fn=functools.partial(_start_worker, None),
        )

    def total(self) -> int | None:
        """Return the number of samples of all ranks in an epoch, if the ranks share a dataset that has a length."""
        return operator.length_hint(self._share.dataset) or None if self.is_shared else None

    def steps(self, epoch: int, consumed: int, steps: int) -> Iterator[Step]:
        """Return the remaining steps of an epoch for this rank."""
        own = steps * self._grad_accum_steps * self._share.batch_size
        self._share.start, self._share.seed = consumed if self.is_shared else own, _mixed(self._seed, epoch, 0)
        self._generator.manual_seed(self._share.seed)
        _set_epoch(self._share.dataset, epoch)
        loaded = self._loaded = iter(self._loader)
        digests = [next(loaded) for _ in range(self._readers)]
        self.first_samples = type(self._share.dataset).__name__, digests
        return _grouped(loaded, self._grad_accum_steps)

    def first(self) -> Step:
        """Return the first batch of the dataset, whichever rank it belongs to."""
        samples = list(itertools.islice(self._share.dataset, self._share.batch_size))
        return Step([Batch(default_collate(samples), 0)] if samples else [])


class _Share(IterableDataset[Any]):
    """The batches of one rank: batches go to the ranks round-robin, and those of a rank to its workers round-robin.

    Each process reads all samples, with the same random numbers and without `get_worker_info()`, so that a dataset that
    shuffles, or divides its samples among workers, yields the same samples in the same order in each of them.
    """

    def __init__(self, dataset: IterableDataset[Any], batch_size: int, place: DataRank) -> None:
        self.dataset = dataset
        self.start = self.seed = 0
        self.batch_size = batch_size
        self._place = place

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
            turn, rank = divmod(number, self._place.size)
            if rank == self._place.rank and turn % workers == worker:
                yield _counted(default_collate, samples)

    def _read(self) -> Iterator[Any]:
        """Yield a digest of the first sample, then the batches of all ranks."""
        samples = iter(self.dataset)
        first = list(itertools.islice(samples, 1))
        yield _digest(first)
        remaining = itertools.islice(itertools.chain(first, samples), self.start, None)
        while batch := list(itertools.islice(remaining, self.batch_size)):
            yield batch


def _digest(samples: list[Any]) -> bytes:
    """Return a digest that is equal for equal samples in any process."""

    def content(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return type(value)
        memory = b""
        with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):  # a sparse tensor, for example
            memory = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return value.dtype, value.shape, hashlib.blake2b(memory).hexdigest()

    text = repr([mapped(sample, content) for sample in samples])
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).digest()


class LoaderSource(DataSource):
    """A DataLoader of the user, used unchanged. Each rank has its own share of the samples."""

    is_shared = False

    def __init__(self, loader: DataLoader[Any], options: LoaderOptions, place: DataRank) -> None:
        self._user = loader
        self._loader = _counting(loader)
        self._grad_accum_steps = options.grad_accum_steps
        self._seed = _seed_of(options, place)
        self._order: _EpochOrder | None = None
        if self._loader is not loader and not isinstance(loader.dataset, IterableDataset):
            self._order = _EpochOrder(loader.batch_sampler)
            torch_internals.set_batch_sampler(self._loader, self._order)
            self._loader.generator = torch.Generator()  # for the seeds of workers
        self.inexact = _inexact(loader, is_drawn=self._order is not None)
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

    def steps(self, epoch: int, consumed: int, steps: int) -> Iterator[Step]:  # noqa: ARG002  as in DataSource
        """Return the remaining steps of an epoch for this rank.

        The order of an epoch is drawn again from its start. Without an order, batches already taken are loaded again.
        """
        inner = getattr(self._user.batch_sampler, "sampler", None)
        for part in (self._user.sampler, self._user.batch_sampler, inner, self._user.dataset):
            _set_epoch(part, epoch)
        if self._order is not None:
            self._order.start, self._order.seed = steps * self._grad_accum_steps, _mixed(self._seed, epoch, 0)
            self._order.epoch = epoch
            self._loader.generator.manual_seed(self._order.seed)
        self._loaded = iter(self._loader)
        grouped = _grouped(self._loaded, self._grad_accum_steps)
        for _ in range(steps if self._order is None else 0):
            next(grouped, None)
        return grouped

    def first(self) -> Step:
        """Return the first batch of the loader."""
        if self._order is not None:
            self._order.start = 0
        return next(_grouped(iter(self._loader), 1), Step([]))


class _EpochOrder:
    """The batches of a user's sampler from `start` on, drawn with generators that depend only on the epoch."""

    def __init__(self, batch_sampler: Any) -> None:
        self._batch_sampler = batch_sampler
        self.epoch = self.start = self.seed = 0
        parts = (batch_sampler, getattr(batch_sampler, "sampler", None))
        generators = [getattr(part, "generator", None) for part in parts]
        self._generators = [
            (generator, generator.initial_seed(), generator.get_state())
            for generator in generators
            if isinstance(generator, torch.Generator)
        ]

    def __iter__(self) -> Iterator[Any]:
        for generator, seed, _ in self._generators:
            generator.manual_seed(_mixed(seed, self.epoch, 0))
        return itertools.islice(randomness.drawn(lambda: iter(self._batch_sampler), self.seed), self.start, None)

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def close(self) -> None:
        """Restore the generators of the user, so that another run draws the same orders from them."""
        for generator, _, state in self._generators:
            generator.set_state(state)


_DRAWN_AGAIN = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, list, tuple, range)


def _inexact(loader: DataLoader[Any], *, is_drawn: bool) -> str | None:
    """Return why a resume within an epoch may not be exact for a user's loader; None if it is."""
    if not is_drawn:
        return (
            f"the batches of {type(loader).__name__} of {type(loader.dataset).__name__} are read again from the start "
            f"of the epoch.\nMake them depend only on set_epoch(epoch) of the dataset"
        )
    batch_sampler: Any = loader.batch_sampler
    order = batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler
    if why := _inexact_order(order):
        return why
    if not loader.num_workers:
        return None
    return (
        "the workers of the DataLoader draw other random numbers after a resume.\n"
        "Set num_workers=0 unless the dataset draws no random numbers"
    )


def _inexact_order(sampler: Any) -> str | None:
    """Return why the order of a user's sampler may not be that of the epoch after a resume; None if it is."""
    if sampler is None or type(sampler) in _DRAWN_AGAIN or hasattr(sampler, "set_epoch"):
        return None
    name = type(sampler).__name__
    return (
        f"{name} has no set_epoch(), so its order may depend on earlier epochs.\n"
        f"Give {name} a set_epoch(epoch) that determines the order"
    )


def _set_epoch(part: Any, epoch: int) -> None:
    if hasattr(part, "set_epoch"):
        part.set_epoch(epoch)


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


def _start_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """Ignore the preemption signals in a worker process, then call the worker_init_fn of the user.

    Schedulers send these signals to all processes, and the ranks need further batches until they have stopped.
    """
    for number in preemption.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if then is not None:
        then(worker)
