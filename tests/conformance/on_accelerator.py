"""Lets tests that PyTorch restricts to NVIDIA GPUs and to names of backends run on the accelerator of this machine.

That is the emulated one where there is no GPU. The tests name devices by their rank; here the ranks share the devices
that there are, so that one GPU is enough.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.nn.parallel import distributed as data_parallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

from tests import accelerator

LABELS = ("nccl", "mpi", "gloo")
"""The backend names under which the tests run.

PyTorch wrote most tests of GPUs for `nccl`. Under the other names, tests of CPU tensors run with tensors on devices,
such as those of messages with tags and from any source, and of coalesced collectives.
"""

_MESSAGE = "expects the message of NCCL's watchdog"
_METADATA = "reads metadata that NCCL's backend writes into profiles"
_EXCLUDED = {
    "test_DistributedDataParallel": "fails with Gloo too: a static graph that was saved in training loses a reduction",
    "test_ddp_model_diff_shape_across_ranks": "MPI ends the job if ranks pass different numbers of elements",
    "test_ddp_profiling_execution_trace": _METADATA,
    "test_ddp_profiling_torch_profiler": _METADATA,
    "test_monitored_barrier_allreduce_hang": _MESSAGE,
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": _MESSAGE,
    "test_nccl_high_priority_stream": "sets an option of NCCL's backend",
}
"""Tests of NCCL itself, and those that fail for a known reason, which is beside the name."""

_GPU_PER_RANK = {
    "test_ddp_device": "compares the number of the device with that of the rank",
    "test_ddp_hook_parity_allreduce_process_group": "makes a group of the numbers of the devices",
    "test_ddp_logging_data_gpu": "compares the number of the device with that of the rank",
}
"""Tests that need one device for each rank, and the reasons."""

_NCCL_VERSION = "torch's profiler reads the version of NCCL, which this torch lacks"
_EXCLUDED_EMULATED = {
    "test_ddp_logging_data_gpu": "torch measures the times of DDP only on CPUs and GPUs",
    "test_ddp_native_mixed_precision_ignored_params": "Module.to() makes new parameters on devices of extensions",
    "test_ddp_uneven_inputs": "takes minutes on a CPU: convolutions of images of 1000 x 1000",
    "test_send_recv_nccl_torch_profiler": _NCCL_VERSION,
}
"""Tests that the emulated accelerator cannot run, and the reasons."""

_HASH = "in its debug mode torch calls the hash of GPU tensors with a CPU tensor if a group is called nccl"
_EXCLUDED_CUDA = {
    "test_all_gather_object_default_pg": _HASH,
    "test_all_gather_object_subgroup": _HASH,
}
"""Tests that fail on a GPU under the label `nccl` of a group that is not NCCL's, and the reasons."""

_REQUIREMENTS = (
    "nccl_skip_if_lt_x_gpu",
    "require_n_gpus_for_nccl_backend",
    "requires_nccl_version",
    "skip_if_lt_x_gpu",
)
_TAKE_DEVICE = ("Stream", "current_stream", "default_stream", "device", "set_device", "synchronize")


def device_type() -> str:
    """Return the type of the accelerator on which the ranks run, without starting it."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.NAME if kind is None else kind.type


def install() -> SharedDevices:
    """Register the accelerator, and disable PyTorch's conditions; call it before the import of the test module."""
    if not torch.accelerator.is_available():
        accelerator.register()
    devices = SharedDevices(device_type(), torch.accelerator.device_count())
    tests: Any = common_distributed
    tests.skip_if_no_gpu = _without_requirement
    tests.skip_if_small_worldsize = _needs_three_ranks
    for name in _REQUIREMENTS:
        setattr(tests, name, lambda *_, **__: _without_requirement)
    tests.init_multigpu_helper = lambda size, _backend: {rank: [rank % devices.count] for rank in range(size)}
    torch_groups: Any = dist
    torch_groups.is_nccl_available = lambda: True
    for label in LABELS:
        dist.Backend.backend_capability[label] = [devices.kind] if label == "nccl" else ["cpu", devices.kind]
    meshes: Any = device_mesh
    make_mesh = meshes.init_device_mesh
    meshes.init_device_mesh = lambda kind, *args, **kwargs: make_mesh(devices.of(kind).type, *args, **kwargs)
    # DDP turns the numbers in `device_ids` into devices itself.
    parallel: Any = data_parallel
    index_of = parallel._get_device_index
    parallel._get_device_index = lambda device, *args, **kwargs: index_of(devices.of(device), *args, **kwargs)
    return devices


