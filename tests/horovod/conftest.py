"""Tests of mpicomm.horovod, which all run on every rank of a world."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import mpicomm
import mpicomm.horovod as hvd


@pytest.fixture(scope="session", autouse=True)
def initialized_horovod(world: mpicomm.World) -> Iterator[None]:
    """Initialize Horovod, so that process sets can be added and removed."""
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()
    os.environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS", None)
