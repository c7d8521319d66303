"""The compared backends: process groups of torch, and mpi4py alone on the same buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm.backend import plugin
from mpicomm.backend.work import CompletedWork
from mpicomm.bench.measured_operations import MeasuredOperation
from mpicomm.runtime import World

OURS, MPI4PY = "mpi", "mpi4py"
NOTHING = "none"
"""A backend whose collectives do nothing: its training step is a lower bound for every backend."""

Backend = Callable[[MeasuredOperation, bool], Callable[[], Any]]
"""Returns the call that runs an operation, or, if the second argument is true, starts it and returns its handle.

It raises NotImplementedError if the backend does not support the operation.
"""


def select(
    asked: Sequence[str] | None, known: Sequence[str], kind: str, world: World
) -> tuple[list[str], torch.device]:
    """Return the names of the backends to compare, and the device of their tensors.

    Args:
        asked: The names that the user asked for; None for all known ones that are available.
        known: The names that the benchmark supports.
        kind: "cpu" or "cuda".

    Raises:
        ValueError: If the device or one of the backends is not available in this job.
    """
    if kind == "cuda" and world.device.type != "cuda":
        raise ValueError("--device cuda: this rank has no GPU; use --device cpu")
    of_torch, of_mpi = ("nccl", (OURS, NOTHING)) if kind == "cuda" else ("gloo", (OURS, MPI4PY, NOTHING))
    available = {of_torch, *(of_mpi if world.comm is not None else ())}
    names = list(asked or [name for name in known if name in available])
    if world.comm is None and {OURS, MPI4PY, NOTHING} & set(names):
        raise ValueError(
            f"{world.launcher} started the ranks without MPI; use --backend gloo, or start them with mpirun."
        )
    if "nccl" in names and world.device.type != "cuda":
        raise ValueError("nccl needs one GPU per rank; remove nccl from --backend.")
    return names, world.device if kind == "cuda" else torch.device("cpu")


def make(names: Sequence[str], world: World) -> dict[str, Backend]:
    """Return the backends with these names (collective)."""
    return {name: _by_mpi4py(world.comm) if name == MPI4PY else _by_torch(group(name, world)) for name in names}


def group(name: str, world: World) -> Any:
    """Return a process group of all ranks with the backend of this name (collective)."""
    if name == NOTHING:
        return _without_communication(dist.new_group(backend=plugin.NAME))
    if world.backend == name:
        return dist.group.WORLD
    return dist.new_group(backend=plugin.NAME if name == OURS else name)


def _by_torch(group: Any) -> Backend:
    return lambda operation, starts: functools.partial(operation.by_torch, group, starts=starts)


def _by_mpi4py(comm: Any) -> Backend:
    def call(operation: MeasuredOperation, starts: bool) -> Callable[[], Any]:
        if starts:  # the nonblocking calls of mpi4py are other operations
            raise NotImplementedError
        return operation.by_mpi4py(comm)

    return call


def _without_communication(group: Any) -> Any:
    """Replace the collectives that DDP and FSDP call on a group by no-ops."""

    def nothing(tensors: Any, *_others: Any) -> dist.Work:
        work = CompletedWork()
        work.tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return work

    for name in ("allreduce", "_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single"):
        setattr(group, name, nothing)
    return group
