"""Tests of the backend itself: all of them run on every rank of a world."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.backend.execution.worker_thread import WakeTimer
from tests import nodes

Make = Callable[..., dist.ProcessGroup]


@pytest.fixture(scope="session", autouse=True)
def started_world(world: mpicomm.World) -> None:
    """Start the world for all tests, including those that do not request it, and open its shared memory.

    A program's calls on plain tensors take the extension module after the first one, which opens the memory.
    """
    dist.all_reduce(torch.ones(1))


@pytest.fixture
def make(new_group: Make) -> Make:
    """Create groups of all ranks, some of a kind of `nodes.KINDS`, and destroy them at the end of the test."""

    def make_group(kind: str = "") -> dist.ProcessGroup:
        nodes.require(kind)
        group = new_group()
        if kind:
            nodes.lead_by(kind, group)
        return group

    return make_group


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave queued calls to the threads that wait for them; request this after the groups."""
    monkeypatch.setattr(WakeTimer, "set", lambda _timer, _nanoseconds: None)