def _needs_three_ranks(test: Callable[..., None]) -> Callable[..., None]:
    """Skip tests of a group of ranks 1 and 2; PyTorch requires 8 ranks for them."""
    return unittest.skipIf(int(os.environ["WORLD_SIZE"]) < 3, "needs 3 ranks")(test)


def _without_requirement(test: Any) -> Any:
    test.needs_device = True
    return test


class SharedDevices(TorchFunctionMode):
    """Redirects the devices that a test names, while it runs, to those of this machine."""

    def __init__(self, kind: str, count: int) -> None:
        super().__init__()
        self.kind = kind
        self.count = count
        self.are_used = False

    def reason_to_skip(self, test: Callable[..., None], label: str, ranks: int) -> str | None:
        """Return why a test cannot run here under a label on this number of ranks; None if it can."""
        name = test.__name__
        if label != "nccl" and (hasattr(test, "needs_device") or "cuda" in name):
            return "uses GPUs: runs as nccl"
        reasons = dict(_EXCLUDED)
        if self.count < ranks:
            reasons |= _GPU_PER_RANK
        if self.kind == accelerator.NAME:
            reasons |= _EXCLUDED_EMULATED
        elif self.kind == "cuda" and label == "nccl":
            reasons |= _EXCLUDED_CUDA
        return reasons.get(name)

    def of(self, device: Any) -> Any:
        """Return the device of this machine in place of a number, a name or a device; other arguments unchanged."""
        if isinstance(device, str | int) and not isinstance(device, bool):
            device = torch.device(device)
        if not isinstance(device, torch.device) or device.type not in ("cuda", self.kind):
            return device
        return torch.device(self.kind, None if device.index is None else device.index % self.count)

    @contextlib.contextmanager
    def in_test(self) -> Iterator[None]:
        """Redirect devices in the block, which starts on the first device, as a process does."""
        torch.accelerator.set_device_index(0)
        self.are_used = False
        with self:
            yield

    def synchronize(self) -> None:
        """Wait for all devices, and raise the errors of their kernels."""
        for index in range(self.count):
            torch.accelerator.synchronize(index)

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            device = kwargs.pop("device", None) if len(args) == 1 else args[1]
            return self._move(args[0], self.kind if device is None else device, *args[2:], **kwargs)
        if "device" in kwargs:
            kwargs["device"] = self.of(kwargs["device"])
        if function is torch.Tensor.to and len(args) > 1:
            args = (args[0], self.of(args[1]), *args[2:])
        if function is torch.device:
            return self.of(torch.device(*args, **kwargs))
        result = function(*args, **kwargs)
        self.are_used |= isinstance(result, torch.Tensor) and result.device.type == self.kind
        return result

    def redirect(self, module: Any, label: str, rank: int) -> None:
        """Make a test module use this accelerator in place of `torch.cuda`, or of the CPU."""
        module.torch = _Torch(self)
        module.autocast = functools.partial(torch.amp.autocast, self.kind)
        module.GradScaler = functools.partial(torch.amp.GradScaler, self.kind)
        module._rank_temp_file = functools.partial(_until_all_have_read, module._rank_temp_file)
        if label != "nccl":
            device = torch.device(self.kind, rank % self.count)
            for name in ("_build_tensor", "_build_multidim_tensor"):
                setattr(module, name, self._on_device(getattr(module, name), device))

    def _move(self, tensor: torch.Tensor, device: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a tensor on a device, which has not computed the contents yet.

        The host waits for copies of its memory, so without a kernel behind them no test would notice an operation that
        does not wait for the tensor's stream.
        """
        moved = tensor.to(self.of(device), *args, **kwargs)
        self.are_used |= moved.device.type == self.kind
        return moved.clone() if tensor.is_cpu else moved

    def _on_device(self, build: Callable[..., torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: self._move(build(*args, **kwargs), device)


@contextlib.contextmanager
def _until_all_have_read(temporary_file: Callable[[], contextlib.AbstractContextManager[str]]) -> Iterator[str]:
    """Keep a file of rank 0 until the test ends on all ranks; PyTorch removes it while others may still read it."""
    with temporary_file() as path:
        yield path
        dist.barrier()


class _Torch(types.ModuleType):
    """`torch` with another `torch.cuda`."""

    def __init__(self, devices: SharedDevices) -> None:
        super().__init__("torch")
        self.cuda = _Cuda(devices)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Cuda:
    """The functions of the accelerator's module."""

    def __init__(self, devices: SharedDevices) -> None:
        self._devices = devices
        self._module = torch.get_device_module(devices.kind)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        if name not in _TAKE_DEVICE:
            return function
        return lambda device=None: function(self._devices.of(device))
