"""The groups on which programs run: the same kinds for each backend, in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tests.worlds import Group

OURS, GLOO = "mpicomm", "gloo"
KINDS = ("world", "copy", "parity", "left", "right")
"""All ranks, all ranks again, even or odd ranks, all but the last, all but the first: the last two overlap."""


@dataclasses.dataclass(frozen=True)
class GroupSet:
    """The groups of one backend that contain this rank, by kind."""

    backend: str
    named: dict[str, Group]

    def __getitem__(self, kind: str) -> Group:
        return self.named[kind]

    def make(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Create another group of this backend; torch requires this call on all ranks."""
        return dist.new_group(list(ranks), backend=self.backend)


Results = dict[str, torch.Tensor]
Program = Callable[[int, int, GroupSet], Results]


def ranks_of(kind: str, rank: int, size: int) -> list[int]:
    """Return the members of the group of this kind that contains `rank`; an empty list if none contains it."""
    everyone = range(size)
    members = {
        "world": everyone,
        "copy": everyone,
        "parity": everyone[rank % 2 :: 2],
        "left": everyone[: max(1, size - 1)],
        "right": everyone[min(1, size - 1) :],
    }[kind]
    return list(members) if rank in members else []


def make_set(backend: str) -> GroupSet:
    """Create the groups of a backend in a job that runs on this package's backend (collective)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    named = {kind: _make(kind, backend, rank, size) for kind in KINDS}
    return GroupSet(backend, {kind: group for kind, group in named.items() if group is not None})


def _make(kind: str, backend: str, rank: int, size: int) -> Group | None:
    if kind == "world" and backend == OURS:
        return _describe(dist.group.WORLD)
    mine = None
    for ranks in sorted({tuple(ranks_of(kind, each, size)) for each in range(size)} - {()}):
        handle = dist.new_group(list(ranks), backend=backend)
        mine = _describe(handle) if rank in ranks else mine
    return mine


def _describe(handle: dist.ProcessGroup) -> Group:
    return Group(handle, dist.get_rank(handle), dist.get_world_size(handle), dist.get_process_group_ranks(handle))
