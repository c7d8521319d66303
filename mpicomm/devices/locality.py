"""The cores of this host and their distance from its GPUs, from the kernel's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mpicomm import host_info
from mpicomm.devices import counting
from mpicomm.launch.binding import Processors


def processors(environ: Mapping[str, str], cpus: Iterable[int], root: Path = Path("/")) -> Processors:
    """Return the cores, NUMA nodes and GPUs that a process may use.

    Args:
        environ: The environment of the process, whose variables restrict its GPUs.
        cpus: The affinity of the process, which is within the CPUs of its control group (sched_setaffinity(2)).
        root: The root of the file tree.
    """
    accelerators = counting.count(environ, root)
    nodes = host_info.cpus_by_numa_node(root)
    node_of = {cpu: node for node, members in nodes.items() for cpu in members}
    # In the order of the NUMA nodes: some hosts number the CPUs of two sockets alternately.
    cores = sorted(host_info.cpus_by_core(cpus, root), key=lambda core: (node_of.get(core[0], 0), core))
    return Processors(
        cores=tuple(cores),
        numa_nodes=tuple(tuple(members) for members in nodes.values()),
        gpus=tuple(_near(directory) for directory in accelerators.directories),
        visible=accelerators.visible,
    )


def numa_node(environ: Mapping[str, str], index: int, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a GPU; None if the kernel does not know it.

    Args:
        environ: The environment of a process.
        index: The index of the GPU among those that the process sees.
    """
    accelerators = counting.count(environ, root)
    position = accelerators.visible[index] if index < len(accelerators.visible) else None
    directory = None if position is None else accelerators.directories[position]
    text = "" if directory is None else host_info.read(directory / "numa_node")
    return int(text) if text.isdigit() else None  # -1 in many virtual machines


def _near(directory: Path | None) -> tuple[int, ...]:
    return () if directory is None else tuple(host_info.cpu_list(host_info.read(directory / "local_cpulist")))
