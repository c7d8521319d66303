"""Tests of tensors on GPUs. Where there is none, a device on the host stands in that copies as late as it may."""

from __future__ import annotations

import pytest
import torch

import mpicomm
from tests.worlds import Group


@pytest.fixture(scope="session")
def device(world: mpicomm.World) -> torch.device:
    """The GPU of this rank, which others may share; the host where there is none."""
    return world.device


@pytest.fixture
def group(groups: dict[str, Group], device: torch.device) -> Group:
    """All ranks, whose tensors go to MPI by way of the host."""
    return groups["world" if device.type == "cuda" else "staged"]


@pytest.fixture
def alone(device: torch.device) -> None:
    """Leave out a test where no GPU is."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
