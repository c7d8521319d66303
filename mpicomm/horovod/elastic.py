"""hvd.elastic: training that continues with the other ranks when ranks fail, on the recovery of `mpicomm.recover()`.

The first argument of a function decorated with `run` is a state. After a failure every surviving rank restores its last
commit, the ranks form a new world, one of them sends its state to the others, and `run` calls the function again.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Sized
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import Sampler

from mpicomm import mpi
from mpicomm.errors import RankFailedError
from mpicomm.horovod import context
from mpicomm.horovod.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from mpicomm.horovod.submission import HorovodInternalError, Min
from mpicomm.horovod.tensor_operations import allreduce
from mpicomm.job import recovery, session
from mpicomm.watchdog import error_output, rank_failures

T = TypeVar("T")

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  Horovod's name
    """An exception by which a function in `hvd.elastic.run` requests that it is called again; raise it on all ranks.

    Attributes:
        skip_sync: Whether to omit the synchronization of the state before the next call.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class State:
    """The state of a training run that survives a failure; base class of `ObjectState` and `TorchState`."""

    num_commits = 0
    """The number of calls of `commit`."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        """Create a state.

        Args:
            bcast_object: Returns the object of one rank on all ranks (collective).
            get_rank: Returns the rank of this process.
        """
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], Any]]) -> None:
        """Call functions after each change of the world, such as one that scales the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the reset callbacks in a new world; `run` calls it before `sync`. Does not communicate."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state in host memory; after a failure, training continues from the last commit.

        Does not communicate. All ranks must commit at the same point of the training.
        """
        self.save()
        self.num_commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: a running MPI job gets no new hosts, and the next operation raises an error after a failure."""

    def save(self) -> None:
        """Save the state in host memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Send the state of one rank to all others (collective)."""
        raise NotImplementedError

    def reset(self) -> None:
        """Reset what depends on the world; called before `sync`."""


class ObjectState(State):
    """The state of Python objects, which are attributes of the state."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        """Create a state.

        Args:
            bcast_object: Returns the object of one rank on all ranks (collective).
            get_rank: Returns the rank of this process.
            **kwargs: The names and the objects.
        """
        self._saved_state = kwargs
        self._set_attributes()
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        """Save the objects; a list that is changed in place keeps its content at the time of the commit."""
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        """Return to the saved objects."""
        self._set_attributes()

    def sync(self) -> None:
        """Send the saved objects of one rank to all others (collective)."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """The state of models, optimizers, samplers and Python objects, which are attributes of the state."""

    def __init__(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        """Create a state.

        Args:
            model: A model.
            optimizer: Its optimizer, which may be a DistributedOptimizer.
            **kwargs: Further models, optimizers, `ElasticSampler`s and objects that can be pickled.
        """
        values = {**kwargs, "model": model, "optimizer": optimizer}
        self._handlers: dict[str, _Handler] = {}
        for name, value in list(values.items()):
            for kind, sync in _SYNCS.items():
                if isinstance(value, kind):
                    object.__setattr__(self, name, values.pop(name))
                    self._handlers[name] = _Handler(value, sync)
                    break  # an object may be of two kinds
        super().__init__(_broadcast_from_survivor, context.rank, **values)

    def save(self) -> None:
        """Save the state in host memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Return to the saved state."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Send the state of a rank that has one to all others, and save it (collective)."""
        root = _surviving_rank()
        for handler in self._handlers.values():
            handler.sync(root)
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name].replace(value)
        super().__setattr__(name, value)


# -- the sampler -------------------------------------------------------------------------------------------------------


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


# -- models, optimizers and samplers -----------------------------------------------------------------------------------


class _Handler:
    """The saved state of a model, an optimizer or a sampler."""

    def __init__(self, value: Any, sync: Callable[[Any, int], None]) -> None:
        self._sync = sync
        self.replace(value)

    def replace(self, value: Any) -> None:
        """Save another object from now on."""
        self._value = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self._value.state_dict())

    def restore(self) -> None:
        # a copy, because an optimizer keeps the tensors that it loads
        self._value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self, root: int) -> None:
        """Load the state of the rank `root` on all ranks, and save it (collective)."""
        self._sync(self._value, root)
        self.save()


_SYNCS: dict[type, Callable[[Any, int], None]] = {
    nn.Module: lambda model, root: broadcast_parameters(model.state_dict(), root),
    torch.optim.Optimizer: broadcast_optimizer_state,
    ElasticSampler: lambda sampler, root: sampler.load_state_dict(
        broadcast_object(sampler.state_dict(), root, "elastic.sampler")
    ),
}
"""The classes whose objects have a state of their own, and the functions that send it (collective)."""


def _surviving_rank() -> int:
    """Return the lowest rank that was in the previous world, because a spare has no state (collective)."""
    world = session.current_world()
    candidate = world.size if world.previous_rank is None else world.rank
    lowest = allreduce(torch.tensor([candidate]), op=Min, name="elastic.surviving_rank")
    return int(lowest)


def _broadcast_from_survivor(obj: Any) -> Any:
    return broadcast_object(obj, _surviving_rank(), "elastic.state")


# -- the loop ----------------------------------------------------------------------------------------------------------


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Call a function again after a failure of ranks, from the last commit; use it as a decorator.

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, epochs):
                ...
                state.commit()

    A spare that replaces a failed rank runs the program from `hvd.init()` on, so the program must not run operations
    between `hvd.init()` and the function.

    Args:
        func: The function; its first argument is the `State`.

    Returns:
        The function that calls it again (collective). It raises a HorovodInternalError if an operation fails twice
        without a commit in between, although no rank has failed.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        _warn_without_recovery()
        needs_sync, commits_at_error = True, -1
        while True:
            try:
                if needs_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt as interrupt:
                needs_sync = not interrupt.skip_sync
            except (HorovodInternalError, RankFailedError) as error:
                if not _has_failed_rank():
                    if state.num_commits == commits_at_error or _others_wait(error):
                        raise
                    commits_at_error = state.num_commits
                    _report(error)
                state.restore()
                needs_sync = True
            _rejoin_job()
            state.on_reset()

    return wrapper


def _warn_without_recovery() -> None:
    if rank_failures.current() is None and context.rank() == 0:
        warnings.warn(
            "hvd.elastic.run: the job was started without recovery, so a failed rank ends it.\n"
            "Start it with `mpicomm run --horovod --fault-tolerant`.",
            stacklevel=3,
        )


def _others_wait(error: Exception) -> bool:
    """Return whether the error has occurred on this rank, and the other ranks wait for it as they cannot be told."""
    cause = error.__cause__
    return cause is not None and not isinstance(cause, HorovodInternalError) and not mpi.tolerates_failures()


def _report(error: Exception) -> None:
    """Print an error from which training continues, although no rank has failed."""
    rank = session.describe_rank(session.current_world())
    text = "".join(traceback.format_exception(error.__cause__ or error, chain=False))
    error_output.print_stderr(f"[mpicomm] {rank}: continuing from the last commit after an error:\n{text}")


def _has_failed_rank() -> bool:
    failures = rank_failures.current()
    return failures is not None and failures.wait_until_known()


def _rejoin_job() -> None:
    """Form the job anew, without the failed ranks (collective over the others)."""
    try:
        if _has_failed_rank():
            recovery.recover()
        context.shutdown()
        context.init()
    except (HorovodInternalError, RankFailedError):
        if not _has_failed_rank():
            raise
        _rejoin_job()  # another rank has failed
