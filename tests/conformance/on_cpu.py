"""Lets tests that PyTorch restricts to GPUs run with CPU tensors, also in the comparison with Gloo.

Most of PyTorch's tests of FSDP2 and functional collectives require GPUs, although the tested code runs on CPUs.
"""

from __future__ import annotations

import inspect
import re
import types
import unittest
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal import common_device_type, common_distributed

_MANY = 64  # more accelerators than a test requires

# A test that returns where there is no GPU would pass without having tested anything.
_RETURNS_AT_ONCE = re.compile(r"if not torch\.(accelerator|cuda)\.is_available\(\):\s+return\b")


def lift_requirements() -> None:
    """Disable PyTorch's decorators and checks that require GPUs; call it before the import of a test file."""
    module: Any = common_distributed
    for name in ("skip_if_lt_x_gpu", "requires_accelerator_dist_backend", "requires_nccl"):
        setattr(module, name, _without_requirement)
    torch.accelerator.device_count = lambda: _MANY
    torch.accelerator.set_device_index = lambda _: None
    for_devices = common_device_type.instantiate_device_type_tests

    def for_cpu(generic: type, scope: dict[str, Any], *_: Any, **__: Any) -> None:
        for_devices(generic, scope, only_for="cpu")

    common_device_type.instantiate_device_type_tests = for_cpu


def move(module: types.ModuleType, cases: list[type[unittest.TestCase]]) -> None:
    """Make the tests of an imported file use the CPU where they name another device."""
    if hasattr(module, "DEVICE"):
        module.DEVICE = "cpu"
    for case in cases:
        if isinstance(vars(case).get("device"), property):
            case.device = property(lambda _: torch.device("cpu"))


def returns_at_once(test: Callable[..., Any]) -> bool:
    """Return whether a test does nothing where there is no GPU."""
    return _RETURNS_AT_ONCE.search(inspect.getsource(inspect.unwrap(test))) is not None


def _without_requirement(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda test: test
