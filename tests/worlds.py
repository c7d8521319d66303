"""A pytest plugin: the world and the groups that the tests under mpirun share, one of each for the whole session."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

import mpicomm
from tests import nodes

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Group:
    """A group that this rank is in: for torch's `group=`, with this rank's place and the global ranks of all."""

    handle: dist.ProcessGroup
    rank: int
    size: int
    ranks: list[int]


@pytest.hookimpl(tryfirst=True)  # before tests without the mark are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need a world."""
    for item in items:
        if "groups" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.mpi)


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[str, Group]]:
    """Every kind of group: the world, a copy, one alone, the even and the odd ranks, one as if on GPUs, by nodes."""
    import torch.distributed as dist

    with mpicomm.bootstrap("mpi", abort_on_error=False) as world:
        everyone = list(range(world.size))
        parity = [[rank for rank in everyone if rank % 2 == odd] for odd in (0, 1)]
        handles = {
            "world": dist.group.WORLD,
            "copy": dist.new_group(everyone),
            "alone": dist.new_subgroups_by_enumeration([[rank] for rank in everyone])[0],
            "parity": dist.new_subgroups_by_enumeration([ranks for ranks in parity if ranks])[0],
        }
        handles["staged"] = dist.new_group(everyone)
        _stage(handles["staged"])
        handles["at once"] = _as_users_have_it(lambda: dist.new_group(everyone))
        for kind in nodes.KINDS:
            handles[kind] = dist.new_group(everyone)
            nodes.lead_by(kind, handles[kind])
        yield {name: _describe(handle) for name, handle in handles.items()}


@pytest.fixture(scope="session")
def world(groups: dict[str, Group]) -> mpicomm.World:
    return mpicomm.bootstrap()


@pytest.fixture(params=["world", "copy", "alone", "parity", "staged", "at once", *nodes.KINDS])
def group(request: pytest.FixtureRequest, groups: dict[str, Group]) -> Group:
    return groups[request.param]


def _as_users_have_it(make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
    """Make a group whose ranks do not compare their calls, so that it goes the shorter ways."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPICOMM_DEBUG", "0")
        return make()


def _stage(handle: dist.ProcessGroup) -> None:
    """Let a group's tensors go to MPI as those on GPUs do."""
    from tests.movers import FewChunks

    handle._engine.route = FewChunks(handle.size())  # type: ignore[attr-defined]


def _describe(handle: dist.ProcessGroup) -> Group:
    import torch.distributed as dist

    return Group(handle, dist.get_rank(handle), dist.get_world_size(handle), dist.get_process_group_ranks(handle))
