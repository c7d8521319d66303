"""Differences between versions of torch: names, and which functions are differentiable."""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


def _either(module: types.ModuleType, name: str, older_name: str) -> Callable:
    return getattr(module, name if hasattr(module, name) else older_name)


have_gradients = torch._C._dispatch_has_kernel_for_dispatch_key("_c10d_functional::all_reduce", "Autograd")
"""Whether functional collectives are differentiable under their own names, and not only as `..._autograd`."""

# Torch 2.13 renamed these.
all_gather_single = _either(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _either(dist, "reduce_scatter_single", "reduce_scatter_tensor")

# Functional collectives, which return the result.
gathered = _either(funcol, "all_gather_single", "all_gather_tensor")
gathered_autograd = _either(funcol, "all_gather_single_autograd", "all_gather_tensor_autograd")
gathered_coalesced = _either(funcol, "all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
scattered = _either(funcol, "reduce_scatter_single", "reduce_scatter_tensor")
scattered_autograd = _either(funcol, "reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd")
scattered_coalesced = _either(funcol, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")

has_python_backends = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
"""Whether Python can create a `Backend`, which torch's C++ code calls."""
