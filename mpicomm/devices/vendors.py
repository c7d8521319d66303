"""What only one vendor's accelerator has, or has under a name of its own: one class per vendor.

All other code treats every accelerator alike, through `torch.accelerator`, `torch.Stream` and `torch.Event`.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch

from mpicomm.devices import vendor_backends
from mpicomm.launch import visible_devices

DEVICE_TYPES = ("cuda", "hip", "hpu", "mps", "mtia", "privateuseone", "xpu")
"""The types of devices that are accelerators: `isAccelerator` in c10/core/DeviceType.h of torch."""

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit synchronisation with the default stream
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_WITHOUT_IPC = ("expandable_segments:True", "backend:cudaMallocAsync")

_idle_streams: dict[int, list[ctypes.c_void_p]] = collections.defaultdict(list)  # by the index of the GPU


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

    synchronous_kernels = ""
    """The setting of the environment with which a call returns after its kernels have ended, to find a crash."""

    sharing_variable = ""
    """The environment variable that, set to 1, lets the vendor's library use one GPU for several ranks."""

    def uuid(self, index: int) -> str:
        """Return the UUID of a device; empty if it has none."""
        module = torch.get_device_module(vendor_backends.device_type())
        if not hasattr(module, "get_device_properties"):  # not all extensions of torch have it
            return ""
        return str(getattr(module.get_device_properties(index), "uuid", ""))

    def gpu_uuid(self, index: int) -> str:  # noqa: ARG002  for vendors, as CUDA
        """Return the UUID of the GPU to which a device belongs, if the vendor's library refuses two ranks on its parts.

        Empty if each device is a GPU of its own for the library.
        """
        return ""

    def is_capturing(self) -> bool:
        """Return whether the current stream captures a graph instead of running its work."""
        return False

    def own_stream(self, device: torch.device, owner: object) -> torch.Stream:  # noqa: ARG002  for vendors, as CUDA
        """Return a stream on a device that no other part of the program uses, if the vendor has such streams.

        Args:
            device: The device.
            owner: The object that keeps the stream: after its end another owner may receive it.
        """
        return torch.Stream(device)

    def versions(self) -> dict[str, str]:
        """Return the versions of the vendor's software for which this torch was built, by name."""
        return {}

    def allow_events_during_capture(self) -> None:
        """Let the calling thread query events of its device while another thread captures a graph."""

    def allocator_without_ipc(self, environ: Mapping[str, str]) -> str:  # noqa: ARG002  for vendors, as CUDA
        """Return the setting of torch's allocator whose memory other processes cannot map; empty without one."""
        return ""


class CUDA(Vendor):
    """NVIDIA."""

    name = "CUDA"
    memory_kind = "cuda"
    mpi_queries: tuple[str, ...] = ("MPIX_Query_cuda_support",)
    visible_variables: tuple[str, ...] = visible_devices.VARIABLES[visible_devices.NVIDIA]
    driver_check = visible_devices.DRIVER_TOOLS[visible_devices.NVIDIA]
    synchronous_kernels = "CUDA_LAUNCH_BLOCKING=1"
    sharing_variable = "NCCL_MULTI_RANK_GPU_ENABLE"  # since NCCL 2.30

    def gpu_uuid(self, index: int) -> str:
        """Return the UUID of the GPU to which a device belongs: the same for all MIG devices of a GPU.

        NCCL refuses two ranks with the same one (NCCL 2.30, src/init.cc; before, with the same PCI bus id). Only the
        first version of this function of the driver returns it: cuDeviceGetUuid_v2 returns that of the MIG device.
        """
        driver, device, octets = _driver(), ctypes.c_int(), ctypes.create_string_buffer(16)
        if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetUuid(octets, device):
            return ""
        return str(uuid.UUID(bytes=octets.raw))

    def is_capturing(self) -> bool:
        """Return whether the current stream captures a CUDA graph instead of running its work.

        torch's function raises if the host has no driver.
        """
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def versions(self) -> dict[str, str]:
        """Return the versions of CUDA (or ROCm) and NCCL."""
        versions = {self.name: torch.version.cuda or torch.version.hip or "?"}
        if torch.distributed.is_nccl_available():
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        return versions

    def own_stream(self, device: torch.device, owner: object) -> torch.Stream:
        """Return a CUDA stream that no other part of the program uses.

        torch allocates streams from a pool of 32 per GPU, so a program with many streams would share one with mpicomm.
        Therefore this calls cuStreamCreate (CUDA Driver API); if that fails, it takes a stream of torch's pool. Streams
        are used again, and never destroyed: torch's allocators record an event on each stream that has used a block of
        memory, when the block is freed, which can be at any later time.

        Args:
            device: The GPU.
            owner: The object that keeps the stream. torch 2.11 does not clear weak references to streams.
        """
        ordinal = device.index or 0
        try:
            handle: ctypes.c_void_p | None = _idle_streams[ordinal].pop()
        except IndexError:
            handle = _create_stream(ordinal)
        if handle is None:
            return torch.Stream(device)
        weakref.finalize(owner, _idle_streams[ordinal].append, handle).atexit = False
        return torch.cuda.ExternalStream(handle.value, device=device)

    def allow_events_during_capture(self) -> None:
        """Let the calling thread query events of its device while another thread captures a graph.

        By default such a query would invalidate the capture; the thread's relaxed capture mode allows it (CUDA Driver
        API, cuThreadExchangeStreamCaptureMode).
        """
        relaxed = ctypes.c_int(_RELAXED)
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))

    def allocator_without_ipc(self, environ: Mapping[str, str]) -> str:
        """Return the setting of torch's allocator whose memory CUDA IPC cannot export; empty without one."""
        for name in _ALLOCATOR_VARIABLES:
            for setting in _WITHOUT_IPC:
                if setting in environ.get(name, "").replace(" ", ""):
                    return f"{name} has {setting}"
        return ""


