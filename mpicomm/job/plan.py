"""The plan of a job, computed once and equal on all ranks: where its processes are, their devices and their backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from mpicomm import arguments
from mpicomm.devices import vendor_backends
from mpicomm.topology import Topology

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from mpi4py.MPI import Intracomm

AUTO, MPI, GLOO = "auto", "mpi", "gloo"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the job is set up. Its processes are the ranks of the world, then the spares."""

    hosts: Sequence[str]
    """The host of every process."""

    nodes: Sequence[Hashable]
    """For every process, a value that is the same for the processes of one node, and different between nodes."""

    size: int
    """The number of ranks of the world."""

    backend: str | None
    """The backend of the process group; None for no process group."""

    devices: Sequence[int | None] = ()
    """The index of every process's device; None for the CPU."""

    addresses: Sequence[tuple[str, int]] = ()
    """The addresses and ports at which rank 0 listens for connections of the store."""

    store_token: bytes = b""
    """With it rank 0 proves its identity at these addresses."""

    channel_token: bytes = b""
    """With it the ranks authenticate themselves to the hubs of the out-of-band channel."""

    started: str = ""
    """The time of the start."""

    warnings: Sequence[str] = ()
    """Warnings for rank 0 to print."""


@dataclasses.dataclass(frozen=True)
class JoinedJob:
    """A job that this process has joined: its plan, and what this process has opened for it."""

    plan: Plan
    rank_topology: Topology
    """The position of this rank among the ranks of the world; that of a spare among all processes."""

    process_topology: Topology
    """The position of this process among all processes."""

    device: torch.device
    store: dist.Store
    address: str
    """The address at which the store listens."""

    port: int
    """The port at which the store listens."""

    process_comm: Intracomm | None = None
    """The communicator of all processes; None without MPI."""

    rank_comm: Intracomm | None = None
    """The communicator of the ranks of the world; None without MPI, and on a spare."""

    is_spare: bool = False
    """Whether this process waits to replace a failed rank."""


def known_backends() -> list[str]:
    """Return the names of backends that `bootstrap` accepts: with each vendor's library that torch knows."""
    names = [AUTO, MPI, GLOO]
    for vendor in vendor_backends.known():
        names += [vendor.partition(":")[2], beside_vendor(MPI, vendor), beside_vendor(GLOO, vendor)]
    return names


def check_backend(backend: str | None) -> None:
    """Check the argument `backend` of `bootstrap`.

    Raises:
        ValueError: If it is unknown.
    """
    expected = arguments.one_of(*known_backends()).or_none()
    remedy = "Pass one of these names, or None for no process group."
    dataclasses.replace(expected, remedy=remedy).check(backend, "backend")


def beside_vendor(backend: str, vendor: str) -> str:
    """Return the backend for CPU tensors together with a vendor's, such as `cpu:mpi,cuda:nccl`."""
    return f"cpu:{backend},{vendor}"


def needs_mpi(backend: str | None) -> bool:
    """Return whether the backend requires MPI."""
    return MPI in _parts(backend)


def vendor_part(backend: str | None) -> str:
    """Return the vendor's backend to which the backend passes GPU tensors, such as `nccl`; empty without one."""
    return next((part for part in _parts(backend) if part not in (AUTO, MPI, GLOO)), "")


def _parts(backend: str | None) -> list[str]:
    return [part.rpartition(":")[2] for part in (backend or AUTO).split(",")]


def mpi_takes_gpu_tensors(backend: str | None, vendor: str, gpu_aware: str) -> bool:
    """Return whether MPI is to support GPU buffers. It must be known before MPI_Init, hence before "auto" is resolved.

    On some systems, a process with GPU-aware MPI and a vendor's library deadlocks.

    Args:
        backend: The argument of `bootstrap`.
        vendor: The vendor's backend that this torch has, such as `cuda:nccl`; empty without one.
        gpu_aware: The setting of `MPICOMM_GPU_AWARE`.
    """
    if gpu_aware in ("0", "1"):
        return gpu_aware == "1"
    return not (vendor if backend == AUTO else vendor_part(backend))


def choose_backend(backend: str | None, *, has_mpi: bool, gpu_each: bool, vendor: str) -> str | None:
    """Resolve "auto" to a backend; return any other backend unchanged.

    Args:
        has_mpi: Whether an MPI launcher started the ranks.
        gpu_each: Whether every rank has a GPU that no other rank uses.
        vendor: The vendor's backend that torch has on all ranks, such as `cuda:nccl`; empty without one.
    """
    if backend != AUTO:
        return backend
    of_cpu = MPI if has_mpi else GLOO
    return beside_vendor(of_cpu, vendor) if gpu_each and vendor else of_cpu


def has_gpu_each(gpus: Sequence[str | None], hosts: Sequence[str]) -> bool:
    """Return whether every rank has a GPU that no other rank uses.

    Args:
        gpus: For every rank the identity of its GPU, or None.
        hosts: For every rank its host.
    """
    owned = [(host, identity) for host, identity in zip(hosts, gpus, strict=True) if identity is not None]
    return len(set(owned)) == len(gpus)
