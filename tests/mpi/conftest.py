"""Tests of the backend itself: all of them run on every rank of a world."""

from __future__ import annotations

import pytest

import mpicomm


@pytest.fixture(scope="session", autouse=True)
def started_world(world: mpicomm.World) -> None:
    """Start the world for all tests, including those that do not request it."""
