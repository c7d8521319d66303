"""The interface by which a group's tensors go to MPI, and the transports that pass their own memory to MPI."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch

from mpicomm.backend import checks
from mpicomm.backend.transfer import buffers
from mpicomm.backend.transfer.buffers import Tensors
from mpicomm.devices import accelerator

Call = Callable[[], None]
Make = Callable[..., Call]
"""Takes tensors and returns the call that runs the operation on them."""


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

    def for_sending(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a dense tensor with the content of `tensor`, in memory that MPI can access."""
        return buffers.pack(tensor)

    def for_receiving(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Call]:
        """Return a dense tensor to receive the content of `tensor`, and a call that copies it into `tensor`."""
        output_buffer = buffers.output_buffer(tensor)
        return output_buffer, functools.partial(buffers.unpack, output_buffer, tensor)


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
        marks = [accelerator.record_event(accelerator.current_stream(device)) for device in devices]

        def when_ready() -> None:
            for mark in marks:
                mark.synchronize()
            call()
            for device in devices:
                accelerator.current_stream(device).synchronize()

        return when_ready

    def for_sending(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a dense tensor with the content of `tensor`; fails during a CUDA graph capture."""
        checks.require_no_graph_capture(tensor)
        return super().for_sending(tensor)

    def for_receiving(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Call]:
        """Return a dense tensor to receive the content of `tensor`, and a call that copies it into `tensor`."""
        checks.require_no_graph_capture(tensor)
        return super().for_receiving(tensor)
