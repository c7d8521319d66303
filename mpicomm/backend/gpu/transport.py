"""The interface by which a group's tensors go to MPI, and the transports that pass their own memory to MPI."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from mpicomm.backend import checks
from mpicomm.backend.transfer import buffers
from mpicomm.backend.transfer.buffers import Tensors
from mpicomm.devices import accelerator, vendors

Call = Callable[[], None]
Make = Callable[..., Call]
"""Takes tensors and returns the call that runs the operation on them."""


class DeviceEvent(Protocol):
    """A point in a device's queue of work."""

    def query(self) -> bool:
        """Return whether the device has reached this point."""

    def synchronize(self) -> None:
        """Wait until the device has reached this point."""


def has_reached(event: DeviceEvent) -> bool:
    """Return whether the device has reached an event.

    False while the calling thread captures a graph: the query would invalidate the capture.
    """
    return not vendors.vendor().is_capturing() and event.query()


Deliver = Callable[[], DeviceEvent | None]
"""Starts to copy a received message to its tensor; returns the event of the end, None if it has ended."""


@dataclasses.dataclass(frozen=True)
class Use:
    """How an operation uses a tensor."""

    reads: bool
    writes: bool
    is_spread: bool = False
    """Whether the tensor holds an equal part for each rank."""


class Transport:
    """Passes the tensors of a group to MPI as they are: MPI can access their memory."""

    whole_bytes: float = math.inf
    """Size in bytes up to which a CPU tensor goes to MPI in one piece, whatever the devices of the other ranks."""

    def prepare(
        self,
        make: Make,
        tensors: Tensors,
        uses: Sequence[Use],  # noqa: ARG002  for other transports, as the next
        *,
        num_blocks: int | None = 1,  # noqa: ARG002
    ) -> Call:
        """Return a call that runs an operation.

        Args:
            make: Takes tensors in memory that MPI can access; returns the call that runs the operation on them.
            tensors: The tensors of the operation, on any device.
            uses: How the operation uses each tensor.
            num_blocks: The largest number of per-rank blocks in a tensor on any rank; None if not all ranks know the
                sizes of the tensors, so that the operation cannot be split.
        """
        return make(*tensors)

    def for_sending(self, tensor: torch.Tensor) -> tuple[torch.Tensor, DeviceEvent | None]:
        """Return a dense tensor with the content of `tensor`, in memory that MPI can access.

        Returns:
            The dense tensor, and the event from which on it has the content; None if it has it now.
        """
        return buffers.pack(tensor), None

    def for_receiving(self, tensor: torch.Tensor) -> tuple[torch.Tensor, DeviceEvent | None, Deliver]:
        """Return a dense tensor to receive the content of `tensor`.

        Returns:
            The dense tensor, the event from which on MPI may write it (None: now), and the function that copies it to
            `tensor`.
        """
        output_buffer = buffers.output_buffer(tensor)
        return output_buffer, None, functools.partial(buffers.unpack, output_buffer, tensor)


DIRECT = Transport()


class GPUDirect(Transport):
    """Passes GPU addresses to a GPU-aware MPI; synchronises streams, since MPI does not order its calls by them."""

    def prepare(self, make: Make, tensors: Tensors, uses: Sequence[Use], *, num_blocks: int | None = 1) -> Call:
        """Return a call that waits for the work queued so far on the caller's current streams, then runs."""
        call = super().prepare(make, tensors, uses, num_blocks=num_blocks)
        devices = accelerator.devices_of(tensors)
        if not devices:
            return call
        for tensor in tensors:
            checks.require_no_graph_capture(tensor)
        marks = [accelerator.end_of_work(device) for device in devices]

        def when_ready() -> None:
            for mark in marks:
                mark.synchronize()
            call()
            for device in devices:
                accelerator.current_stream(device).synchronize()

        return when_ready

    def for_sending(self, tensor: torch.Tensor) -> tuple[torch.Tensor, DeviceEvent | None]:
        """Return a dense tensor with the content of `tensor`, and the event of the caller's work that writes it."""
        if tensor.is_cpu:
            return super().for_sending(tensor)
        checks.require_no_graph_capture(tensor)
        return buffers.pack(tensor), accelerator.end_of_work(tensor.device)

    def for_receiving(self, tensor: torch.Tensor) -> tuple[torch.Tensor, DeviceEvent | None, Deliver]:
        """Return a dense tensor to receive into, the event of the caller's work that uses it, and the copy of it."""
        if tensor.is_cpu:
            return super().for_receiving(tensor)
        checks.require_no_graph_capture(tensor)
        output_buffer = buffers.output_buffer(tensor)

        def deliver() -> DeviceEvent | None:
            if output_buffer is tensor:
                return None
            tensor.detach().copy_(output_buffer)
            return accelerator.end_of_work(tensor.device)

        return output_buffer, accelerator.end_of_work(tensor.device), deliver
