"""The data that users pass to `fit`, `evaluate`, `predict` and `prepare`: which source they become."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from mpicomm import arguments
from mpicomm.training.data import DataRank, DataSource, LoaderOptions, start_worker
from mpicomm.training.indexed_data import IndexedSource
from mpicomm.training.streamed_data import IterableSource, LoaderSource

# The attributes of a user's DataLoader that the DataLoader of a rank takes over unchanged.
_PASSED_ON = ("worker_init_fn", "timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")

SHARD = arguments.FLAG.or_none()


def make_source(
    data: Any, options: LoaderOptions, data_rank: DataRank, *, shard: bool | None = None, may_drop: bool = True
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
        return _source_of_loader(data, options, data_rank, shard, may_drop)
    if isinstance(data, IterableDataset):
        return IterableSource(data, options, data_rank, shard)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        if shard is False:
            loader = DataLoader(
                data,
                options.batch_size,
                options.shuffle if len(data) else None,  # RandomSampler refuses empty datasets
                num_workers=options.num_workers,
                pin_memory=options.pin_memory,
                worker_init_fn=functools.partial(start_worker, None),
            )
            return LoaderSource(loader, options, data_rank)
        return IndexedSource(data, options, data_rank)
    raise TypeError(
        f"expected a dataset (with __getitem__ and __len__, or an IterableDataset) or a DataLoader, got a "
        f"{type(data).__name__}.\n"
        f"Wrap tensors in torch.utils.data.TensorDataset(inputs, targets)."
    )


def _source_of_loader(
    loader: DataLoader[Any], options: LoaderOptions, data_rank: DataRank, shard: bool | None, may_drop: bool
) -> DataSource:
    is_replaced = type(loader).__iter__ is not DataLoader.__iter__
    if shard is None:
        if is_replaced and _is_usual(loader) and data_rank.size > 1:
            raise ValueError(
                f"{type(loader).__name__} has an __iter__ of its own, so the samples that it yields are unknown.\n"
                f"Set shard=False if each rank passes its own share, or shard=True if the ranks are to share the "
                f"samples of its dataset without this __iter__."
            )
        shard = not is_replaced and _is_usual(loader)
    if not shard:
        return LoaderSource(loader, options, data_rank)
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
    return IndexedSource(loader.dataset, options, data_rank, length=length, sampler=own, drop_last=drop_last, **loading)


def _is_usual(loader: DataLoader[Any]) -> bool:
    """Return whether a loader takes the samples 0, 1, ... n - 1 of its dataset once, sequentially or shuffled.

    n is the length of the sampler's data source, which can be smaller than that of the dataset.
    """
    sampler: Any = loader.sampler
    if loader.batch_size is None or type(sampler) not in (RandomSampler, SequentialSampler):
        return False
    return not getattr(sampler, "replacement", False) and len(sampler) == len(sampler.data_source)
