"""Tests of the backend itself: all of them run on every rank of a world."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.backend.execution.worker_thread import WakeTimer
from mpicomm.backend.transfer import slots
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
def set_cores() -> Iterator[Callable[[float], None]]:
    """Set the number of cores of a rank that new groups find."""
    with pytest.MonkeyPatch.context() as patch:  # not the test's, which ends after the groups
        yield lambda cores: patch.setattr(slots, "_gather_cores_per_rank", lambda _comm: cores)


@pytest.fixture
def several_cores(world: mpicomm.World, set_cores: Callable[[float], None]) -> Iterator[None]:
    """Queue large asynchronous calls of the world, and of new groups, as where each rank has several cores."""
    algorithms = dist.group.WORLD._executor.algorithms  # type: ignore[union-attr]
    set_cores(2)
    with pytest.MonkeyPatch.context() as patch:
        if algorithms.slots is not None:
            patch.setattr(algorithms.slots, "_eager_bytes", slots._EAGER_BYTES)
        algorithms._publish()
        yield
    algorithms._publish()


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave queued calls to the threads that wait for them; request this after the groups."""
    monkeypatch.setattr(WakeTimer, "set", lambda _timer, _nanoseconds: None)
