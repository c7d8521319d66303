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
from torch.distributed.tensor import DTensor

from mpicomm.collective_ops import collectives, point_to_point
from mpicomm.training import parallel, state
from mpicomm.training.assembly import Assembly

Version = tuple[int, int]
"""The number of the world and the step of a refresh; greater for later ones."""


@dataclasses.dataclass(frozen=True)
class HeldShards:
    """The shards of one version that a rank holds, for the agreement of the ranks."""

    version: Version
    ranks: tuple[int, ...]
    """The ranks, in the world of the version, whose shards these are."""

    size: int
    """The number of ranks of that world."""


@dataclasses.dataclass(frozen=True)
class _Description:
    """The content of a shard other than its tensors: equal on all ranks."""

    names: Sequence[tuple[str, ...]]
    are_sharded: Sequence[bool]
    groups: Any
    """The parameter groups of the optimizer."""

    run: Mapping[str, Any]
    """The objects of the run that are equal on all ranks."""


@dataclasses.dataclass(frozen=True)
class _Copies:
    """The shards of one version that this rank holds."""

    size: int
    description: _Description
    shards: Mapping[int, Sequence[torch.Tensor]]
    """By rank in the world of the version."""


class ShardReplicas:
    """The copies of shards that this rank holds."""

    def __init__(self, every: int) -> None:
        """Start without copies.

        Args:
            every: The number of steps from one refresh to the next.
        """
        self._every = every
        self._versions: dict[Version, _Copies] = {}

    @property
    def held(self) -> tuple[HeldShards, ...]:
        """The shards that this rank holds: of one version, or of two if a refresh was interrupted."""
        return tuple(
            HeldShards(version, tuple(copies.shards), copies.size) for version, copies in self._versions.items()
        )

    def refresh(self, parts: Assembly, *, only_if_due: bool = False, has_callbacks: bool = True) -> None:
        """Copy this rank's shard, and exchange copies with the neighbours (collective).

        Args:
            parts: The objects of the run.
            only_if_due: Do so only after every `every`-th step.
            has_callbacks: Whether the callbacks have states, which exist from `on_setup` on.
        """
        world, step = parts.world, parts.position.step
        if only_if_due and step % self._every:
            return
        description, own = _copied(parts, has_callbacks=has_callbacks)
        shards = {world.rank: own}
        if world.size > 1:
            following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
            shards[previous] = point_to_point.sendrecv(own, following, previous)
        version = (world.recoveries, step)
        self._versions[version] = _Copies(world.size, description, shards)
        # The earlier version may be released only when every rank has the new one.
        dist.barrier()
        self._versions = {version: self._versions[version]}

    def restore(self, parts: Assembly, held: Sequence[Sequence[HeldShards]]) -> bool:
        """Restore the newest version of which all shards are left, and return whether there is one (collective).

        Args:
            parts: The objects to restore, on any number of ranks.
            held: The shards that each rank holds.
        """
        version, holders = newest_complete(held)
        if version is None:
            return False
        rank, copies = dist.get_rank(), self._versions.get(version)
        shards = {} if copies is None else copies.shards
        # 1. share the description of the shards, and the shapes of their tensors
        own = None if copies is None else copies.description
        description: _Description = collectives.broadcast_object(own, src=holders[0])
        shapes = collectives.all_gather_object(
            {shard: [(tensor.shape, tensor.dtype) for tensor in tensors] for shard, tensors in shards.items()}
        )
        # 2. assemble one tensor after the other, and take this rank's part of it
        model, optimizer = state.model_and_optimizer(parts)
        content = {"model": model, "optimizer": optimizer}
        targets = dict(_tensors_in(content))
        kept = set()
        for number, name in enumerate(description.names):
            pieces = []
            for shard, holder in enumerate(holders):
                shape, dtype = shapes[holder][shard][number]
                piece = shards[shard][number] if rank == holder else torch.empty(shape, dtype=dtype)
                dist.broadcast(piece, holder)
                pieces.append(piece)
            whole = torch.cat(pieces) if description.are_sharded[number] else pieces[0]
            _take_part(targets[name], whole, parts.world.size, rank)
            kept.add(name[:-1])
        # 3. load the objects
        optimizer["state"] = {
            name: values for name, values in optimizer["state"].items() if ("optimizer", name) in kept
        }
        optimizer["param_groups"] = description.groups
        state.load_model_and_optimizer(parts, model, optimizer)
        state.load_shared_state(parts, description.run)
        return True


def newest_complete(held: Sequence[Sequence[HeldShards]]) -> tuple[Version | None, list[int]]:
    """Return the newest version of which every shard is left, and the lowest rank that holds each shard.

    Args:
        held: The shards that each rank holds.
    """
    holders: dict[Version, dict[int, int]] = {}
    sizes: dict[Version, int] = {}
    for rank, versions in enumerate(held):
        for shards in versions:
            sizes[shards.version] = shards.size
            for shard in shards.ranks:
                holders.setdefault(shards.version, {}).setdefault(shard, rank)
    complete = [version for version, by_shard in holders.items() if len(by_shard) == sizes[version]]
    if not complete:
        return None, []
    newest = max(complete)
    return newest, [holders[newest][shard] for shard in range(sizes[newest])]


def _copied(parts: Assembly, *, has_callbacks: bool) -> tuple[_Description, list[torch.Tensor]]:
    """Return the description of the shards, and copies of the tensors of this rank's shard in host memory."""
    model, optimizer = state.model_and_optimizer(parts)
    named = list(_tensors_in({"model": model, "optimizer": optimizer}))
    tensors = [parallel.local(tensor).detach().to("cpu", copy=True).contiguous() for _, tensor in named]
    are_sharded = [isinstance(tensor, DTensor) for _, tensor in named]
    run = copy.deepcopy(
        state.shared_state(parts, has_callbacks=has_callbacks)
    )  # the states of callbacks are not copies
    return _Description([name for name, _ in named], are_sharded, optimizer["param_groups"], run), tensors


def _tensors_in(content: Mapping[str, Any]) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    """Return the tensors of a model and an optimizer, with their names."""
    values: list[tuple[tuple[str, ...], Any]] = [(("model", name), value) for name, value in content["model"].items()]
    for name, of_parameter in content["optimizer"]["state"].items():
        values += [(("optimizer", name, key), value) for key, value in of_parameter.items()]
    return [(name, value) for name, value in values if isinstance(value, torch.Tensor)]


def _take_part(target: torch.Tensor, whole: torch.Tensor, size: int, rank: int) -> None:
    """Copy this rank's part of a tensor, as FSDP shards it: chunks of the first dimension."""
    if isinstance(target, DTensor):
        chunks = whole.chunk(size)
        whole = chunks[rank] if rank < len(chunks) else whole[:0]
    parallel.local(target).copy_(whole)
