"""Fixtures of the tests of collective operations, which all run on every rank."""

from __future__ import annotations

from typing import Any

import pytest

import mpicomm
from mpicomm.collective_ops.group_argument import resolve
from tests.collective_ops.kinds import AMONG
from tests.worlds import Group


@pytest.fixture(scope="session", autouse=True)
def started_world(world: mpicomm.World, comms: dict[str, Any]) -> None:
    """Create the world, and the groups that are created at their first use, also for tests that do not request them."""


@pytest.fixture(scope="session")
def comms(world: mpicomm.World) -> dict[str, Any]:
    """Return mpi4py communicators: the even and the odd ranks."""
    made = {"comm": world.comm.Split(world.rank % 2, world.rank)}
    for group in ("node", *["leaders"] * (world.local_rank == 0), made["comm"]):
        resolve(group, "test")
    return made


@pytest.fixture(params=AMONG)
def among(request: pytest.FixtureRequest, groups: dict[str, Group]) -> tuple[Any, int, int]:
    """Return a value of `group=` (None for all ranks, or a torch group), this rank in the group, and its size."""
    group = None if request.param == "all" else groups[request.param].handle
    members = resolve(group, "test")
    return group, members.rank, members.size


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return request.param
