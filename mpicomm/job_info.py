"""Information about the ranks of a job: topology, devices, CPUs, loaded software, and the launchers' variables.

`description` has what a results file records of it: the machine and the versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpicomm import host_info, mpi
from mpicomm.backend.gpu import probe
from mpicomm.collective_ops import collectives
from mpicomm.devices import accelerator, locality, vendors
from mpicomm.errors import MPINotFoundError
from mpicomm.job import plan
from mpicomm.job.session import World
from mpicomm.launch import known_launchers
from mpicomm.launch.known_launchers import Launcher
from mpicomm.native import c_library
from mpicomm.recorder import rank_text
from mpicomm.settings import Settings

_THP = "THP_MEM_ALLOC_ENABLE"  # with this variable, torch requests huge pages for large tensors
_THREADS = ("single", "funneled", "serialized", "multiple")


@dataclasses.dataclass(frozen=True)
class JobInfo:
    """Information about one rank."""

    rank: int
    host: str
    node_rank: int
    local_rank: int
    device: str
    device_name: str
    """The product name of the GPU; empty on a CPU rank."""

    uuid: str
    """The UUID of the GPU, the same on all ranks that see this GPU; empty on a CPU rank."""

    cpus: str
    """The CPUs to which the rank is bound, such as `0-3, 8`."""

    numa_nodes: str
    """The NUMA nodes of these CPUs; empty where the system does not report them."""

    gpu_numa_node: str
    """The NUMA node of the GPU; empty on a CPU rank, or where the system does not report it."""

    software: dict[str, str]
    """The versions and settings of the loaded software, by name."""

    environment: dict[str, str]
    """The variables in which launchers, torchrun included, pass ranks and sizes."""


def gather(world: World) -> list[JobInfo]:
    """Return the information about every rank, by rank (collective)."""
    return collectives.all_gather_object(collect(world))


def collect(world: World) -> JobInfo:
    """Return the information about this rank."""
    cpus = os.sched_getaffinity(0)
    index = world.device.index  # None for the CPU
    return JobInfo(
        rank=world.rank,
        host=world.hostname,
        node_rank=world.node_rank,
        local_rank=world.local_rank,
        device=str(world.device),
        device_name="" if index is None else accelerator.device_name(world.device),
        uuid="" if index is None else vendors.vendor().uuid(index),
        cpus=rank_text.ranges(cpus),
        numa_nodes=rank_text.ranges(numa_nodes(cpus)),
        gpu_numa_node="" if index is None else _shown(locality.numa_node(os.environ, index)),
        software=_software(world),
        environment=_variables(os.environ),
    )


def numa_nodes(cpus: Iterable[int], root: Path = Path("/")) -> list[int]:
    """Return the NUMA nodes that contain at least one of the CPUs.

    Args:
        cpus: The CPUs.
        root: The root of the file tree.
    """
    bound_cpus = set(cpus)
    return [node for node, members in host_info.cpus_by_numa_node(root).items() if bound_cpus.intersection(members)]


def _shown(number: int | None) -> str:
    return "" if number is None else str(number)


def differences(gathered: Iterable[JobInfo]) -> dict[str, dict[str, list[int]]]:
    """Return, for each name of a software, its values and the ranks that have each value."""
    ranks: dict[str, dict[str, list[int]]] = {}
    for info in gathered:
        for name, value in info.software.items():
            ranks.setdefault(name, {}).setdefault(value, []).append(info.rank)
    return ranks


def shown_launchers(environment: Mapping[str, str]) -> list[Launcher]:
    """Return the launchers to show in the table: torchrun, Slurm, and the MPI launchers whose variables are set."""
    launchers = [launcher for launcher in known_launchers.MPI_LAUNCHERS if launcher.rank in environment]
    return [known_launchers.TORCHRUN, known_launchers.SLURM, *launchers]


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    names = {name for launcher in known_launchers.ALL for name in launcher.variables()}
    return {name: environ[name] for name in sorted(names) if name in environ}


def description(quantity: str, command: str) -> dict[str, Any]:
    """Return the head of a results file.

    Args:
        quantity: The measured quantity and its unit.
        command: The command that was run.
    """
    date = time.strftime("%Y-%m-%d")
    return {"command": command, "what": quantity, "date": date, "machine": machine(), "versions": versions()}


def machine() -> dict[str, Any]:
    """Return the properties of this host that influence measurements."""
    page = os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": os.cpu_count(),
        "processor": host_info.processor(),
        "memory, GiB": round(page * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "page, KiB": page // 1024,
        "transparent huge pages": host_info.huge_pages(),
        **_variables_of_torch(_THP),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and the packages, and of the MPI library where one can be loaded."""
    mpi_version = {}
    with contextlib.suppress(MPINotFoundError):
        library = mpi.library()
        mpi_version[library.vendor] = library.version
    return {**mpi_version, **host_info.versions()}


def _software(world: World) -> dict[str, str]:
    software = host_info.versions()
    if world.comm is not None:
        software["MPI"] = mpi.library().title
        software["MPI thread level"] = _THREADS[mpi.api().Query_thread()]
        software["fault tolerance"] = "on (ULFM)" if mpi.tolerates_failures() else "off"
        software["shared memory"] = _shared_memory(Settings.from_environ(os.environ))
    else:
        software["MPI"] = "not in use"
    if world.device.type != "cpu":
        software |= vendors.vendor().versions()
        if library := plan.vendor_part(world.backend):
            software["GPU tensors"] = library.upper()
        elif world.comm is not None:
            software["GPU tensors"] = _gpu_transport()
    software["backend"] = world.backend or "none"
    return software | _variables_of_torch("OMP_NUM_THREADS", _THP)


def _gpu_transport() -> str:
    """Return how MPI transfers GPU tensors."""
    is_claimed = probe.is_claimed(mpi.environ_at_init())
    return f"{vendors.vendor().name}-aware MPI" if is_claimed else "staged through host memory"


def _shared_memory(settings: Settings) -> str:
    """Return what computes in the shared memory of a node."""
    if not settings.shared_memory:
        return "not in use (MPICOMM_SHARED_MEMORY=0)"
    if not settings.native:
        return "not in use (MPICOMM_NATIVE=0)"
    return "not in use (the C library was not built)" if c_library.load() is None else "C library"


def _variables_of_torch(*names: str) -> dict[str, str]:
    return {name: os.environ.get(name, "not set") for name in names}
