"""How a group's tensors get to MPI: as they are on the host; on a GPU by its own address, or staged.

A GPU's address is given to MPI only if the library says that it can use it, and then does so in a test.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from mpicomm import mpi
from mpicomm.backend import buffers, checks, gpu_probe
from mpicomm.backend.buffers import Tensors
from mpicomm.backend.staging import Call, Make, Staged, Use
from mpicomm.settings import Settings

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NOT_EXPORTED = ("expandable_segments:True", "backend:cudaMallocAsync")


class Transport(Protocol):
    """The way of a group's tensors to MPI."""

    @property
    def whole_bytes(self) -> float:
        """Up to so many bytes, a tensor on the host goes to MPI as it is, whatever those of the other ranks are."""

    def prepare(self, make: Make, tensors: Tensors, uses: Sequence[Use], *, num_blocks: int | None = 1) -> Call:
        """Return what runs an operation, which `make` knows how to do on memory that MPI can reach.

        Args:
            make: Takes tensors that MPI can reach, and returns the call.
            tensors: Those of the operation, wherever they are.
            uses: What the operation does with each.
            height: How many parts for ranks a tensor has at the most, on any rank; None if not all ranks know its size.
        """

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's content in dense memory that MPI can read."""

    def expect(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Call]:
        """Return dense memory to receive a tensor's content, and what brings it from there to the tensor."""


class NoTransport:
    """The way of tensors whose memory MPI can reach."""

    whole_bytes = math.inf

    def prepare(
        self,
        make: Make,
        tensors: Tensors,
        uses: Sequence[Use],  # noqa: ARG002  the protocol's, as is the next
        *,
        num_blocks: int | None = 1,  # noqa: ARG002
    ) -> Call:
        """Return what runs an operation on the tensors themselves."""
        return make(*tensors)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's content in dense memory."""
        return buffers.pack(tensor)

    def expect(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Call]:
        """Return dense memory to receive a tensor's content, and what brings it from there to the tensor."""
        output_buffer = buffers.output_buffer(tensor)
        return output_buffer, lambda: buffers.unpack(output_buffer, tensor)


class GPUDirect(NoTransport):
    """The way of GPU tensors to an MPI that takes a GPU's addresses, which knows nothing of streams."""

    def prepare(self, make: Make, tensors: Tensors, uses: Sequence[Use], *, num_blocks: int | None = 1) -> Call:
        """Return what runs an operation when the caller's streams have come to this point."""
        call = super().prepare(make, tensors, uses, num_blocks=num_blocks)
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if not devices:
            return call
        for tensor in tensors:
            checks.outside_of_graphs(tensor)
        marks = [torch.cuda.current_stream(device).record_event() for device in devices]

        def when_ready() -> None:
            for mark in marks:
                mark.synchronize()
            call()
            for device in devices:
                torch.cuda.current_stream(device).synchronize()

        return when_ready

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's content in dense memory, when it is there."""
        checks.outside_of_graphs(tensor)
        return super().fetch(tensor)

    def expect(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Call]:
        """Return dense memory to receive a tensor's content, and what brings it from there to the tensor."""
        checks.outside_of_graphs(tensor)
        return super().expect(tensor)


NO_TRANSPORT = NoTransport()


_has_passed = False  # whether this rank and all others of a group have stood the test


def choose(comm: Intracomm, settings: Settings) -> Transport:
    """Agree on the way of a new group's tensors (collective)."""
    has_gpu = torch.cuda.is_available()
    # Not where nobody uses the GPUs: the test would be the first to.
    may_try = not has_gpu or (torch.cuda.is_initialized() and _wants_addresses(settings))
    no_gpu, all_may_try, all_have_passed, chunk_bytes = _least(
        comm, [not has_gpu, may_try, _has_passed, settings.gpu_chunk_bytes]
    )
    if no_gpu:
        return NO_TRANSPORT
    if all_have_passed or (all_may_try and _passes(comm, torch.device("cuda" if has_gpu else "cpu"))):
        return GPUDirect()
    return Staged(comm.size, chunk_bytes, functools.partial(on_all_ranks, comm))


def _wants_addresses(settings: Settings) -> bool:
    if settings.gpu_aware in ("0", "1"):
        return settings.gpu_aware == "1"
    return gpu_probe.is_claimed(os.environ)


def _least(comm: Intracomm, values: Sequence[int]) -> array[int]:
    """Return the least of all ranks' values, one by one (collective)."""
    least = array("q", values)
    comm.Allreduce(mpi.api().IN_PLACE, least, mpi.api().MIN)
    return least


def on_all_ranks(comm: Intracomm, flag: bool) -> bool:
    """Return whether a flag is true on all ranks (collective)."""
    return bool(_least(comm, [flag])[0])


def _passes(comm: Intracomm, device: torch.device) -> bool:
    """Tell whether MPI works with addresses on all ranks' devices (collective); warn if it only says so."""
    global _has_passed  # noqa: PLW0603  the library's ability is the process's
    failures = gpu_probe.failures(comm, device)
    _has_passed = on_all_ranks(comm, not failures)
    if failures:
        warnings.warn(
            f"MPI says that it can use a GPU's memory, but cannot: {', '.join(failures)}. GPU tensors go by way of the "
            f"host. Set MPICOMM_GPU_AWARE=0 to do without the test.",
            stacklevel=2,
        )
    elif _has_passed:
        _warn_of_allocators()
    return _has_passed


def _warn_of_allocators() -> None:
    """Warn of memory that CUDA IPC cannot export, so that the ranks of a node exchange it through the host."""
    given = ",".join(os.environ.get(name, "") for name in _ALLOCATORS).replace(" ", "")
    for setting in _NOT_EXPORTED:
        if setting in given:
            warnings.warn(
                f"PYTORCH_CUDA_ALLOC_CONF has {setting}: UCX cannot map such memory, and moves it a hundred times more "
                f"slowly. Leave that out, or set MPICOMM_GPU_AWARE=0.",
                stacklevel=2,
            )
