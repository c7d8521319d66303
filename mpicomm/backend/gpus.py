"""The GPU and the streams of the threads that run operations."""

from __future__ import annotations

import ctypes
import weakref

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: work on the default stream is not waited for


def prepare_thread_for_events(device: torch.device) -> None:
    """Let the calling thread ask for CUDA events on a device, also while another thread records a graph.

    Such a question would make the recording invalid, were it not for the thread's own mode (CUDA Driver API,
    cuThreadExchangeStreamCaptureMode).
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)  # or asking would open a context on the first GPU
    if torch.version.hip:
        return
    relaxed = ctypes.c_int(_RELAXED)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream on a GPU that no other part of the program uses.

    torch hands its streams out from a pool of 32 for each GPU, so that a program with many streams of its own would
    share one of ours (CUDA Driver API, cuStreamCreate). Falls back to torch's pool with ROCm, or where that fails.
    """
    if torch.version.hip:
        return torch.cuda.Stream(device)
    handle = _create_stream(device.index or 0)
    if handle is None:
        return torch.cuda.Stream(device)
    stream = torch.cuda.ExternalStream(handle.value, device=device)
    weakref.finalize(stream, _driver().cuStreamDestroy_v2, handle).atexit = False  # CUDA has gone by then
    return stream


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _create_stream(ordinal: int) -> ctypes.c_void_p | None:
    """Create a stream in the context that torch uses on a GPU; None if CUDA refuses."""
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


class ThreadDevice:
    """The GPU of a thread that runs operations: that of the first thread that gives it work once CUDA has started.

    A thread that has none works on the first GPU, and opens a context there, whose memory belongs to another rank.
    """

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._is_entered = False
        self.note()

    def note(self) -> None:
        """Note the GPU of the calling thread, if CUDA has started and none is noted."""
        if self._device is None and torch.cuda.is_initialized():
            self._device = torch.device("cuda", torch.cuda.current_device())

    def enter(self) -> None:
        """Let the calling thread work on the GPU that was noted, in a stream of its own.

        The stream that threads begin with is the same for all, so that waiting for it would be waiting for the main
        thread.
        """
        if self._is_entered or self._device is None:
            return
        self._is_entered = True
        prepare_thread_for_events(self._device)
        torch.cuda.set_stream(own_stream(self._device))
        torch.cuda.current_stream(self._device).synchronize()  # or the thread has no context yet
