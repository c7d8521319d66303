"""An accelerator for tests on machines without one: torch's device `emulated`, whose kernels run on the CPU.

It fails where a GPU would: the host cannot touch its memory, its streams run late and in any order that events allow,
freed memory is overwritten and reused. `register()` makes it torch's accelerator, for the rest of the process; the C++
files are compiled at the first use. `EMULATED_DEVICES` (2) and `EMULATED_MEMORY` (bytes of each) are the hardware,
`EMULATED_VISIBLE_DEVICES` selects devices by number or UUID.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable

import torch

from tests.accelerator import build, hardware

NAME = "emulated"


def reason_to_skip() -> str:
    """Return why the device is not available here, "" if it is."""
    if torch._C._get_privateuse1_backend_name() not in {"privateuseone", NAME}:
        return "another package has registered a device with torch"
    if torch.cuda.is_available() or torch.xpu.is_available():
        return "torch has an accelerator, which the emulated device cannot replace"
    return "" if build.compiler() else "there is no C++ compiler; install g++, or set CXX"


def register() -> None:
    """Make the emulated device torch's accelerator; a second call does nothing.

    Raises:
        RuntimeError: There is no compiler, or it failed, or the process has another accelerator.
    """
    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    if reason := reason_to_skip():
        raise RuntimeError(reason)
    torch.ops.load_library(str(build.library()))
    torch.ops.emulated.initialize(len(hardware.visible_devices()), hardware.memory_bytes())
    from torch import _meta_registrations  # noqa: F401  the shapes of the results of more operators

    from tests.accelerator import operators, torch_module

    operators.register()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, torch_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(torch.ops.emulated.stop)


def configure(seed: int = 0, *, copy_rate: float = 0.0, copy_seconds: float = 0.0, kernel_seconds: float = 0.0) -> None:
    """Set how the device runs.

    By default it runs only while the host waits for it, and at random moments when the host enqueues; `seed` decides
    the order of the streams, and a run that calls the same functions repeats it. With a duration, the device runs by
    the clock.

    Args:
        seed: Of the order.
        copy_rate: Bytes per second of a copy between host and device, or between devices; 0 is unlimited.
        copy_seconds: Added to each of these copies.
        kernel_seconds: The duration of each other operation.
    """
    torch.ops.emulated.configure(seed, copy_rate, copy_seconds, kernel_seconds)


def block_stream() -> Callable[[], None]:
    """Block the current stream, as an operation that waits for another process does, until the result is called."""
    return functools.partial(torch.ops.emulated.open_gate, torch.ops.emulated.close_gate())


def set_memory_limit(device: int, size_bytes: int) -> None:
    """Limit the memory that tensors of a device may take, below `EMULATED_MEMORY`."""
    torch.ops.emulated.set_memory_limit(device, size_bytes)


def take_log() -> list[str]:
    """Return the operations that have run since the last call, in their order: "device:stream name"."""
    return torch.ops.emulated.take_log()


def accessible_address(address: int) -> int:
    """Return where the host can access the memory at a tensor's address, as the vendor's driver and MPI can."""
    return torch.ops.emulated.accessible_address(address)
