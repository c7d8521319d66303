"""Tests of tensors on GPUs. Without a GPU, they use a simulated GPU in host memory that delays its copies."""

from __future__ import annotations

import pytest
import torch

import mpicomm
from tests.worlds import Group


@pytest.fixture(scope="session")
def device(world: mpicomm.World) -> torch.device:
    """The GPU of this rank, possibly shared with other ranks; the CPU if there is no GPU."""
    return world.device


@pytest.fixture
def group(groups: dict[str, Group], device: torch.device) -> Group:
    """A group of all ranks, whose tensors are staged through the host."""
    return groups["world" if device.type == "cuda" else "staged"]


@pytest.fixture
def alone(device: torch.device) -> None:
    """Skip a test if there is no GPU."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
