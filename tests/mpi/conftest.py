"""Tests of the backend itself: all of them run on every rank of a world."""

from __future__ import annotations

import pytest

import mpicomm


@pytest.fixture(scope="session", autouse=True)
def everywhere(world: mpicomm.World) -> None:
    """Give every test a world, also one that does not name it."""
