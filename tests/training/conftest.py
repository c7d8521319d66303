"""Fixtures of the trainer's tests."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpicomm


@pytest.fixture
def directory(world: mpicomm.World, tmp_path: Path) -> Path:
    """Return the path of a directory that all ranks share."""
    return mpicomm.broadcast_object(tmp_path / "run", src=0)


@pytest.fixture
def small_files() -> Iterator[Any]:
    """Limit the size of the files that this process writes, to simulate a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def synced(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the files in `directory` that this process syncs or renames."""
    events: list[str] = []
    root, fsync, rename = directory.resolve(), os.fsync, Path.rename

    def recorded_fsync(handle: int) -> None:
        fsync(handle)
        events.append(f"sync {Path(f'/proc/self/fd/{handle}').readlink().relative_to(root)}")

    def recorded_rename(path: Path, target: Path) -> Path:
        events.append(f"rename to {Path(target).resolve().relative_to(root)}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    return events
