"""The accelerator of this torch, of any vendor: its devices, and the points in their queues of work.

torch has one type of accelerator per process ("cuda" also for AMD, "xpu", or that of an extension).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.accelerator  # this module may be imported during torch's own import

from mpicomm.devices import vendor_backends


def is_available() -> bool:
    """Return whether this process sees a device of the accelerator."""
    return torch.accelerator.is_available()


def count() -> int:
    """Return the number of devices that this process sees."""
    return torch.accelerator.device_count() if is_available() else 0


def is_initialized() -> bool:
    """Return whether this process uses the accelerator: whether it has created a context on a device."""
    kind = vendor_backends.device_type()
    if kind is None:
        return False
    module = torch.get_device_module(kind)
    return module.is_initialized() if hasattr(module, "is_initialized") else module.is_available()


def current_device() -> torch.device:
    """Return the current device of this thread."""
    return torch.device(vendor_backends.device_type() or "cpu", torch.accelerator.current_device_index())


def device_at(index: int | None) -> torch.device:
    """Return the device with an index; the CPU for None."""
    return torch.device("cpu") if index is None else torch.device(vendor_backends.device_type() or "cpu", index)


def select(device: torch.device) -> None:
    """Make a device the current one of this thread; the CPU stays without effect."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the current stream of a device in this thread."""
    return torch.accelerator.current_stream(device)


def wait_for_work() -> None:
    """Wait until the current device, if the accelerator is in use, has run the work of its current stream."""
    if is_initialized():
        current_stream(current_device()).synchronize()


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the devices that hold these tensors, without the CPU and without duplicates."""
    return list(dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_cpu))


def device_name(device: torch.device) -> str:
    """Return the product name of a device; empty if torch does not report it."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else ""


def peak_memory(device: torch.device) -> int:
    """Return the largest number of bytes that this process has had allocated on a device; 0 if that is not known."""
    read = getattr(torch.get_device_module(device), "max_memory_allocated", None)  # an extension may lack it
    return 0 if read is None else read(device)


def utilization(device: torch.device) -> int | None:
    """Return the percentage of time in which a device is busy; None if torch has no such function for it.

    The function may need a package that torch does not require, such as nvidia-ml-py or amdsmi.
    """
    try:
        return torch.get_device_module(device).utilization(device)
    except Exception:  # noqa: BLE001  torch raises exceptions of many types where the package or the driver is missing
        return None


def record_event(stream: torch.Stream) -> torch.Event:
    """Return an event at the end of the work that is queued on a stream now."""
    event = torch.Event(stream.device)
    event.record(stream)
    return event


def end_of_work(device: torch.device) -> torch.Event:
    """Return an event at the end of the work that is queued on the current stream of a device now."""
    return record_event(current_stream(device))


@contextlib.contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream and its device the current ones of this thread in a block; None has no effect.

    `torch.Stream` is such a context itself, but it stores the previous stream in the object: a second thread cannot
    enter it at the same time, nor can a nested block.
    """
    if stream is None:
        yield
        return
    device, previous = torch.accelerator.current_device_index(), current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(previous)
        if device != stream.device.index:  # only then: setting a device may create a context on it
            torch.accelerator.set_device_index(device)
