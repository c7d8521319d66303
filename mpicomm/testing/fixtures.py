"""Fixtures for tests on several ranks; in a plain `pytest`, the world has one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch.distributed as dist

    from mpicomm.job.session import World


@pytest.fixture(scope="session")
def bootstrap_options() -> dict[str, Any]:
    """The arguments of `mpicomm.bootstrap()` for the fixture `world`; override it in a conftest.py."""
    return {}


@pytest.fixture(scope="session")
def world(bootstrap_options: dict[str, Any]) -> Iterator[World]:
    """The `mpicomm.World` of all ranks: `bootstrap()` runs once in the session, `shutdown()` at its end."""
    from mpicomm.job.bootstrap import bootstrap

    # pytest handles exceptions, so a failing test must not end the job.
    with bootstrap(**{"abort_on_error": False, **bootstrap_options}) as world:
        yield world


@pytest.fixture
def new_group(
    world: World,  # noqa: ARG001  initialises torch.distributed
) -> Iterator[Callable[..., dist.ProcessGroup]]:
    """A function with the arguments of `torch.distributed.new_group`; its groups are destroyed after the test."""
    import torch.distributed as dist

    from mpicomm import torch_internals

    groups: list[Any] = []

    def create(*args: Any, **kwargs: Any) -> dist.ProcessGroup:
        groups.append(dist.new_group(*args, **kwargs))
        return groups[-1]

    yield create
    for group in groups:
        if torch_internals.is_alive(group):  # the test may have destroyed it, and this rank may be no member
            dist.destroy_process_group(group)


@pytest.fixture
def process_group(new_group: Callable[..., dist.ProcessGroup]) -> dist.ProcessGroup:
    """A new process group of all ranks, which is destroyed after the test."""
    return new_group()
