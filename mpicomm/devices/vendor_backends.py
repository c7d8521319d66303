"""The backends of vendors' libraries that torch knows, such as NCCL. Importing this module does not import torch."""

from __future__ import annotations

_HOST_BACKENDS = ("gloo", "mpi", "fake")  # torch has them for devices whose vendor has no library of its own


def device_type() -> str | None:
    """Return the device type of the accelerator for which this torch was built or extended; None without one."""
    import torch.accelerator

    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def of_this_torch() -> str:
    """Return this torch's accelerator and the backend of its vendor's library, such as `cuda:nccl`; empty without one.

    Does not call the driver.
    """
    import torch.distributed as dist

    device = device_type()
    backend = dist.Backend.default_device_backend_map.get(device or "")
    if backend is None or backend in _HOST_BACKENDS or not dist.is_backend_available(backend):
        return ""
    return f"{device}:{backend}"


def known() -> list[str]:
    """Return the backends of all vendors' libraries that torch knows, such as `cuda:nccl`, also those that it lacks."""
    import torch.distributed as dist

    backends = dist.Backend.default_device_backend_map.items()
    return [f"{device}:{backend}" for device, backend in backends if device != "cpu" and backend not in _HOST_BACKENDS]
