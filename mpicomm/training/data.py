"""Data of a run: the batches of each rank in each step. An epoch takes each sample exactly once.

The order of the samples in an epoch is the same on all ranks and for any number of ranks, and each step takes the next
samples of this order. One number, the samples consumed so far, is therefore enough to resume within an epoch on any
number of ranks.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import hashlib
import itertools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from mpicomm import torch_internals
from mpicomm.backend.transfer import buffers
from mpicomm.training import preemption, randomness
from mpicomm.training.batches import mapped

_SEED_BITS = 63
_SEED_FACTORS = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
)  # odd multipliers, so that seeds of (epoch, sample) do not collide


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

    inexact_reason: str | None = None
    """Why a run that resumes within an epoch may differ from an uninterrupted one, and the remedy; None if the data are
    the same."""

    layout: Mapping[str, object] = {"kind": "a share of each rank"}
    """The properties by name that must be equal on all ranks."""

    order_settings: Mapping[str, object] = {}
    """The properties by name that determine, with the position in an epoch, which of its samples remain."""

    _loaded: Iterator[Any] = iter(())
    """The batches of the current epoch, from a DataLoader."""

    @abc.abstractmethod
    def steps(self, epoch: int, consumed: int, num_steps: int) -> Iterator[Step]:
        """Return the remaining steps of an epoch.

        Args:
            epoch: The number of the epoch, from 0.
            consumed: The number of its samples that all ranks have already taken.
            num_steps: The number of its steps already taken.
        """

    @abc.abstractmethod
    def total(self) -> int | None:
        """Return the number of samples of all ranks in an epoch; None if unknown. Unless `is_counted`, an estimate."""

    def first(self) -> Step:
        """Return any one batch, as material for padding; an empty step without data, or if no rank needs padding."""
        return Step([])

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


def mixed_seed(seed: int, epoch: int, sample: int) -> int:
    """Return a seed that depends on all three arguments."""
    value = seed + _SEED_FACTORS[0] * (epoch + 1) + _SEED_FACTORS[1] * sample
    value &= (1 << 64) - 1
    value ^= value >> 31
    return (value * _SEED_FACTORS[0] & ((1 << 64) - 1)) >> (64 - _SEED_BITS)


def digest(samples: list[Any]) -> bytes:
    """Return a digest that is equal for equal samples in any process."""

    def content(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return type(value)
        memory = b""
        with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):  # a sparse tensor, for example
            memory = buffers.bytes_of(value.cpu()).numpy().tobytes()
        return value.dtype, value.shape, hashlib.blake2b(memory).hexdigest()

    text = repr([mapped(sample, content) for sample in samples])
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).digest()


class EpochOrder:
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
            generator.manual_seed(mixed_seed(seed, self.epoch, 0))
        return itertools.islice(randomness.drawn(lambda: iter(self._batch_sampler), self.seed), self.start, None)

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def close(self) -> None:
        """Restore the generators of the user, so that another run draws the same orders from them."""
        for generator, _, state in self._generators:
            generator.set_state(state)


_DRAWN_AGAIN = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, list, tuple, range)


def inexact_order(sampler: Any) -> str | None:
    """Return why the order of a user's sampler may not be that of the epoch after a resume; None if it is."""
    if sampler is None or type(sampler) in _DRAWN_AGAIN or hasattr(sampler, "set_epoch"):
        return None
    name = type(sampler).__name__
    return (
        f"{name} has no set_epoch(), so its order may depend on earlier epochs.\n"
        f"Give {name} a set_epoch(epoch) that determines the order"
    )


def set_epoch_of(part: Any, epoch: int) -> None:
    """Call the method set_epoch of a sampler or dataset, if it has one."""
    if hasattr(part, "set_epoch"):
        part.set_epoch(epoch)


def unchanged(batch: Any) -> Any:
    """Return the batch: a collate_fn for batches that are collated already. A function, because workers unpickle it."""
    return batch


def start_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """Ignore the preemption signals in a worker process, then call the worker_init_fn of the user.

    Schedulers send these signals to all processes, and the ranks need further batches until they have stopped.
    """
    for number in preemption.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if then is not None:
        then(worker)
