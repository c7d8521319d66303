"""Training loops of the user: `prepare` replicates or shards the model, and shares the data among the ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from mpicomm import arguments
from mpicomm.arguments import FLAG
from mpicomm.job import session
from mpicomm.job.session import World
from mpicomm.training import batches, optimizers, parallel, rank_sync
from mpicomm.training.data import DataRank, LoaderOptions
from mpicomm.training.data_argument import SHARD, make_source
from mpicomm.training.indexed_data import IndexedSource
from mpicomm.training.parallel import ParallelOptions

_LOADER = arguments.instance(
    "a torch.utils.data.DataLoader", DataLoader, remedy="Pass for example DataLoader(dataset, batch_size=32)."
)
_SEED = arguments.integer()


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *loaders: DataLoader[Any],
    strategy: str = "ddp",
    find_unused_parameters: bool = False,
    compile_model: bool = False,
    seed: int = 0,
    shard: bool | None = None,
) -> tuple[Any, ...]:
    """Prepare a model, its optimizer and data loaders for a training loop of your own on all ranks (collective).

    Example::

        model, optimizer, loader = mpicomm.prepare(model, optimizer, loader)
        for epoch in range(10):
            for x, target in loader:
                optimizer.zero_grad()
                loss = loader.weight * loss_fn(model(x), target)
                loss.backward()
                optimizer.step()

    Args:
        model: The model, with the same modules on all ranks. The parameters of rank 0 are broadcast.
        optimizer: An optimizer of the model's parameters.
        loaders: DataLoaders, each of which becomes a `PreparedLoader`.
        strategy: "ddp" replicates the model on each rank; "fsdp" shards each parameter over the ranks (FSDP2).
        find_unused_parameters: Set it if some steps do not use all parameters (DDP).
        compile_model: Use torch.compile, as `Trainer` does.
        seed: The seed of the order of samples.
        shard: Whether the ranks share the samples of the loaders (True), or each rank passes its own share (False), as
            in `Trainer.fit`.

    Returns:
        The model on the rank's device, wrapped in DistributedDataParallel or FSDP2; the optimizer; and a
        `PreparedLoader` for each loader.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If strategy is unknown, a dataset is empty, or the optimizer has parameters of another model.
        TrainingError: On every rank, if the loaders of the ranks differ.
        MpicommError: If `mpicomm.bootstrap()` was not called.
    """
    # 1. check the arguments
    world = session.current_world()
    options = ParallelOptions(strategy, None, False, find_unused_parameters, compile_model)
    optimizers.check_parameters(model, optimizer)
    for name, value in (("find_unused_parameters", find_unused_parameters), ("compile_model", compile_model)):
        FLAG.check(value, name, "prepare")
    _SEED.check(seed, "seed", "prepare")
    SHARD.check(shard, "shard", "prepare")
    for loader in loaders:
        _LOADER.check(loader, "each loader", "prepare")
    rank_sync.check_equal({"the number of loaders": len(loaders)}, "prepare", "Pass as many loaders on every rank.")
    prepared = [PreparedLoader(loader, world, seed, shard, f"loader {n}") for n, loader in enumerate(loaders, start=1)]
    # 2. replicate or shard the model
    names = parallel.names_in(optimizer, model)
    wrapped = parallel.wrap(model, optimizer, names, world.device, options, None)
    return wrapped.model, optimizer, *prepared


class PreparedLoader:
    """The batches of this rank from a DataLoader whose samples the ranks share, on the rank's device.

    Each global batch takes the next `batch_size` x ranks samples in an order that all ranks agree on, for a shuffled
    loader a new one in each epoch. Every rank gets the same number of batches. A DataLoader with a sampler of your own,
    or an iterable-style dataset, is used unchanged: each rank passes its own share, unless shard=True.
    """

    def __init__(self, loader: DataLoader[Any], world: World, seed: int, shard: bool | None, name: str) -> None:
        self._world = world
        data_rank = DataRank(world.rank, world.size)
        make = functools.partial(make_source, loader, LoaderOptions(seed=seed), data_rank, shard=shard)
        self._source = rank_sync.agreed_source(make, {}, "prepare", name)
        self._epoch = 0
        self.weight = 1.0
        """The weight of this rank's loss in the current batch: its samples x ranks / samples of all ranks.

        DDP and FSDP average the gradients of the ranks with equal weights. Multiply the mean loss of the batch by this
        weight, and the gradient is that of the mean over all samples, also in the last batch of an epoch, of which the
        ranks can have different numbers of samples. A rank without samples gets a batch as padding, with a weight of 0.
        """

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, from 0, on which the order of the samples depends.

        Each iteration starts the next epoch, so this is only needed to resume a run.

        Args:
            epoch: The number of the epoch.
        """
        arguments.integer(0).check(epoch, "epoch", "set_epoch")
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        Raises:
            TypeError: If it is unknown, because each rank has its own samples.
        """
        if not isinstance(self._source, IndexedSource):
            raise TypeError(
                "the number of batches is unknown: each rank has its own samples, and the ranks agree on each batch.\n"
                "Pass a DataLoader of a dataset with indices and without a sampler of your own."
            )
        return sum(1 for _ in self._source.partition.bounds(0))

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch (collective)."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        steps = self._source.steps(epoch, 0, 0)
        padding = functools.partial(rank_sync.padding, self._source, device=self._world.device)
        for step in rank_sync.aligned_steps(self._source, steps, padding):
            (batch,) = step.batches
            self.weight = batch.count * self._world.size / step.total
            yield batches.moved(batch.content, self._world.device)
