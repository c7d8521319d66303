"""A pytest plugin: the groups of the tests under mpirun, created once per session in the plugin's `world`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

import mpicomm
from tests import nodes

if TYPE_CHECKING:
    import torch.distributed as dist

MAIN_KINDS = ("world", "mpi", "alone", "parity", "staged", "debug")
"""The groups that differ in the path of all operations."""

KINDS = [*MAIN_KINDS, *nodes.KINDS]
"""The groups on which the tests of the backend run; `nodes.KINDS` differ in reductions, all_gather and broadcast."""


@dataclasses.dataclass(frozen=True)
class Group:
    """A group that contains this rank: its handle for torch's `group=`, this rank in the group, all global ranks."""

    handle: dist.ProcessGroup
    rank: int
    size: int
    ranks: list[int]


def on_groups(*kinds: str) -> pytest.MarkDecorator:
    """Run a test on groups of these kinds, instead of all `KINDS`."""
    return pytest.mark.parametrize("group", kinds, indirect=True)


@pytest.hookimpl(tryfirst=True)  # before tests without the mark are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use the world."""
    for item in items:
        if "bootstrap_options" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.mpi)


@pytest.fixture(scope="session")
def bootstrap_options() -> dict[str, Any]:
    return {"backend": "mpi"}


@pytest.fixture(scope="session")
def groups(world: mpicomm.World) -> dict[str, Group]:
    """Create one group of each kind.

    `world` is the default group, as `bootstrap()` creates it. `copy` has the same ranks; `alone` one rank; `parity` the
    even or the odd ranks. `mpi` uses MPI only, as between nodes (MPICOMM_SHARED_MEMORY=0). The ranks of `debug` compare
    their calls (MPICOMM_DEBUG=1). Tensors of `staged` are staged like GPU tensors; those of `nodes.KINDS` use the
    shared memory of a node at all sizes.
    """
    import torch.distributed as dist

    from tests.movers import stage

    everyone = list(range(world.size))
    parity = [[rank for rank in everyone if rank % 2 == odd] for odd in (0, 1)]
    handles = {
        "world": dist.group.WORLD,
        "copy": dist.new_group(everyone),
        "alone": dist.new_subgroups_by_enumeration([[rank] for rank in everyone])[0],
        "parity": dist.new_subgroups_by_enumeration([ranks for ranks in parity if ranks])[0],
    }
    handles["staged"] = dist.new_group(everyone)
    stage(handles["staged"])
    handles["mpi"] = _with_setting("MPICOMM_SHARED_MEMORY", "0", lambda: dist.new_group(everyone))
    handles["debug"] = _with_setting("MPICOMM_DEBUG", "1", lambda: dist.new_group(everyone))
    for kind in nodes.KINDS:
        handles[kind] = dist.new_group(everyone)
        nodes.lead_by(kind, handles[kind])
    return {name: _describe(handle) for name, handle in handles.items()}


@pytest.fixture(params=KINDS)
def group(request: pytest.FixtureRequest, groups: dict[str, Group]) -> Group:
    nodes.require(request.param)
    return groups[request.param]


def _with_setting(name: str, value: str, make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        return make()


def _describe(handle: dist.ProcessGroup) -> Group:
    import torch.distributed as dist

    return Group(handle, dist.get_rank(handle), dist.get_world_size(handle), dist.get_process_group_ranks(handle))


@pytest.fixture
def equal_numbers_of_groups(world: mpicomm.World) -> Iterator[None]:
    """Let every rank be in the same number of groups, where the names of groups depend on it.

    torch 2.13 derives the name of a group with `use_local_synchronization=True` from its ranks and from the number of
    groups that the calling rank is in: with different numbers the members wait for groups of different names.
    """
    import torch.distributed as dist

    c10d = dist.distributed_c10d
    name_of = getattr(c10d, "_hash_ranks_to_str", str)
    number = len(c10d._world.pg_names) if len(set(mpicomm.all_gather_object(name_of([0])))) > 1 else 0
    missing = max(mpicomm.all_gather(number)) - number
    added = [dist.new_group([world.rank], use_local_synchronization=True) for _ in range(missing)]
    yield
    for group in added:
        dist.destroy_process_group(group)
