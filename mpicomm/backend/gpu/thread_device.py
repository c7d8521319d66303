"""The GPU and the stream of the threads that run operations."""

from __future__ import annotations

import threading

import torch

from mpicomm.devices import accelerator, vendors


def prepare_thread_for_events(device: torch.device) -> None:
    """Allow the calling thread to query events of a GPU while another thread captures a graph."""
    if device.type == "cpu":
        return
    accelerator.select(device)  # otherwise the query would create a context on GPU 0
    vendors.vendor().allow_events_during_capture()


class ThreadDevice:
    """The GPU of a thread that runs operations: the current GPU of the first thread to submit work after GPUs are used.

    Without it, the thread would use GPU 0 and create a context there, in GPU memory that belongs to another rank.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        """The recorded GPU; None if no GPU was in use so far."""

        self.stream: torch.Stream | None = None
        """A stream of the thread's own on this GPU."""

        self._lock = threading.Lock()
        self._is_entered = False
        self.note()

    def note(self) -> None:
        """Record the current GPU of the calling thread, if the program uses GPUs and no GPU is recorded."""
        if self.device is not None or not accelerator.is_initialized():
            return
        with self._lock:
            if self.device is None:
                device = accelerator.current_device()
                self.stream = vendors.vendor().own_stream(device, self)
                self.device = device

    def enter(self) -> None:
        """Switch the calling thread to the recorded GPU, and to a stream of its own.

        All threads start with the same default stream; synchronising it would wait for the work of the main thread.
        """
        if self._is_entered or self.device is None or self.stream is None:
            return
        self._is_entered = True
        prepare_thread_for_events(self.device)
        torch.accelerator.set_stream(self.stream)
        self.stream.synchronize()  # creates the context of the thread
