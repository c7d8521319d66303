"""Tests of the backend itself: all of them run on every rank of a world."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

import mpicomm
from tests import nodes

Make = Callable[..., dist.ProcessGroup]


@pytest.fixture(scope="session", autouse=True)
def started_world(world: mpicomm.World) -> None:
    """Start the world for all tests, including those that do not request it."""


@pytest.fixture
def make(world: mpicomm.World) -> Iterator[Make]:
    """Create groups of all ranks, some of a kind of `nodes.KINDS`, and destroy them at the end of the test."""
    made: list[dist.ProcessGroup] = []

    def new(kind: str = "") -> dist.ProcessGroup:
        nodes.require(kind)
        made.append(dist.new_group(list(range(world.size))))
        if kind:
            nodes.lead_by(kind, made[-1])
        return made[-1]

    yield new
    for handle in made:
        dist.destroy_process_group(handle)
