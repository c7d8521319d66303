"""The transport of a group's tensors to MPI: CPU tensors directly, GPU tensors by GPU address or staged.

MPI receives GPU addresses (GPU-aware MPI) only if the library reports support, or the user sets it, and a test at
group creation passes.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpicomm import agreement
from mpicomm.backend import checks
from mpicomm.backend.gpu import probe
from mpicomm.backend.gpu.staging import Call, Make, Staged, Transport, Use
from mpicomm.backend.transfer.buffers import Tensors
from mpicomm.settings import Settings

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NOT_EXPORTED = ("expandable_segments:True", "backend:cudaMallocAsync")


class GPUDirect(Transport):
    """Passes GPU addresses to a GPU-aware MPI; synchronises streams, since MPI does not order its calls by them."""

    def prepare(self, make: Make, tensors: Tensors, uses: Sequence[Use], *, num_blocks: int | None = 1) -> Call:
        """Return a call that waits for the work queued so far on the caller's current streams, then runs."""
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
        """Return a dense tensor with the content of `tensor`; fails during a CUDA graph capture."""
        checks.outside_of_graphs(tensor)
        return super().fetch(tensor)

    def expect(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Call]:
        """Return a dense tensor to receive the content of `tensor`, and a call that copies it into `tensor`."""
        checks.outside_of_graphs(tensor)
        return super().expect(tensor)


NO_TRANSPORT = Transport()


_has_passed = False  # whether the test has passed on all ranks of a group of this rank


def choose(comm: Intracomm, settings: Settings) -> Transport:
    """Choose the transport of a new group, the same on all ranks (collective)."""
    has_gpu = torch.cuda.is_available()
    # Do not test if CUDA is not initialised: the test would create the first context of a program without GPU use.
    may_try = not has_gpu or (torch.cuda.is_initialized() and _wants_addresses(settings))
    no_gpu, all_may_try, all_have_passed, chunk_bytes = agreement.minimum(
        comm, [not has_gpu, may_try, _has_passed, 1024 * settings.gpu_chunk_kib]
    )
    if no_gpu:
        return NO_TRANSPORT
    if all_have_passed or (all_may_try and _passes(comm, torch.device("cuda" if has_gpu else "cpu"))):
        return GPUDirect()
    return Staged(comm.size, chunk_bytes, functools.partial(agreement.all_true, comm))


def _wants_addresses(settings: Settings) -> bool:
    if settings.gpu_aware in ("0", "1"):
        return settings.gpu_aware == "1"
    return probe.is_claimed(os.environ)


def _passes(comm: Intracomm, device: torch.device) -> bool:
    """Test GPU-aware MPI; return whether it works on all ranks, and warn on a rank where it fails (collective)."""
    global _has_passed  # noqa: PLW0603  a property of the library, one per process
    failures = probe.failures(comm, device)
    _has_passed = agreement.all_true(comm, not failures)
    if failures:
        warnings.warn(
            f"GPU-aware MPI failed its test: {', '.join(failures)}. GPU tensors are staged through host memory. "
            f"Set MPICOMM_GPU_AWARE=0 to skip the test.",
            stacklevel=2,
        )
    elif _has_passed:
        _warn_of_allocators()
    return _has_passed


def _warn_of_allocators() -> None:
    """Warn of allocator settings whose memory CUDA IPC cannot export: the ranks of a node then transfer by the host."""
    configured = ",".join(os.environ.get(name, "") for name in _ALLOCATORS).replace(" ", "")
    for setting in _NOT_EXPORTED:
        if setting in configured:
            warnings.warn(
                f"{' or '.join(_ALLOCATORS)} has {setting}: CUDA IPC cannot export such memory, so transfers of GPU "
                f"tensors are about 100 times slower. Remove this setting, or set MPICOMM_GPU_AWARE=0.",
                stacklevel=2,
            )
