"""Allocations of Slurm and PBS, read from the variables of a batch script or an interactive shell."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from mpicomm.launch import hosts
from mpicomm.launch.hosts import Host

_RUN = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # "4(x2)": the value 4 for each of two nodes


@dataclasses.dataclass(frozen=True)
class Slurm:
    """A Slurm allocation."""

    nodes: int
    ranks: int
    cpus: tuple[int, ...] = ()
    """Number of CPUs on each node; empty if Slurm does not report it."""
    cpus_per_task: int | None = None
    """The user's --cpus-per-task; None if not set."""


@dataclasses.dataclass(frozen=True)
class PBS:
    """A PBS allocation."""

    file: str
    hosts: tuple[Host, ...]
    cpus: int
    """NCPUS: CPUs of the first chunk, or the number of threads that each of its ranks should use; 0 if not set."""


def of_slurm(environ: Mapping[str, str]) -> Slurm | None:
    """Return the Slurm allocation, None outside one.

    If the job has no number of tasks, the default is one rank per GPU.
    """
    if not environ.get("SLURM_JOB_ID"):
        return None
    nodes = _number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    per_node = _number(environ, "SLURM_NTASKS_PER_NODE")
    return Slurm(
        nodes=nodes,
        ranks=_number(environ, "SLURM_NTASKS", "SLURM_NPROCS")
        or (per_node and nodes * per_node)
        or _gpus(environ, nodes)
        or sum(_runs(environ.get("SLURM_TASKS_PER_NODE", "")))
        or nodes,
        cpus=_runs(environ.get("SLURM_JOB_CPUS_PER_NODE", "")),
        cpus_per_task=_number(environ, "SLURM_CPUS_PER_TASK"),
    )


def has_gpus(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm allocated GPUs to this job."""
    return _gpus(environ, 1) > 0 or bool(environ.get("SLURM_JOB_GPUS"))


def is_of_pbs(environ: Mapping[str, str]) -> bool:
    """Return whether this process runs in a PBS job, by the variables that MPI libraries check too."""
    return all(environ.get(name) for name in ("PBS_JOBID", "PBS_ENVIRONMENT", "PBS_NODEFILE"))


def of_pbs(environ: Mapping[str, str], text: str) -> PBS:
    """Return the allocation of a PBS job.

    Args:
        text: Contents of the file that PBS_NODEFILE names.
    """
    file = environ["PBS_NODEFILE"]
    found = hosts.with_slots(hosts.of_file(text, file), None)
    return PBS(file, found, _number(environ, "NCPUS") or 0)


def _gpus(environ: Mapping[str, str], nodes: int) -> int:
    if total := _number(environ, "SLURM_GPUS"):
        return total
    return nodes * (_number(environ, "SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE") or 0)


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first positive number among the variables, without a type prefix as in `a100:4`."""
    values = [environ.get(name, "").rpartition(":")[2] for name in names]
    return next((int(text) for text in values if text.isdigit() and int(text) > 0), None)


def _runs(text: str) -> tuple[int, ...]:
    return tuple(int(value) for value, times in _RUN.findall(text) for _ in range(int(times or 1)))
