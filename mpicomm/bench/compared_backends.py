"""The back ends that are compared: process groups of torch's, and mpi4py alone on the same buffers."""

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
"""Collectives that do nothing: what is left of a step of training is the floor of all back ends."""


class Backend(Protocol):
    """How an operation is asked for."""

    def call(self, operation: MeasuredOperation) -> Callable[[], object]:
        """Return what does it.

        Raises:
            NotImplementedError: If this back end has no such operation.
        """

    def start(self, operation: MeasuredOperation) -> Callable[[], object]:
        """Return what starts it, and returns what to wait for."""


class TorchBackend:
    """A process group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def call(self, operation: MeasuredOperation) -> Callable[[], object]:
        """Return what does an operation."""
        return functools.partial(operation.by_torch, self._group)

    def start(self, operation: MeasuredOperation) -> Callable[[], object]:
        """Return what starts it."""
        return functools.partial(operation.by_torch, self._group, starts=True)


class MPI4PyBackend:
    """mpi4py, with all that can be made before made before."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def call(self, operation: MeasuredOperation) -> Callable[[], object]:
        """Return what does an operation.

        Raises:
            NotImplementedError: If MPI does not calculate with such numbers, or has no such call.
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
        """Raise, since what mpi4py starts is something else."""
        raise NotImplementedError


def device(kind: str, world: World) -> torch.device:
    """Return the device of that kind that this rank is to use.

    Raises:
        ValueError: If there is none.
    """
    if kind == "cuda" and world.device.type != "cuda":
        raise ValueError("--device cuda: there is no GPU here")
    return world.device if kind == "cuda" else torch.device("cpu")


def known(world: World, where: torch.device, *, has_raw: bool = False) -> list[str]:
    """Return the names of the back ends that can be had for tensors there."""
    others = ["nccl"] if where.type == "cuda" else ["gloo"]
    if world.comm is None:
        return others
    return [OURS, *others, *[MPI4PY] * (has_raw and where.type == "cpu")]


def make(names: Sequence[str], world: World) -> dict[str, Backend]:
    """Return the back ends of these names (collective).

    Raises:
        ValueError: If one of them cannot be had here.
    """
    of_torch = groups([name for name in names if name != MPI4PY], world)
    if MPI4PY in names and world.comm is None:
        raise ValueError(_without_mpi(world))
    return {name: MPI4PyBackend(world.comm) if name == MPI4PY else TorchBackend(of_torch[name]) for name in names}


def groups(names: Sequence[str], world: World) -> dict[str, Any]:
    """Return process groups of all ranks with the back ends of these names (collective).

    Raises:
        ValueError: If one of them cannot be had here.
    """
    if {OURS, NOTHING} & set(names) and world.comm is None:
        raise ValueError(_without_mpi(world))
    if "nccl" in names and world.device.type != "cuda":
        raise ValueError("NCCL needs a GPU for each rank: leave out nccl.")
    return {name: _group(name, world) for name in names}


def _without_mpi(world: World) -> str:
    return f"{world.launcher} started the ranks without MPI: give --backend gloo, or start by mpirun."


def _group(name: str, world: World) -> Any:
    if name == NOTHING:
        return _idle(dist.new_group(backend=plugin.NAME))
    if world.backend == name:
        return dist.group.WORLD
    return dist.new_group(backend=plugin.NAME if name == OURS else name)


def _idle(group: Any) -> Any:
    """Let a group's collectives of DDP and FSDP do nothing."""

    def nothing(tensors: Any, *_others: Any) -> dist.Work:
        work = CompletedWork()
        work.tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return work

    for name in ("allreduce", "_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single"):
        setattr(group, name, nothing)
    return group
