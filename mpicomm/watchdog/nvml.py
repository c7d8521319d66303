"""Reads the memory and the utilization of a GPU with the driver's own library, NVML, without a CUDA context."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import threading

_LIBRARY = "libnvidia-ml.so.1"
_READ_SECONDS = 0.3  # the caller waits so long for a reading; the first one, which starts NVML, may take longer
_PREFIXES = ("GPU-", "MIG-")


class _Memory(ctypes.Structure):
    """`nvmlMemory_t` of nvml.h."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t` of nvml.h: percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@dataclasses.dataclass(frozen=True)
class GPUReading:
    """The state of a GPU; None for a value that NVML does not have, such as the utilization of a MIG slice."""

    memory: int | None = None
    memory_total: int | None = None
    utilization: int | None = None


class GPUReader:
    """Reads one GPU. A driver that hangs blocks only the thread of the reading, not the caller."""

    def __init__(self, uuid: str, library: str = _LIBRARY) -> None:
        """Create the reader; it loads NVML at the first reading.

        Args:
            uuid: The UUID of the GPU; empty for a rank without one.
            library: The file of NVML.
        """
        self._uuid = uuid if not uuid or uuid.startswith(_PREFIXES) else f"GPU-{uuid}"
        self._library = library
        self._nvml: ctypes.CDLL | None = None
        self._thread: threading.Thread | None = None
        self._last = GPUReading()

    def read(self) -> GPUReading:
        """Return the state of the GPU; without values if the rank has no GPU, or the driver does not answer."""
        if not self._uuid or (self._thread is not None and self._thread.is_alive()):
            return GPUReading()
        self._thread = threading.Thread(target=self._read, name="mpicomm-gpu", daemon=True)
        self._thread.start()
        self._thread.join(_READ_SECONDS)
        return GPUReading() if self._thread.is_alive() else self._last

    def _read(self) -> None:
        self._last = GPUReading()
        with contextlib.suppress(OSError, AttributeError):  # no driver, or one without these functions
            if self._nvml is None:
                nvml = ctypes.CDLL(self._library)
                if nvml.nvmlInit_v2():
                    return
                self._nvml = nvml
            self._last = _read(self._nvml, self._uuid)


def _read(nvml: ctypes.CDLL, uuid: str) -> GPUReading:
    device = ctypes.c_void_p()
    memory, utilization = _Memory(), _Utilization()
    if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
        return GPUReading()
    has_memory = nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    has_utilization = nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(utilization)) == 0
    return GPUReading(
        memory.used if has_memory else None,
        memory.total if has_memory else None,
        utilization.gpu if has_utilization else None,
    )
