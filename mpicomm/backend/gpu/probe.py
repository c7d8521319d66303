"""The choice of a group's transport, by the support of GPU addresses that the MPI library reports, and a test of it.

MPI receives GPU addresses (GPU-aware MPI) only if the library reports support, or the user sets it, and the test at the
creation of a group passes.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from mpicomm import agreement, mpi
from mpicomm.backend.gpu.staging import StagingTransport
from mpicomm.backend.gpu.transport import DIRECT, GPUDirect, Transport
from mpicomm.backend.transfer import buffers, mpi_calls
from mpicomm.devices import accelerator, vendors
from mpicomm.settings import Settings

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_KINDS = "mpi_memory_alloc_kinds"  # MPI-4.1, section 11.4.3
_COUNTS = (1, 2**8, 2**18)  # elements: MPI libraries use different protocols for different sizes
_MOST = 2**24  # maximum total elements in the tests where one rank holds a part of each rank
_TAG = 0

_has_passed = False  # whether the test has passed on all ranks of a group of this rank


def choose_transport(comm: Intracomm, settings: Settings) -> Transport:
    """Choose the transport of a new group, the same on all ranks (collective)."""
    has_gpu = accelerator.is_available()
    # Do not test if the program has not used a GPU: the test would create the first context of a program without GPUs.
    may_try = not has_gpu or (accelerator.is_initialized() and _wants_addresses(settings))
    no_gpu, all_may_try, all_have_passed, chunk_bytes = agreement.minimum(
        comm, [not has_gpu, may_try, _has_passed, 1024 * settings.gpu_chunk_kib]
    )
    if no_gpu:
        return DIRECT
    device = accelerator.current_device() if all_may_try and has_gpu else torch.device("cpu")
    if all_have_passed or (all_may_try and _passes_test(comm, device)):
        return GPUDirect()
    return StagingTransport(comm.size, chunk_bytes, functools.partial(agreement.all_true, comm))


def _wants_addresses(settings: Settings) -> bool:
    if settings.gpu_aware == "0" or mpi.has_disabled_gpu_buffers():
        return False
    return settings.gpu_aware == "1" or is_claimed(mpi.environ_at_init())


def _passes_test(comm: Intracomm, device: torch.device) -> bool:
    """Test GPU-aware MPI; return whether it works on all ranks, and warn on a rank where it fails (collective)."""
    global _has_passed  # noqa: PLW0603  a property of the library, one per process
    failed = failures(comm, device)
    _has_passed = agreement.all_true(comm, not failed)
    if failed:
        warnings.warn(
            f"GPU-aware MPI failed its test: {', '.join(failed)}. GPU tensors are staged through host memory. "
            f"Set MPICOMM_GPU_AWARE=0 to skip the test.",
            stacklevel=2,
        )
    elif _has_passed:
        _warn_of_allocators()
    return _has_passed


def _warn_of_allocators() -> None:
    """Warn of allocator settings whose memory IPC cannot export: the ranks of a node then transfer by the host."""
    if setting := vendors.vendor().allocator_without_ipc(os.environ):
        warnings.warn(
            f"{setting}: {vendors.vendor().name} IPC cannot export such memory, so transfers of GPU tensors are about "
            f"100 times slower. Remove this setting, or set MPICOMM_GPU_AWARE=0.",
            stacklevel=2,
        )


# -- the support that the library reports, and its test ----------------------------------------------------------------


def is_claimed(environ: Mapping[str, str]) -> bool:
    """Return whether the MPI library reports support for GPU addresses.

    Args:
        environ: The environment that MPI_Init has read.
    """
    if mpi.library().has_gpu_disabled(environ):
        return False
    if "CRAY" in mpi.library().description.upper():  # reports support even if it is disabled
        return environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
    vendor = vendors.vendor()
    return _names_kind(vendor.memory_kind) or any(answers_yes(query) for query in vendor.mpi_queries)


def _names_kind(memory_kind: str) -> bool:
    kinds = mpi.api().COMM_WORLD.Get_info().Get(_KINDS) or ""
    return bool(memory_kind) and memory_kind in (kind.split(":")[0] for kind in kinds.split(","))


def answers_yes(query: str) -> bool:
    """Return whether a function of the MPI library, such as `MPIX_Query_cuda_support`, reports support."""
    path = mpi.library().path
    call = getattr(ctypes.CDLL(path), query, None) if path else None
    return call is not None and call() == 1


def failures(comm: Intracomm, device: torch.device) -> list[str]:
    """Return the operations that fail or give wrong results with addresses on `device` (collective)."""
    with _stack_of_a_crash():
        return _if_this_crashes_set_MPICOMM_GPU_AWARE_to_0(comm, device)


def _if_this_crashes_set_MPICOMM_GPU_AWARE_to_0(  # noqa: N802  the user reads this name in the stack trace of a crash
    comm: Intracomm, device: torch.device
) -> list[str]:
    return [
        f"{name} of {count} elements"
        for count in _COUNTS
        for name, test in _TESTS.items()
        if name not in _OF_EACH or count * comm.size <= _MOST
        if not _passes(test, comm, device, count)
    ]


def _passes(
    test: Callable[[Intracomm, torch.device, int], bool], comm: Intracomm, device: torch.device, count: int
) -> bool:
    try:
        return test(comm, device, count)
    except RuntimeError:  # MPI errors, and torch errors such as out of memory
        return False


def _all_reduce(comm: Intracomm, device: torch.device, count: int) -> bool:
    tensor = _of_rank(comm.rank, count, device)
    mpi_calls.all_reduce(comm, tensor, mpi.api().FLOAT, mpi.api().SUM)
    return torch.equal(tensor, _of_rank(sum(range(comm.size)), count, device))


def _reduce(comm: Intracomm, device: torch.device, count: int) -> bool:
    tensor = _of_rank(comm.rank, count, device)
    mpi_calls.reduce(comm, tensor, mpi.api().FLOAT, mpi.api().MAX, 0)
    return comm.rank != 0 or torch.equal(tensor, _of_rank(comm.size - 1, count, device))


def _reduce_scatter(comm: Intracomm, device: torch.device, count: int, *, gives_counts: bool = False) -> bool:
    result, source = _of_rank(-1, count, device), _of_rank(1, count * comm.size, device)
    counts = [count] * comm.size if gives_counts else None
    mpi_calls.reduce_scatter(comm, source, counts, result, mpi.api().FLOAT, mpi.api().SUM)
    return torch.equal(result, _of_rank(comm.size, count, device))


def _broadcast(comm: Intracomm, device: torch.device, count: int) -> bool:
    tensor = _of_rank(comm.rank, count, device)
    mpi_calls.broadcast(comm, tensor, comm.size - 1)
    return torch.equal(tensor, _of_rank(comm.size - 1, count, device))


def _all_gather(comm: Intracomm, device: torch.device, count: int, *, gives_counts: bool = False) -> bool:
    result = _of_rank(comm.rank, count * comm.size, device)
    mpi_calls.all_gather(comm, result, [count] * comm.size if gives_counts else None)
    return torch.equal(result, _of_each(comm, count, device))


def _gather(comm: Intracomm, device: torch.device, count: int) -> bool:
    result = _of_rank(-1, count * comm.size, device) if comm.rank == 0 else None
    mpi_calls.gather(comm, _of_rank(comm.rank, count, device), result, [count] * comm.size, 0)
    return result is None or torch.equal(result, _of_each(comm, count, device))


def _scatter(comm: Intracomm, device: torch.device, count: int) -> bool:
    result = _of_rank(-1, count, device)
    source = _of_each(comm, count, device) if comm.rank == 0 else None
    mpi_calls.scatter(comm, source, [count] * comm.size, result, 0)
    return torch.equal(result, _of_rank(comm.rank, count, device))


def _all_to_all(comm: Intracomm, device: torch.device, count: int, *, gives_counts: bool = False) -> bool:
    result, counts = _of_rank(-1, count * comm.size, device), [count] * comm.size if gives_counts else None
    mpi_calls.all_to_all(comm, _of_rank(comm.rank, count * comm.size, device), counts, result, counts)
    return torch.equal(result, _of_each(comm, count, device))


def _message(comm: Intracomm, device: torch.device, count: int) -> bool:
    result, source = _of_rank(-1, count, device), _of_rank(comm.rank, count, device)
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    buffers.synchronize_stream(result)
    requests = [
        mpi_calls.receive(comm, result, before, _TAG),
        mpi_calls.send(comm, source, after, _TAG),
    ]
    mpi.api().Request.Waitall(requests)
    return torch.equal(result, _of_rank(before, count, device))


_TESTS: dict[str, Callable[[Intracomm, torch.device, int], bool]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "message": _message,
    "uneven reduce_scatter": functools.partial(_reduce_scatter, gives_counts=True),
    "uneven all_gather": functools.partial(_all_gather, gives_counts=True),
    "uneven all_to_all": functools.partial(_all_to_all, gives_counts=True),
}
_OF_EACH = {name for name in _TESTS if any(word in name for word in ("scatter", "gather", "to_all"))}


def _of_rank(rank: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.full((count,), float(rank), dtype=torch.float32, device=device)


def _of_each(comm: Intracomm, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(comm.size, dtype=torch.float32, device=device).repeat_interleave(count)


@contextlib.contextmanager
def _stack_of_a_crash() -> Iterator[None]:
    """Print the Python stack if the process crashes, e.g. by a segmentation fault in MPI."""
    if faulthandler.is_enabled() or sys.__stderr__ is None:
        yield
        return
    faulthandler.enable(sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.disable()
