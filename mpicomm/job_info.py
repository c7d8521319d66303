"""What the ranks of a job have: their places, devices and cores, the software they load, what launchers told them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from mpicomm import mpi
from mpicomm.backend import gpu_probe
from mpicomm.collective_ops import collectives
from mpicomm.launch import detect
from mpicomm.launch.detect import Launcher
from mpicomm.runtime import World
from mpicomm.startup import devices
from mpicomm.watchdog import hang_report

_NODES = Path("/sys/devices/system/node")
_PACKAGES = ("mpicomm", "torch", "mpi4py", "numpy")
_VARIABLES = ("OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE")  # the second gives torch's large tensors huge pages
_THREADS = ("single", "funneled", "serialized", "multiple")


@dataclasses.dataclass(frozen=True)
class JobInfo:
    """What one rank has."""

    rank: int
    host: str
    node_rank: int
    local_rank: int
    device: str
    device_name: str
    """What the maker calls a GPU; empty without one."""

    uuid: str
    """The GPU's UUID, the same on all ranks that see it; empty without one."""

    cpus: str
    """The processors on which the rank may run: 0-3, 8."""

    numa_nodes: str
    """The NUMA nodes that have them; empty where the system tells none."""

    software: dict[str, str]
    """What is loaded, by name."""

    environment: dict[str, str]
    """The variables by which launchers say who is who, PyTorch's among them."""


def of_all(world: World) -> list[JobInfo]:
    """Return what every rank has, by rank (collective)."""
    return collectives.all_gather_object(of_this_rank(world))


def of_this_rank(world: World) -> JobInfo:
    """Return what this rank has."""
    cpus = os.sched_getaffinity(0)
    is_gpu = world.device.type == "cuda"
    return JobInfo(
        rank=world.rank,
        host=world.hostname,
        node_rank=world.node_rank,
        local_rank=world.local_rank,
        device=str(world.device),
        device_name=torch.cuda.get_device_name(world.device) if is_gpu else "",
        uuid=devices.visible_gpus()[world.device.index] if is_gpu else "",
        cpus=hang_report.ranges(cpus),
        numa_nodes=hang_report.ranges(numa_nodes(cpus, _NODES)),
        software=_software(world),
        environment=_variables(os.environ),
    )


def numa_nodes(cpus: Iterable[int], directory: Path) -> list[int]:
    """Return the NUMA nodes that have some of the processors.

    Args:
        directory: Where Linux describes the nodes.
    """
    wanted = set(cpus)
    found = []
    for path in directory.glob("node[0-9]*/cpulist"):
        here = hang_report.parse_ranges(path.read_text().strip().replace(",", ", "))
        if wanted.intersection(here):
            found.append(int(path.parent.name.removeprefix("node")))
    return sorted(found)


def differences(everybodys: Iterable[JobInfo]) -> dict[str, dict[str, list[int]]]:
    """Return by name what is loaded, and for each that there is which ranks have it."""
    found: dict[str, dict[str, list[int]]] = {}
    for each in everybodys:
        for name, value in each.software.items():
            found.setdefault(name, {}).setdefault(value, []).append(each.rank)
    return found


def tables_of_variables(environment: Mapping[str, str]) -> list[Launcher]:
    """Return the launchers whose variables are worth a column: PyTorch's names, Slurm's, and those that are set."""
    others = [each for each in detect.MPI_LAUNCHERS if each.rank in environment]
    return [detect.TORCHRUN, detect.SLURM, *others]


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    known = (detect.TORCHRUN, detect.SLURM, *detect.MPI_LAUNCHERS)
    fields = [field.name for field in dataclasses.fields(Launcher) if field.name != "title"]
    names = {getattr(each, field) for each in known for field in fields}
    return {name: environ[name] for name in sorted(filter(None, names)) if name in environ}


def _software(world: World) -> dict[str, str]:
    found = {"Python": platform.python_version()}
    found |= {name: _version(name) for name in _PACKAGES}
    if world.comm is not None:
        found["MPI"] = mpi.library().title
        found["MPI's threads"] = _THREADS[mpi.api().Query_thread()]
    else:
        found["MPI"] = "not in use"
    if world.device.type == "cuda":
        found["CUDA"] = torch.version.cuda or torch.version.hip or "?"
        if torch.distributed.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        if world.comm is not None:
            found["MPI and GPUs' memory"] = "it says that it can" if gpu_probe.is_claimed(os.environ) else "by copies"
    found["back end"] = world.backend or "none"
    return found | {name: os.environ.get(name, "not set") for name in _VARIABLES}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return "not installed"
