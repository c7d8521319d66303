"""Runs programs on the emulated device, each in a process of its own: a device is torch's until the process ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import accelerator
from tests.accelerator import build
from tests.launching import Outcome, run_alone

_START = """
import torch
from tests import accelerator
accelerator.register()
synchronize = torch.accelerator.synchronize
SEEDS = range(20)
"""


@pytest.fixture(scope="session")
def run_on_device() -> Callable[..., Outcome]:
    """Run a program after `register()`; skip the test where the device cannot be built."""
    if reason := accelerator.reason_to_skip():
        pytest.skip(reason)
    build.library()  # its time is not that of the first program
    return lambda program, **environment: run_alone(_START + program, env=environment)
