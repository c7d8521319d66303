"""What only one vendor's accelerator has, or has under a name of its own: one class per vendor.

All other code treats every accelerator alike, through `torch.accelerator`, `torch.Stream` and `torch.Event`.
"""

from __future__ import annotations

import functools

import torch

from mpicomm.devices import accelerator
from mpicomm.launch import visible_devices


class Vendor:
    """An accelerator of which only torch's own interfaces are known, such as that of an extension of torch."""

    name = "accelerator"
    """The name in messages."""

    memory_kind = ""
    """Its name among the memory kinds of MPI-4.1, section 11.4.3."""

    mpi_queries: tuple[str, ...] = ()
    """The functions by which an MPI library reports support for its addresses."""

    visible_variables: tuple[str, ...] = ()
    """The environment variables that select the devices that a process sees."""

    driver_check = "mpicomm doctor"
    """The command that shows whether the driver works."""

    def uuid(self, index: int) -> str:
        """Return the UUID of a device; empty if it has none."""
        module = torch.get_device_module(accelerator.device_type())
        if not hasattr(module, "get_device_properties"):  # not all extensions of torch have it
            return ""
        return str(getattr(module.get_device_properties(index), "uuid", ""))

    def is_capturing(self) -> bool:
        """Return whether the current stream captures a graph instead of running its work."""
        return False

    def own_stream(self, device: torch.device) -> torch.Stream:
        """Return a stream on a device that no other part of the program uses, if the vendor has such streams."""
        return torch.Stream(device)

    def versions(self) -> dict[str, str]:
        """Return the versions of the vendor's software for which this torch was built, by name."""
        return {}


class CUDA(Vendor):
    """NVIDIA."""

    name = "CUDA"
    memory_kind = "cuda"
    mpi_queries: tuple[str, ...] = ("MPIX_Query_cuda_support",)
    visible_variables: tuple[str, ...] = visible_devices.VARIABLES[visible_devices.NVIDIA]
    driver_check = "nvidia-smi"

    def is_capturing(self) -> bool:
        """Return whether the current stream captures a CUDA graph instead of running its work."""
        return torch.cuda.is_current_stream_capturing()

    def versions(self) -> dict[str, str]:
        """Return the versions of CUDA (or ROCm) and NCCL."""
        versions = {self.name: torch.version.cuda or torch.version.hip or "?"}
        if torch.distributed.is_nccl_available():
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        return versions


class ROCm(CUDA):
    """AMD, which torch calls "cuda" as well; the MPI libraries do not."""

    name = "ROCm"
    memory_kind = "rocm"
    mpi_queries: tuple[str, ...] = ("MPIX_Query_rocm_support", "MPIX_Query_hip_support")
    visible_variables: tuple[str, ...] = visible_devices.VARIABLES[visible_devices.AMD]
    driver_check = "rocm-smi"


class XPU(Vendor):
    """Intel."""

    name = "XPU"
    memory_kind = "level_zero"
    mpi_queries: tuple[str, ...] = ("MPIX_Query_ze_support",)
    visible_variables: tuple[str, ...] = visible_devices.VARIABLES[visible_devices.INTEL]
    driver_check = "xpu-smi discovery"

    def versions(self) -> dict[str, str]:
        """Return the version of oneAPI."""
        return {self.name: getattr(torch.version, "xpu", None) or "?"}


@functools.cache
def vendor() -> Vendor:
    """Return the vendor of this torch's accelerator."""
    match accelerator.device_type():
        case "cuda":
            return ROCm() if torch.version.hip else CUDA()
        case "xpu":
            return XPU()
        case _:
            return Vendor()


def of_variable(name: str) -> Vendor:
    """Return the vendor whose devices a variable assigns; for a scheduler's variable NVIDIA, the most common one."""
    return next((known for known in (CUDA(), ROCm(), XPU()) if name in known.visible_variables), CUDA())
