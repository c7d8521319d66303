"""Memory that the ranks of a node share.

It has no name in any file system, and is freed with the last process that maps it: one rank creates a file in memory
(memfd_create) and reserves its pages; the other ranks open it through that rank's entry in /proc, which requires the
same user and the same PID namespace. The size of /dev/shm does not limit it.
"""

from __future__ import annotations

import mmap
import os
import secrets
from typing import TYPE_CHECKING

import torch

from mpicomm import agreement
from mpicomm.errors import MpicommError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_TOKEN_BYTES = 16


class NoSharedMemoryError(MpicommError):
    """The ranks of a node cannot share memory."""


def make(comm: Intracomm, nbytes: int) -> torch.Tensor:
    """Return memory, as bytes, that all ranks of `comm` share (collective). It is mapped as long as the tensor lives.

    Raises:
        NoSharedMemoryError: On all ranks, if one of them cannot share the memory.
    """
    memory: torch.Tensor | None = None
    descriptor: int | None = None

    def create() -> tuple[int, int, bytes]:
        nonlocal descriptor, memory
        try:
            descriptor, memory = _create(nbytes)
        except Exception as error:
            raise NoSharedMemoryError(f"failed to reserve {nbytes >> 20} MiB: {error}") from error
        return os.getpid(), descriptor, _token(memory)

    def open_() -> None:
        nonlocal memory
        memory = _open(offer, nbytes) if memory is None else memory

    def failed(_rank: int, why: str) -> NoSharedMemoryError:
        return NoSharedMemoryError(f"failed to open the memory of another rank: {why}")

    offer = agreement.run_on_rank_0(comm, create)
    try:
        agreement.run_on_all_ranks(comm.allgather, open_, Exception, failed)
    finally:
        if descriptor is not None:
            os.close(descriptor)  # all ranks have mapped it, or have failed to
    assert memory is not None
    return memory


def _create(nbytes: int) -> tuple[int, torch.Tensor]:
    """Create a file in memory; return its descriptor and its memory, which begins with a random token."""
    descriptor = os.memfd_create("mpicomm", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # otherwise access to a page could kill the process
        memory = _map(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    memory[:_TOKEN_BYTES] = torch.frombuffer(bytearray(secrets.token_bytes(_TOKEN_BYTES)), dtype=torch.uint8)
    return descriptor, memory


def _open(offer: tuple[int, int, bytes], nbytes: int) -> torch.Tensor:
    """Open the memory that another rank has created.

    Raises:
        OSError: If it cannot be opened, or if the process ID belongs to another process in this rank's PID namespace.
    """
    pid, descriptor, token = offer
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != nbytes:
            raise OSError(f"process {pid} is a different process in this rank's PID namespace")
        memory = _map(opened, nbytes)
    finally:
        os.close(opened)
    if _token(memory) != token:
        raise OSError(f"process {pid} is a different process in this rank's PID namespace")
    return memory


def _token(memory: torch.Tensor) -> bytes:
    return bytes(memory[:_TOKEN_BYTES].numpy())


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
