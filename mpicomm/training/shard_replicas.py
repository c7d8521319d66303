"""Copies of the shards of a sharded model (FSDP) in the memory of two ranks, from which a failed rank's shard returns.

Each rank keeps a copy of its own shard of the parameters and of the optimizer's state, and one of the shard of the
previous rank, both in host memory. All copies of one refresh are of the same step, so together they are a state of the
run as long as no two neighbouring ranks fail between two refreshes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from mpicomm.collective_ops import collectives, point_to_point
from mpicomm.training import state
from mpicomm.training.state import Parts

Version = tuple[int, int]
"""The number of the world and the step of a refresh; greater for later ones."""


@dataclasses.dataclass(frozen=True)
class Held:
    """The shards of one version that a rank holds, for the agreement of the ranks."""

    version: Version
    ranks: tuple[int, ...]
    """The ranks, in the world of the version, whose shards these are."""

    size: int
    """The number of ranks of that world."""


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A copy of the shard of one rank."""

    tensors: Sequence[torch.Tensor]
    about: _About


@dataclasses.dataclass(frozen=True)
class _About:
    """The content of a shard other than its tensors."""

    names: Sequence[tuple[str, ...]]
    are_sharded: Sequence[bool]
    groups: Any
    """The parameter groups of the optimizer."""

    run: Mapping[str, Any]
    """The objects that are equal on all ranks."""


@dataclasses.dataclass(frozen=True)
class _Version:
    size: int
    shards: Mapping[int, _Shard]
    """By rank in the world of the version."""


class ShardReplicas:
    """The copies of shards that this rank holds."""

    def __init__(self, every: int) -> None:
        """Start without copies.

        Args:
            every: The number of steps from one refresh to the next.
        """
        self._every = every
        self._versions: dict[Version, _Version] = {}

    @property
    def held(self) -> tuple[Held, ...]:
        """The shards that this rank holds: of one version, or of two if a refresh was interrupted."""
        return tuple(Held(version, tuple(each.shards), each.size) for version, each in self._versions.items())

    def refresh_if_due(self, parts: Parts) -> None:
        """Refresh the copies after every `every`-th step (collective)."""
        if parts.position.step % self._every == 0:
            self.refresh(parts)

    def refresh(self, parts: Parts) -> None:
        """Copy this rank's shard, and exchange copies with the neighbours (collective)."""
        world = parts.world
        mine = _copied(parts)
        shards = {world.rank: mine}
        if world.size > 1:
            following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
            tensors = point_to_point.sendrecv(list(mine.tensors), following, previous)
            shards[previous] = _Shard(tensors, mine.about)
        version = (world.recoveries, parts.position.step)
        self._versions[version] = _Version(world.size, shards)
        # The earlier version may be released only when every rank has the new one.
        dist.barrier()
        self._versions = {version: self._versions[version]}

    def restore(self, parts: Parts, held: Sequence[Sequence[Held]]) -> bool:
        """Restore the newest version of which all shards are left, and return whether there is one (collective).

        Args:
            parts: The objects to restore, on any number of ranks.
            held: The shards that each rank holds.
        """
        version, holders = newest_complete(held)
        if version is None:
            return False
        rank = dist.get_rank()
        own = self._versions[version].shards if version in self._versions else {}
        # 1. broadcast the descriptions of the shards
        first = holders[0]
        mine = own.get(0) if rank == first else None
        about: _About = collectives.broadcast_object(mine.about if mine is not None else None, src=first)
        shapes = {
            shard: collectives.broadcast_object(
                [(each.shape, each.dtype) for each in own[shard].tensors] if rank == holder else None, src=holder
            )
            for shard, holder in enumerate(holders)
        }
        # 2. assemble one tensor after the other, and take this rank's part of it
        model: Any
        optimizer: Any
        model, optimizer = get_state_dict(parts.wrapped.inner, parts.optimizer)
        content = {"model": model, "optimizer": optimizer}
        targets = dict(_tensors_in(content))
        kept = set()
        for number, name in enumerate(about.names):
            pieces = []
            for shard, holder in enumerate(holders):
                shape, dtype = shapes[shard][number]
                piece = own[shard].tensors[number] if rank == holder else torch.empty(shape, dtype=dtype)
                dist.broadcast(piece, holder)
                pieces.append(piece)
            whole = torch.cat(pieces) if about.are_sharded[number] else pieces[0]
            _take_part(targets[name], whole, parts.world.size, rank)
            kept.add(name[:-1])
        # 3. load the objects
        optimizer["state"] = {name: each for name, each in optimizer["state"].items() if ("optimizer", name) in kept}
        optimizer["param_groups"] = about.groups
        set_state_dict(
            parts.wrapped.inner,
            parts.optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=StateDictOptions(strict=False),  # a parameter that never had a gradient has no state
        )
        state.load_of_all_ranks(parts, about.run)
        return True


def newest_complete(held: Sequence[Sequence[Held]]) -> tuple[Version | None, list[int]]:
    """Return the newest version of which every shard is left, and the lowest rank that holds each shard.

    Args:
        held: The shards that each rank holds.
    """
    holders: dict[Version, dict[int, int]] = {}
    sizes: dict[Version, int] = {}
    for rank, of_rank in enumerate(held):
        for each in of_rank:
            sizes[each.version] = each.size
            for shard in each.ranks:
                holders.setdefault(each.version, {}).setdefault(shard, rank)
    complete = [version for version, found in holders.items() if len(found) == sizes[version]]
    if not complete:
        return None, []
    newest = max(complete)
    return newest, [holders[newest][shard] for shard in range(sizes[newest])]


def _copied(parts: Parts) -> _Shard:
    model, optimizer = get_state_dict(parts.wrapped.inner, parts.optimizer)
    named = list(_tensors_in({"model": model, "optimizer": optimizer}))
    tensors = [_local(each).detach().to("cpu", copy=True).contiguous() for _, each in named]
    are_sharded = [isinstance(each, DTensor) for _, each in named]
    run = copy.deepcopy(state.of_all_ranks(parts))  # the states of callbacks are not copies
    about = _About([name for name, _ in named], are_sharded, optimizer["param_groups"], run)
    return _Shard(tensors, about)


def _tensors_in(content: Mapping[str, Any]) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    """Return the tensors of a model and an optimizer, with their names."""
    model = [(("model", name), each) for name, each in content["model"].items() if isinstance(each, torch.Tensor)]
    optimizer = [
        (("optimizer", name, key), each)
        for name, values in content["optimizer"]["state"].items()
        for key, each in values.items()
        if isinstance(each, torch.Tensor)
    ]
    return [*model, *optimizer]


def _take_part(target: torch.Tensor, whole: torch.Tensor, size: int, rank: int) -> None:
    """Copy this rank's part of a tensor, as FSDP shards it: chunks of the first dimension."""
    local = _local(target)
    if isinstance(target, DTensor):
        chunks = whole.chunk(size)
        whole = chunks[rank] if rank < len(chunks) else whole[:0]
    local.copy_(whole)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
