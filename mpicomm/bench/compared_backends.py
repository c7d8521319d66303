"""The compared backends: process groups of torch, and what else runs the same operations on the same buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import torch_internals
from mpicomm.backend import registration
from mpicomm.backend.execution.work import CompletedWork
from mpicomm.backend.operations import TABLE
from mpicomm.bench.measured_operations import MeasuredOperation
from mpicomm.errors import LaunchError
from mpicomm.job import plan
from mpicomm.job.session import World

OURS, MPI4PY = "mpi", "mpi4py"
ASYNCHRONOUS = "mpi-async"
"""This package's backend, which starts each operation asynchronously and waits for it."""
NOTHING = "none"
"""A backend whose collectives do nothing: its training step is a lower bound for every backend."""

_GLOO = "gloo"
_WITH_MPI = {OURS, ASYNCHRONOUS, MPI4PY, NOTHING}
Backend = Callable[[MeasuredOperation, bool], Callable[[], Any]]
"""Returns the call that runs an operation, or, if the second argument is true, starts it and returns its handle.

It raises NotImplementedError if the backend does not support the operation.
"""


def select(
    asked: Sequence[str] | None, known: Sequence[str], kind: str, world: World
) -> tuple[list[str], torch.device]:
    """Return the names of the backends to compare, and the device of their tensors.

    Args:
        asked: The names that the user asked for; None for the known ones that are available.
        known: The names that the benchmark supports.
        kind: The type of the device: "cpu", or that of an accelerator, such as "cuda" or "xpu".

    Raises:
        LaunchError: If the device or one of the backends is not available in this job.
    """
    is_host = kind == "cpu"
    if not is_host and kind != world.device.type:
        reason = "this rank has no GPU" if world.device.type == "cpu" else f"this rank's device is {world.device}"
        raise LaunchError(f"--device {kind}: {reason}; use --device {world.device.type}")
    of_torch = _GLOO if is_host else plan.vendor_part(world.backend)
    of_mpi = (OURS, MPI4PY, NOTHING) if is_host else (OURS, NOTHING)
    available = {of_torch, *(of_mpi if world.comm is not None else ())} - {""}
    names = list(asked or [name for name in dict.fromkeys((*known, of_torch)) if name in available])
    if world.comm is None and _WITH_MPI.intersection(names):
        raise LaunchError(
            f"{world.launcher} started the ranks without MPI; use --backend gloo, or start them with mpirun."
        )
    if unusable := [name for name in names if name not in {_GLOO, of_torch, *_WITH_MPI}]:
        raise LaunchError(
            f"{unusable[0]} needs one GPU per rank, and tensors on it (--device); remove {unusable[0]} from --backend."
        )
    if not names:
        raise LaunchError(f"no backend of this job transfers tensors on {world.device}; use --device cpu.")
    return names, torch.device("cpu") if is_host else world.device


def make(names: Sequence[str], world: World) -> dict[str, Backend]:
    """Return the backends with these names (collective)."""

    def backend(name: str) -> Backend:
        if name == MPI4PY:
            return _by_mpi4py(world.comm)
        if name == ASYNCHRONOUS:
            return _by_torch_and_wait(group(OURS, world))
        return by_torch(group(name, world))

    return {name: backend(name) for name in names}


def group(name: str, world: World) -> Any:
    """Return a process group of all ranks with the backend of this name (collective)."""
    if name == NOTHING:
        return _without_communication(dist.new_group(backend=registration.NAME))
    if world.backend == name:
        return dist.group.WORLD
    return dist.new_group(backend=registration.NAME if name == OURS else name)


def by_torch(group: Any) -> Backend:
    """Return the backend that runs the operations of torch.distributed on a group."""
    return lambda operation, starts: functools.partial(operation.by_torch, group, starts=starts)


def _by_torch_and_wait(group: Any) -> Backend:
    def call(operation: MeasuredOperation, starts: bool) -> Callable[[], Any]:
        if starts:
            raise NotImplementedError(f"{ASYNCHRONOUS} waits in each call; use {OURS} with --async")
        return lambda: operation.by_torch(group, starts=True).wait()

    return call


def _by_mpi4py(comm: Any) -> Backend:
    def call(operation: MeasuredOperation, starts: bool) -> Callable[[], Any]:
        if starts:  # the nonblocking calls of mpi4py are other operations
            raise NotImplementedError
        return operation.by_mpi4py(comm)

    return call


def _without_communication(group: Any) -> Any:
    """Replace the operations of a group by no-ops, but not the one by which a new DDP compares the ranks' models."""

    def nothing(tensors: Any = (), *_others: Any, **_keywords: Any) -> dist.Work:
        work = CompletedWork()
        work.tensors = tensors if isinstance(tensors, list) else [tensors]
        return work

    for operation in TABLE:
        if operation.method == "allgather":
            continue
        for name in (operation.method, torch_internals.RENAMED.get(operation.method, operation.method)):
            setattr(group, name, nothing)
    for name in ("send", "recv", "barrier"):
        setattr(group, name, nothing)
    return group
