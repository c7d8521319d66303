"""Fixtures of the tests of collective operations, which all run on every rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch.distributed as dist

import mpicomm
from mpicomm.collective_ops.group_argument import resolve
from tests.collective_ops.kinds import AMONG
from tests.worlds import Group


@pytest.fixture(scope="session", autouse=True)
def started_world(world: mpicomm.World, comms: dict[str, Any]) -> None:
    """Create the world, and the groups that are created at their first use, also for tests that do not request them."""


@pytest.fixture(scope="session")
def comms(world: mpicomm.World) -> dict[str, Any]:
    """Return an mpi4py communicator of the even and the odd ranks, and a group over Gloo."""
    made = {"comm": world.comm.Split(world.rank % 2, world.rank), "gloo": dist.new_group(backend="gloo")}
    for group in ("node", *["leaders"] * (world.local_rank == 0), made["comm"]):
        resolve(group, "test")
    return made


@dataclasses.dataclass(frozen=True)
class Among:
    """The group of a test, this rank in it, and its size; `call` runs an operation in it."""

    group: Any
    rank: int
    size: int
    is_async: bool

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Return the result of an operation."""
        result = getattr(mpicomm, name)(*arguments, **options, group=self.group, async_op=self.is_async)
        return result.wait() if self.is_async else result


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=AMONG)
def among(request: pytest.FixtureRequest, groups: dict[str, Group], comms: dict[str, Any], is_async: bool) -> Among:
    handles = {"all": None, "gloo": comms["gloo"], **{name: group.handle for name, group in groups.items()}}
    members = resolve(handles[request.param], "test")
    return Among(handles[request.param], members.rank, members.size, is_async)
