"""The plan of a job, computed once and equal on all ranks: where its processes are, their devices and their backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from mpicomm import arguments
from mpicomm.topology import Topology

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from mpi4py.MPI import Intracomm

MPI, MPI_WITH_NCCL = "mpi", "cpu:mpi,cuda:nccl"
GLOO, GLOO_WITH_NCCL, NCCL = "gloo", "cpu:gloo,cuda:nccl", "nccl"
KNOWN_BACKENDS = ("auto", MPI, NCCL, GLOO, MPI_WITH_NCCL, GLOO_WITH_NCCL)
BACKEND = dataclasses.replace(
    arguments.one_of(*KNOWN_BACKENDS).or_none(), remedy="Pass one of these names, or None for no process group."
)


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

    gpus: Sequence[int | None] = ()
    """The index of every process's GPU; None for the CPU."""

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


def needs_mpi(backend: str | None) -> bool:
    """Return whether the backend requires MPI."""
    return backend in (MPI, MPI_WITH_NCCL)


def needs_nccl(backend: str | None) -> bool:
    """Return whether the backend uses NCCL for GPU tensors."""
    return backend is not None and NCCL in backend


def choose_backend(backend: str | None, *, has_mpi: bool, gpu_each: bool, has_nccl: bool) -> str | None:
    """Resolve "auto" to a backend; return any other backend unchanged.

    Args:
        has_mpi: Whether an MPI launcher started the ranks.
        gpu_each: Whether every rank has a GPU that no other rank uses.
        has_nccl: Whether this torch was built with NCCL.
    """
    if backend != "auto":
        return backend
    if gpu_each and has_nccl:
        return MPI_WITH_NCCL if has_mpi else GLOO_WITH_NCCL
    return MPI if has_mpi else GLOO


def has_gpu_each(uuids: Sequence[str | None], hosts: Sequence[str]) -> bool:
    """Return whether every rank has a GPU that no other rank uses."""
    owned = [(host, uuid) for host, uuid in zip(hosts, uuids, strict=True) if uuid is not None]
    return len(set(owned)) == len(uuids)
