"""The GPU and the CUDA streams of the threads that run operations."""

from __future__ import annotations

import ctypes
import weakref

import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit synchronisation with the default stream


def prepare_thread_for_events(device: torch.device) -> None:
    """Allow the calling thread to query CUDA events of a device while another thread captures a CUDA graph.

    By default such a query would invalidate the capture; the thread's relaxed capture mode allows it (CUDA Driver API,
    cuThreadExchangeStreamCaptureMode).
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)  # otherwise the query would create a context on GPU 0
    if torch.version.hip:
        return
    relaxed = ctypes.c_int(_RELAXED)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a CUDA stream on a GPU that no other part of the program uses.

    torch allocates streams from a pool of 32 per GPU, so a program with many streams would share one with mpicomm.
    Therefore this calls cuStreamCreate (CUDA Driver API). With ROCm, or if that fails, it takes a stream of the pool.
    """
    if torch.version.hip:
        return torch.cuda.Stream(device)
    handle = _create_stream(device.index or 0)
    if handle is None:
        return torch.cuda.Stream(device)
    stream = torch.cuda.ExternalStream(handle.value, device=device)
    weakref.finalize(stream, _driver().cuStreamDestroy_v2, handle).atexit = False  # CUDA is already shut down at exit
    return stream


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


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


class ThreadDevice:
    """The GPU of a thread that runs operations: the current GPU of the first thread to submit work after CUDA starts.

    Without it, the thread would use GPU 0 and create a context there, in GPU memory that belongs to another rank.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        """The recorded GPU; None if CUDA was not in use so far."""

        self._is_entered = False
        self.note()

    def note(self) -> None:
        """Record the current GPU of the calling thread, if CUDA is initialised and no GPU is recorded."""
        if self.device is None and torch.cuda.is_initialized():
            self.device = torch.device("cuda", torch.cuda.current_device())

    def enter(self) -> None:
        """Switch the calling thread to the recorded GPU, and to a stream of its own.

        All threads start with the same default stream; synchronising it would wait for the work of the main thread.
        """
        if self._is_entered or self.device is None:
            return
        self._is_entered = True
        prepare_thread_for_events(self.device)
        torch.cuda.set_stream(own_stream(self.device))
        torch.cuda.current_stream(self.device).synchronize()  # creates the context of the thread