class ROCm(CUDA):
    """AMD, which torch calls "cuda" as well; the MPI libraries do not."""

    name = "ROCm"
    memory_kind = "rocm"
    mpi_queries: tuple[str, ...] = ("MPIX_Query_rocm_support", "MPIX_Query_hip_support")
    visible_variables: tuple[str, ...] = visible_devices.VARIABLES[visible_devices.AMD]
    driver_check = visible_devices.DRIVER_TOOLS[visible_devices.AMD]
    synchronous_kernels = "AMD_SERIALIZE_KERNEL=3"
    sharing_variable = ""

    def gpu_uuid(self, index: int) -> str:  # noqa: ARG002
        """Return an empty text: RCCL takes each partition of a GPU for a GPU of its own."""
        return ""

    def own_stream(self, device: torch.device, owner: object) -> torch.Stream:  # noqa: ARG002
        """Return a stream of torch's pool."""
        return torch.Stream(device)

    def allow_events_during_capture(self) -> None:
        """Let the calling thread query events, as on NVIDIA (HIP runtime, hipThreadExchangeStreamCaptureMode)."""
        if (runtime := _hip_runtime()) is not None:
            runtime.hipThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


class XPU(Vendor):
    """Intel."""

    name = "XPU"
    memory_kind = "level_zero"
    mpi_queries: tuple[str, ...] = ("MPIX_Query_ze_support",)
    visible_variables: tuple[str, ...] = visible_devices.VARIABLES[visible_devices.INTEL]
    driver_check = f"{visible_devices.DRIVER_TOOLS[visible_devices.INTEL]} discovery"
    synchronous_kernels = "UR_L0_SERIALIZE=2"

    def versions(self) -> dict[str, str]:
        """Return the version of oneAPI."""
        return {self.name: getattr(torch.version, "xpu", None) or "?"}


def vendor() -> Vendor:
    """Return the vendor of this torch's accelerator, which an extension of torch may add at any time."""
    return _vendor_of(vendor_backends.device_type())


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a GPU captures a graph instead of running its work."""
    return device.type != "cpu" and vendor().is_capturing()


@functools.cache
def _vendor_of(device_type: str | None) -> Vendor:
    match device_type:
        case "cuda":
            return ROCm() if torch.version.hip else CUDA()
        case "xpu":
            return XPU()
        case _:
            return Vendor()


def of_variable(name: str) -> Vendor:
    """Return the vendor whose devices a variable assigns; for a scheduler's variable NVIDIA, the most common one."""
    return next((known for known in (CUDA(), ROCm(), XPU()) if name in known.visible_variables), CUDA())


# -- the drivers ------------------------------------------------------------------------------------------------


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _hip_runtime() -> ctypes.CDLL | None:
    """Return AMD's runtime that torch has loaded: its wheels contain one, whose name has no version."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    path = next((line.split()[-1] for line in lines if "/libamdhip64.so" in line), None)
    return None if path is None else ctypes.CDLL(path)


def _create_stream(ordinal: int) -> ctypes.c_void_p | None:
    """Create a stream in the primary context of a GPU, which torch uses; None if CUDA returns an error."""
    driver = _driver()
    device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    if driver.cuDeviceGet(ctypes.byref(device), ordinal):
        return None
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    if driver.cuCtxPushCurrent_v2(context):
        return None
    is_refused = driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING)
    driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    return None if is_refused else stream
