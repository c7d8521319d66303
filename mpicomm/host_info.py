"""Properties of this host that need neither torch nor MPI: processors, processes, versions of packages."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PACKAGES = ("mpicomm", "torch", "mpi4py", "numpy")
NOT_INSTALLED = "not installed"
_CLOSE_ON_EXEC = 1  # MFD_CLOEXEC, see linux/memfd.h


def memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory, which other programs do not inherit.

    Pythons that were built with a glibc before 2.27, such as those of conda-forge, have no `os.memfd_create`.

    Raises:
        OSError: If the kernel refuses it.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    libc = ctypes.CDLL(None, use_errno=True)
    if (descriptor := libc.memfd_create(name.encode(), _CLOSE_ON_EXEC)) < 0:
        raise OSError(ctypes.get_errno(), f"memfd_create: {os.strerror(ctypes.get_errno())}")
    return descriptor


def cores(cpus: Iterable[int]) -> int:
    """Return the number of cores of these CPUs: hardware threads of one core count once."""
    return len(cpus_by_core(cpus))


def cpus_by_core(cpus: Iterable[int], root: Path = Path("/")) -> list[tuple[int, ...]]:
    """Return the CPUs of each core, the hardware threads of one core together.

    Args:
        cpus: The CPUs to return, such as those that a process may use.
        root: The root of the file tree.
    """
    threads: dict[int, list[int]] = {}
    for cpu in sorted(cpus):
        siblings = cpu_list(read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        threads.setdefault(min(siblings, default=cpu), []).append(cpu)
    return [tuple(members) for members in threads.values()]


def cpus_by_numa_node(root: Path = Path("/")) -> dict[int, list[int]]:
    """Return the CPUs of each NUMA node; a node of memory alone has none."""
    directories = (root / "sys/devices/system/node").glob("node[0-9]*")
    numbers = sorted(int(directory.name.removeprefix("node")) for directory in directories)
    return {number: cpu_list(read(root / f"sys/devices/system/node/node{number}/cpulist")) for number in numbers}


def cpu_list(text: str) -> list[int]:
    """Return the CPUs in a list of the kernel, such as `0-3,8`."""
    ranges = [part.partition("-") for part in text.split(",") if part.strip()]
    return [cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)]


def cgroup_cpus(root: Path = Path("/")) -> list[int]:
    """Return the CPUs that this process's control group may use, such as those of a job; empty if not known.

    An affinity can be changed only within these.
    """
    mounts, files = root / "sys/fs/cgroup", {"": "cpuset.cpus.effective", "cpuset": "cpuset.effective_cpus"}
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)  # see cgroups(7); version 2 names no controllers
        if controllers not in files:
            continue
        for group in (Path(path), *Path(path).parents):  # not all groups have the controller of CPUs
            if text := read(mounts / controllers / group.relative_to("/") / files[controllers]):
                return cpu_list(text)
    return []


def megabits_of_interface(name: str, root: Path = Path("/")) -> int:
    """Return the speed of a network interface in Mbit/s; 0 if unknown.

    The kernel has -1 or an error for an unknown one. It invents 10000 for tun, tap and veth, and for bridges of these;
    so only devices and bonds of devices count, and VLANs and bridges by the interfaces below them.

    Args:
        name: The name of the interface.
        root: The root of the file tree.
    """
    directory = root / "sys/class/net" / name
    if (directory / "device").exists() or (directory / "bonding").exists():
        text = read(directory / "speed")
        return int(text) if text.isdigit() else 0
    lower = (path.name.removeprefix("lower_") for path in directory.glob("lower_*"))
    return max((megabits_of_interface(other, root) for other in lower), default=0)


def cpu_quota() -> int | None:
    """Return the CPU limit of the container, in CPUs, rounded up; None without a limit."""
    quota, _, period = read("/sys/fs/cgroup/cpu.max").partition(" ")
    return max(1, -(-int(quota) // int(period))) if quota.isdigit() and period.isdigit() else None


def processor() -> str:
    """Return the model of the processor."""
    lines = read("/proc/cpuinfo").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def huge_pages() -> str:
    """Return when the kernel uses transparent huge pages: always, madvise or never; `unknown` without the setting."""
    return selected(_HUGE_PAGES)


def selected(path: Path) -> str:
    """Return the selected value, in brackets in the kernel's file, or `unknown`."""
    return read(path).partition("[")[2].partition("]")[0] or "unknown"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages."""
    return {"Python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}}


def version_of(package: str) -> str:
    """Return the version of an installed package, or `NOT_INSTALLED`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return NOT_INSTALLED


def is_older(version: str, other: str) -> bool:
    """Return whether a version is older than another one, by their first three numbers."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3]]

    return numbers(version) < numbers(other)


def process_stat(directory: Path) -> tuple[str, list[str]]:
    """Return the name of a process or thread, and the fields of its stat after the name, the state first, see proc(5).

    Args:
        directory: Its directory, such as `/proc/<pid>`.

    Raises:
        OSError: If it has ended.
    """
    # The name is in parentheses, and may contain some, and spaces.
    name, _, fields = (directory / "stat").read_text().partition("(")[2].rpartition(")")
    return name, fields.split()


def read(path: str | Path) -> str:
    """Return the text of a file of the kernel; empty if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
