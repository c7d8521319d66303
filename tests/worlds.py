"""A pytest plugin: the world and the groups that the tests under mpirun share, one of each for the whole session."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

import mpicomm
from tests import nodes

if TYPE_CHECKING:
    import torch.distributed as dist

BY_MPI = ("world", "alone", "parity", "staged", "debug")
"""The groups whose tensors go to MPI. What does not reduce, gather for all or broadcast needs no others."""

KINDS = [*BY_MPI, *nodes.KINDS]
"""The groups on which the tests of the backend run."""


@dataclasses.dataclass(frozen=True)
class Group:
    """A group that this rank is in: for torch's `group=`, with this rank's place and the global ranks of all."""

    handle: dist.ProcessGroup
    rank: int
    size: int
    ranks: list[int]


def on_groups(*kinds: str) -> pytest.MarkDecorator:
    """Run a test on groups of these kinds, in place of all `KINDS`."""
    return pytest.mark.parametrize("group", kinds, indirect=True)


@pytest.hookimpl(tryfirst=True)  # before tests without the mark are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need a world."""
    for item in items:
        if "groups" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.mpi)


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[str, Group]]:
    """Make one group of each kind.

    The world is as users have it. `copy` has the same ranks; `alone` one rank; `parity` the even or the odd ranks. The
    ranks of `debug` compare their calls (MPICOMM_DEBUG=1). Tensors of `staged` go to MPI as those on GPUs do, those of
    `nodes.KINDS` through the memory of a node.
    """
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
        handles["debug"] = _in_debug_mode(lambda: dist.new_group(everyone))
        for kind in nodes.KINDS:
            handles[kind] = dist.new_group(everyone)
            nodes.lead_by(kind, handles[kind])
        yield {name: _describe(handle) for name, handle in handles.items()}


@pytest.fixture(scope="session")
def world(groups: dict[str, Group]) -> mpicomm.World:
    return mpicomm.bootstrap()


@pytest.fixture(params=KINDS)
def group(request: pytest.FixtureRequest, groups: dict[str, Group]) -> Group:
    nodes.require(request.param)
    return groups[request.param]


def _in_debug_mode(make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
    """Make a group whose ranks compare their calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPICOMM_DEBUG", "1")
        return make()


def _stage(handle: dist.ProcessGroup) -> None:
    """Let a group's tensors go to MPI as those on GPUs do."""
    from mpicomm.backend import gpu_transport
    from tests.movers import FewChunks

    operations = handle._operations  # type: ignore[attr-defined]
    operations.route = FewChunks(handle.size(), functools.partial(gpu_transport.on_all_ranks, operations.comm))


def _describe(handle: dist.ProcessGroup) -> Group:
    import torch.distributed as dist

    return Group(handle, dist.get_rank(handle), dist.get_world_size(handle), dist.get_process_group_ranks(handle))
