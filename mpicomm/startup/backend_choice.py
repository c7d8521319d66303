"""Chooses the backend of the job from the requested backend and the devices of the ranks, without side effects."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mpicomm import arguments

MPI, MPI_WITH_NCCL = "mpi", "cpu:mpi,cuda:nccl"
GLOO, GLOO_WITH_NCCL, NCCL = "gloo", "cpu:gloo,cuda:nccl", "nccl"
KNOWN = ("auto", MPI, NCCL, GLOO, MPI_WITH_NCCL, GLOO_WITH_NCCL)


_EXPECTED = dataclasses.replace(
    arguments.one_of(*KNOWN).or_none(), remedy="Pass one of these names, or None for no process group."
)


def check(backend: str | None) -> None:
    """Check the name of a backend.

    Raises:
        TypeError: If it is neither a str nor None.
        ValueError: If it is not one of `KNOWN`.
    """
    _EXPECTED.check(backend, "backend")


def needs_mpi(backend: str | None) -> bool:
    """Return whether the backend requires MPI."""
    return backend in (MPI, MPI_WITH_NCCL)


def needs_nccl(backend: str | None) -> bool:
    """Return whether the backend uses NCCL for GPU tensors."""
    return backend is not None and NCCL in backend


def choose(backend: str | None, *, has_mpi: bool, gpu_each: bool, has_nccl: bool) -> str | None:
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


def gpu_each(uuids: Sequence[str | None], hosts: Sequence[str]) -> bool:
    """Return whether every rank has a GPU that no other rank uses."""
    owned = [(host, uuid) for host, uuid in zip(hosts, uuids, strict=True) if uuid is not None]
    return len(set(owned)) == len(uuids)
