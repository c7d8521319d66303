"""The compared backends: process groups of torch, and mpi4py alone on the same buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mpicomm import mpi
from mpicomm.backend import dtypes, plugin
from mpicomm.backend.work import CompletedWork
from mpicomm.bench.measured_operations import MeasuredOperation, MPI4PyCalls
from mpicomm.runtime import World

OURS, MPI4PY = "mpi", "mpi4py"
NOTHING = "none"
"""A backend whose collectives do nothing: its training step is a lower bound for every backend."""


class Backend(Protocol):
    """Interface through which the benchmarks call an operation."""

    def call(self, operation: MeasuredOperation) -> Callable[[], object]:
        """Return a function that runs the operation.

        Raises:
            NotImplementedError: If this backend does not support the operation.
        """

    def start(self, operation: MeasuredOperation) -> Callable[[], object]:
        """Return a function that starts the operation and returns its handle."""


class TorchBackend:
    """A process group of torch."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def call(self, operation: MeasuredOperation) -> Callable[[], object]:
        """Return a function that runs the operation."""
        return functools.partial(operation.by_torch, self._group)

    def start(self, operation: MeasuredOperation) -> Callable[[], object]:
        """Return a function that starts the operation and returns its handle."""
        return functools.partial(operation.by_torch, self._group, starts=True)


class MPI4PyBackend:
    """mpi4py, with all buffers and arguments prepared before the measurement."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def call(self, operation: MeasuredOperation) -> Callable[[], object]:
        """Return a function that runs the operation.

        Raises:
            NotImplementedError: If MPI has no such call, cannot reduce this dtype, or the tensors are not on the CPU.
        """
        dtype = operation.case.dtype
        datatype = dtypes.arithmetic(dtype) if operation.reduces else dtypes.carrier(dtype)
        if datatype is None or operation.case.device.type != "cpu":
            raise NotImplementedError

        def buffer(tensor: torch.Tensor) -> Any:
            return [mpi.api().memory.fromaddress(tensor.data_ptr(), tensor.nbytes), datatype]

        function, arguments = operation.by_mpi(MPI4PyCalls(self._comm, mpi.api(), buffer))
        return functools.partial(function, *arguments)

    def start(self, operation: MeasuredOperation) -> Callable[[], object]:
        """Raise NotImplementedError: the nonblocking calls of mpi4py are other operations."""
        raise NotImplementedError


def device(kind: str, world: World) -> torch.device:
    """Return the device of this kind for this rank.

    Raises:
        ValueError: If this rank has no GPU and `kind` is "cuda".
    """
    if kind == "cuda" and world.device.type != "cuda":
        raise ValueError("--device cuda: this rank has no GPU; use --device cpu")
    return world.device if kind == "cuda" else torch.device("cpu")


def known(world: World, where: torch.device, *, has_raw: bool = False) -> list[str]:
    """Return the names of the backends that are available for tensors on a device."""
    others = ["nccl"] if where.type == "cuda" else ["gloo"]
    if world.comm is None:
        return others
    return [OURS, *others, *[MPI4PY] * (has_raw and where.type == "cpu")]


def make(names: Sequence[str], world: World) -> dict[str, Backend]:
    """Return the backends with these names (collective).

    Raises:
        ValueError: If one of them is not available in this job.
    """
    of_torch = groups([name for name in names if name != MPI4PY], world)
    if MPI4PY in names and world.comm is None:
        raise ValueError(_without_mpi(world))
    return {name: MPI4PyBackend(world.comm) if name == MPI4PY else TorchBackend(of_torch[name]) for name in names}


def groups(names: Sequence[str], world: World) -> dict[str, Any]:
    """Return process groups of all ranks with the backends of these names (collective).

    Raises:
        ValueError: If one of them is not available in this job.
    """
    if {OURS, NOTHING} & set(names) and world.comm is None:
        raise ValueError(_without_mpi(world))
    if "nccl" in names and world.device.type != "cuda":
        raise ValueError("nccl needs one GPU per rank; remove nccl from --backend.")
    return {name: _group(name, world) for name in names}


def _without_mpi(world: World) -> str:
    return f"{world.launcher} started the ranks without MPI; use --backend gloo, or start them with mpirun."


def _group(name: str, world: World) -> Any:
    if name == NOTHING:
        return _idle(dist.new_group(backend=plugin.NAME))
    if world.backend == name:
        return dist.group.WORLD
    return dist.new_group(backend=plugin.NAME if name == OURS else name)


def _idle(group: Any) -> Any:
    """Replace the collectives that DDP and FSDP call on a group by no-ops."""

    def nothing(tensors: Any, *_others: Any) -> dist.Work:
        work = CompletedWork()
        work.tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return work

    for name in ("allreduce", "_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single"):
        setattr(group, name, nothing)
    return group
