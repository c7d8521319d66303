"""Resolves the `group=` argument of an operation to its ranks."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import arguments, mpi, torch_internals
from mpicomm.arguments import Expected
from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.devices import accelerator
from mpicomm.job import session

NODE, LEADERS = "node", "leaders"
_NAME = dataclasses.replace(
    arguments.one_of(NODE, LEADERS), remedy="Pass one of these names, or a group of torch or mpi4py."
)
_GROUP = Expected(
    f"a torch ProcessGroup, an mpi4py communicator, {NODE!r} or {LEADERS!r}",
    lambda group: hasattr(group, "Get_group"),  # a communicator; `_find` handles the other kinds before
    remedy="Pass one of these, or omit group for all ranks; make a group with torch.distributed.new_group(ranks).",
)


@dataclasses.dataclass(frozen=True)
class GroupArgument:
    """A group, and this rank's rank in it. Ranks are numbered within the group, except in `ranks`."""

    handle: Any
    rank: int
    size: int

    ranks: tuple[int, ...]
    """The ranks in the job (global ranks), by rank in the group."""

    is_ours: bool
    """Whether the group uses this backend: its callbacks run at the same position among the operations on all ranks."""

    control: torch.device
    """The device for the small control tensors of an operation: the CPU if the group takes CPU tensors."""

    exchanges: Iterator[int] = dataclasses.field(default_factory=itertools.count, repr=False, compare=False)
    """Numbers the calls of `HaloExchange`."""

    kept: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    """What `repeated_calls` keeps of the group's calls."""

    @functools.cached_property
    def expected_rank(self) -> Expected:
        """The check of an argument that is a rank within the group."""
        remedy = f"Pass a rank within the group, which has {self.size} ranks."
        return arguments.integer(0, self.size - 1, remedy)


_known: dict[Any, GroupArgument] = {}
_Key = tuple[str, tuple[int, ...], int]
"""Kind and ranks of a group, and the number of recoveries before it was created."""

_made: dict[_Key, Any] = {}
"""The groups created for `"node"`, `"leaders"` and communicators."""

_counts: collections.defaultdict[_Key, Iterator[int]] = collections.defaultdict(itertools.count)
"""How often each group was created, for its name; equal on all its ranks."""


def resolve(group: Any, operation: str, **ranks: int) -> GroupArgument:
    """Return the group that an argument stands for, after checking the arguments that are ranks within it.

    Args:
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" for the ranks of this node, "leaders" for the
            first rank of each node, or None for all ranks. For a communicator, "node" and "leaders", the first use
            creates the group (collective over its ranks).
        operation: The name of the operation, for the message.
        **ranks: The arguments that are ranks, by name.

    Raises:
        ValueError: If this rank is not in the group, the group's name is unknown, or a rank is not in the group.
        TypeError: If the argument is not a group, or a rank is not an integer.
    """
    handle = group
    if not isinstance(group, dist.ProcessGroup):
        handle = _find(group, operation)
    members = _known.get(handle)
    if members is None:
        _forget_destroyed()
        members = _known[handle] = _describe(handle)
    for name, rank in ranks.items():
        members.expected_rank.check(rank, name, operation)
    return members


def _forget_destroyed() -> None:
    """Remove destroyed groups from the caches."""
    for groups in (_known, _made):
        for key, value in list(groups.items()):
            if not torch_internals.is_alive(value.handle if isinstance(value, GroupArgument) else value):
                del groups[key]


def _find(group: Any, operation: str) -> Any:
    if group is None:
        return _world(operation)
    if isinstance(group, str):
        return _of_topology(group, operation)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{operation}: this rank is not in the group.\nCall it on the group's members only.")
    _GROUP.check(group, "group", operation)
    return _of_comm(group, operation)


def _world(operation: str) -> Any:
    if not dist.is_initialized():
        raise ValueError(f"{operation}: torch.distributed is not initialized.\nCall mpicomm.bootstrap() first.")
    return dist.group.WORLD


def _of_topology(name: str, operation: str) -> Any:
    nodes, own_rank = session.current_world().nodes, dist.get_rank(_world(operation))
    leaders = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
    if name == NODE:
        return _made_once(NODE, [rank for rank, node in enumerate(nodes) if node == nodes[own_rank]])
    _NAME.check(name, "group", operation)
    if leaders[nodes[own_rank]] != own_rank:
        raise ValueError(
            f"{operation}: rank {own_rank} is not in the group {LEADERS!r}; the first rank of its node is rank "
            f"{leaders[nodes[own_rank]]}.\n"
            f"Call it only where world.local_rank == 0."
        )
    return _made_once(LEADERS, sorted(leaders.values()))


def _of_comm(comm: Any, operation: str) -> Any:
    ranks = mpi.ranks_within(comm, mpi.job_comm())
    if comm.Is_inter() or mpi.api().UNDEFINED in ranks or ranks != sorted(ranks):
        raise ValueError(
            f"{operation}: group must be an intracommunicator of the job's ranks in ascending order, "
            f"got ranks {ranks}.\n"
            f"Pass an intracommunicator within the job, in the order of its ranks."
        )
    return _made_once("comm", ranks)


def _made_once(kind: str, ranks: Sequence[int]) -> Any:
    """Return the group of some ranks; the first use creates it (collective over these ranks)."""
    key = (kind, tuple(ranks), session.recoveries())  # a rank that was a spare has created no groups before
    handle = _made.get(key)
    if handle is None or not torch_internals.is_alive(handle):
        name = f"mpicomm:{kind}:{next(_counts[key])}:{'-'.join(map(str, ranks))}"
        handle = _made[key] = torch_internals.make_group(ranks, name, timeout_of_job())
    return handle


def timeout_of_job() -> datetime.timedelta | None:
    """Return the timeout of the default group; None (torch's default) if it uses another backend."""
    world = dist.group.WORLD
    return datetime.timedelta(seconds=world.timeout_seconds) if isinstance(world, MPIProcessGroup) else None


def _describe(handle: Any) -> GroupArgument:
    is_ours = isinstance(handle, MPIProcessGroup)
    on_host = is_ours or torch_internals.takes_host_tensors(handle)
    return GroupArgument(
        handle,
        dist.get_rank(handle),
        dist.get_world_size(handle),
        tuple(dist.get_process_group_ranks(handle)),
        is_ours,
        torch.device("cpu") if on_host else accelerator.current_device(),
    )
