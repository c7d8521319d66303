"""Fixtures of the trainer's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpicomm


@pytest.fixture
def directory(world: mpicomm.World, tmp_path: Path) -> Path:
    """Return the path of a directory that all ranks share."""
    return mpicomm.broadcast_object(tmp_path / "run", src=0)
