"""ElasticSampler: divides the samples of an epoch that are left among the ranks of the current world."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from mpicomm.horovod import context


class ElasticSampler(Sampler[int]):
    """Distributes the samples of a dataset over the ranks, and again after a change of the world.

    Its methods do not communicate; call them on all ranks with the same arguments.

    Samples that `record_batch` has counted are not returned again in the epoch. Add the sampler to a `TorchState`, call
    `record_batch` after every batch, and `set_epoch` at the end of an epoch. If the samples cannot be divided evenly,
    some are repeated, so that every rank gets the same number.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """Create a sampler.

        Args:
            dataset: The dataset, whose length must not change.
            shuffle: Whether to return the samples in a random order.
            seed: The seed of this order, equal on all ranks.
        """
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        """The number of samples of the epoch that all ranks together have processed."""

        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch: no sample is processed, and the order is that of the epoch.

        Args:
            epoch: The number of the epoch.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002  Horovod's interface
        """Count the samples of a batch, which every rank has processed.

        Args:
            batch_idx: The index of the batch, which has no effect.
            batch_size: The number of samples on this rank, equal on all ranks.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, and divide the samples that are left among the ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the samples that are left among the ranks of the current world."""
        self.num_replicas, self.rank = context.size(), context.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return iter(list(padded)[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
