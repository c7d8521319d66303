"""Memory that the ranks of a node share. It has no name in any file system: it goes with the last process that maps it.

One rank makes a file in memory (memfd_create) and reserves its pages; the others open it by way of that rank's entry in
/proc, which asks for the same user and the same PID namespace. The size of /dev/shm does not matter to it.
"""

from __future__ import annotations

import mmap
import os
import secrets
from typing import TYPE_CHECKING

import torch

from mpicomm.errors import MpicommError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_TOKEN_BYTES = 16


class NoSharedMemoryError(MpicommError):
    """The ranks of a node cannot share memory."""


def make(comm: Intracomm, nbytes: int) -> torch.Tensor:
    """Return memory, as bytes, that all ranks of `comm` share (collective). It is theirs until the tensor goes.

    Raises:
        NoSharedMemoryError: On all ranks, if there is none for one of them.
    """
    failure, memory, descriptor = "", None, None
    offer: tuple[int, int, bytes] | None = None
    if comm.rank == 0:
        try:
            descriptor, memory = _create(nbytes)
            offer = (os.getpid(), descriptor, _token(memory))
        except Exception as error:  # noqa: BLE001  whatever it is, the others wait to hear of it
            failure = f"{nbytes >> 20} MiB cannot be reserved: {error}"
    offer = comm.bcast(offer, 0)
    if comm.rank > 0 and offer is not None:
        try:
            memory = _open(offer, nbytes)
        except Exception as error:  # noqa: BLE001  as above
            failure = f"what another rank of this node has made cannot be opened: {error}"
    failures = [each for each in comm.allgather(failure) if each]
    if descriptor is not None:
        os.close(descriptor)  # all have mapped it, or never will
    if failures:
        raise NoSharedMemoryError(failures[0])
    assert memory is not None
    return memory


def _create(nbytes: int) -> tuple[int, torch.Tensor]:
    """Return a descriptor of new memory and the memory, which begins with what only its maker knows."""
    descriptor = os.memfd_create("mpicomm", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # or touching it could end the process
        memory = _map(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    memory[:_TOKEN_BYTES] = torch.frombuffer(bytearray(secrets.token_bytes(_TOKEN_BYTES)), dtype=torch.uint8)
    return descriptor, memory


def _open(offer: tuple[int, int, bytes], nbytes: int) -> torch.Tensor:
    """Return the memory that another rank has made; in another PID namespace its number would be somebody else's."""
    pid, descriptor, token = offer
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != nbytes:
            raise OSError(f"process {pid} is another one here")
        memory = _map(opened, nbytes)
    finally:
        os.close(opened)
    if _token(memory) != token:
        raise OSError(f"process {pid} is another one here")
    return memory


def _token(memory: torch.Tensor) -> bytes:
    return bytes(memory[:_TOKEN_BYTES].numpy())


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
