"""Map-style datasets whose samples the ranks share: the partition of an epoch, and the batches of this rank."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, get_worker_info

from mpicomm.training import randomness
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
        data_rank: DataRank,
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
        self.partition = EpochPartition(length, options.batch_size, options.grad_accum_steps, data_rank.size, drop_last)
        if drop_last and not any(True for _ in self.partition.bounds(0)):
            raise ValueError(
                f"drop_last=True requires at least one full step of {options.batch_size} x {options.grad_accum_steps} "
                f"x {data_rank.size} samples (batch_size x grad_accum_steps x ranks), got {length}.\n"
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
            self.layout["digest of the first sample"] = digest([whole[0]]).hex()[:8]
        is_random = options.shuffle or sampler is not None
        shared = ("kind", "number of samples", "shuffle", "digest of the indices")
        self.order_settings = {
            **{name: self.layout.get(name) for name in shared},
            "sampler": None if sampler is None else type(sampler).__name__,
            "seed": options.seed if is_random else None,
        }
        # 2. create the loader
        self._rank = data_rank.rank
        self._seed, self._shuffle, self._sampler = options.seed, options.shuffle, sampler
        self._user_order = None if sampler is None else EpochOrder(sampler)
        self.inexact_reason = inexact_order(sampler)
        self._batch_sampler = _EpochBatchSampler()
        loading.setdefault("persistent_workers", options.num_workers > 0)
        batch_sampler: Any = self._batch_sampler  # Any: DataLoader accepts a batch sampler of other items than lists
        samples: Dataset[Any] = _Reproducible(dataset, options.seed)
        if type(dataset) is TensorDataset and "collate_fn" not in loading:
            samples, loading["collate_fn"] = _Rows(dataset), unchanged
        loading["worker_init_fn"] = functools.partial(start_worker, loading.get("worker_init_fn"))
        self._loader = DataLoader(
            samples,
            batch_sampler=batch_sampler,
            num_workers=options.num_workers,
            pin_memory=options.pin_memory,
            generator=torch.Generator().manual_seed(options.seed),
            **loading,
        )

    def total(self) -> int:
        """Return the number of samples of all ranks in an epoch."""
        return max(end for _, end in self.partition.bounds(0))

    def order(self, epoch: int) -> torch.Tensor:
        """Return the indices of an epoch's samples in their order, the same on all ranks.

        Raises:
            ValueError: If the sampler of the user has another length.
        """
        seed = mixed_seed(self._seed, epoch, 0)
        if self._user_order is not None:
            set_epoch_of(self._sampler, epoch)
            self._user_order.seed, self._user_order.epoch = seed, epoch
            indices = list(self._user_order)
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

    def steps(self, epoch: int, consumed: int, num_steps: int) -> Iterator[Step]:  # noqa: ARG002  as in DataSource
        """Return the remaining steps of an epoch for this rank."""
        self._batch_sampler.make_batches = lambda: self._batches_from(epoch, consumed)
        loaded = self._loaded = iter(self._loader)
        batches: list[Batch] = []
        for content in loaded:
            indices = self._batch_sampler.in_progress.popleft()  # in order: the batch sampler runs ahead of the loader
            batches.append(Batch(content, indices.count, indices.samples[: indices.count]))
            if indices.total is not None:
                yield Step(batches, indices.total)
                batches = []

    def _batches_from(self, epoch: int, consumed: int) -> Iterator[Indices]:
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


class _EpochBatchSampler:
    """A batch sampler that yields the batches of `make_batches`, and queues them until they are loaded."""

    def __init__(self) -> None:
        self.make_batches: Callable[[], Iterator[Indices]] = lambda: iter(())
        self.in_progress: collections.deque[Indices] = collections.deque()

    def __iter__(self) -> Iterator[Indices]:
        self.in_progress.clear()
        for indices in self.make_batches():
            self.in_progress.append(indices)
            yield indices


class _Rows(Dataset[Any]):
    """A TensorDataset that indexes each tensor once per batch, instead of once per sample."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    def __getitems__(self, indices: Indices) -> list[torch.Tensor]:
        """Return the tensors of a batch."""
        return [tensor[indices.samples] for tensor in self._tensors]


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
            randomness.seed_all(mixed_seed(self._seed, indices.epoch, 1 + samples[0]))
        if (many := getattr(self._dataset, "__getitems__", None)) is not None:
            return many(samples)
        return [self._dataset[sample] for sample in samples]
