"""Tests of tensors on GPUs. Without a GPU, they use the emulated accelerator.

It becomes the accelerator of the whole process, so these tests run in a process without other tests: `make
test-emulated`. If it cannot be built here, they use a simulated GPU in host memory that delays its copies.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import mpicomm
from mpicomm.devices import accelerator
from mpicomm.launch import detect
from mpicomm.testing import pytest_plugin
from tests import accelerator as emulated
from tests.gpu import program
from tests.worlds import Group

CHUNK_BYTES = 2**16
"""Of staging, small enough that tensors of several chunks take little time."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Register the emulated accelerator before the first test starts the world."""
    if not pytest_plugin.runs_on_ranks(config):
        return
    own = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    if len(own) < len(items):
        for item in own:
            item.add_marker(pytest.mark.skip("needs a process without other tests: make test-emulated"))
        return
    os.environ.setdefault("MPICOMM_GPU_CHUNK_KIB", str(CHUNK_BYTES // 1024))
    if torch.cuda.is_available() and torch.cuda.device_count() < detect.detect(os.environ).local_size:
        os.environ.update(program.variables_for_nccl())  # NCCL reads them at any of its communicators
    if not emulated.reason_to_skip():
        emulated.register()


@pytest.fixture(scope="session")
def device(world: mpicomm.World) -> torch.device:
    """The GPU of this rank, possibly shared with other ranks; the CPU if there is no GPU."""
    if world.device.type != "cpu" or not accelerator.is_available():
        return world.device
    device = torch.device(accelerator.current_device().type, world.local_rank % accelerator.count())
    accelerator.select(device)
    return device


@pytest.fixture
def group(groups: dict[str, Group], device: torch.device) -> Group:
    """A group of all ranks, whose tensors are staged through the host."""
    return groups["staged" if device.type == "cpu" else "world"]


@pytest.fixture
def alone(device: torch.device) -> None:
    """Skip a test if there is no GPU."""
    if device.type == "cpu":
        pytest.skip("needs a GPU")
