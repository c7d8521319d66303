"""Random operations on GPU tensors: dtypes, layouts, sizes, streams, devices, tensors that are dropped early."""

from __future__ import annotations

import pytest
import torch

import mpicomm
from tests.gpu import fuzz


@pytest.mark.mpi
def test_random_operations(world: mpicomm.World, device: torch.device, alone: None) -> None:
    assert fuzz.run_seed(world, seed=0, count=400) == 0
