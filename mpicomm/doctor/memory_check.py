"""Checks of memory that processes share: cross-memory attach (CMA), /dev/shm, and huge pages.

By CMA, MPI copies large messages between the memory of two processes. Run as a program, this module reads a word in the
memory of its parent, and exits with the error number: the kernel permits that between processes like ranks, of which
none is an ancestor of the other, only if it permits CMA at all.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mpicomm import host_info, terminal
from mpicomm.doctor.findings import Finding, ok, problem, warning

_SHM = Path("/dev/shm")
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_LEAST_SHM, _ENOUGH_SHM = 2**24, 2**30  # bytes: MPI fails with less than the first; Docker's default is 2**26
_CHILD_SECONDS = 30.0
_TOKEN = b"mpicomm doctor"


@dataclasses.dataclass(frozen=True)
class MemoryFacts:
    """The properties of memory of this host."""

    cma_error: int
    """The error number of a process that reads the memory of another one; 0 if the kernel permits it."""

    ptrace_scope: str
    """The setting kernel.yama.ptrace_scope; empty if the kernel does not have it."""

    shm_total: int
    """The size of /dev/shm in bytes; 0 if it is missing or cannot be written."""

    shm_free: int
    huge_pages: str
    """When the kernel uses transparent huge pages: always, madvise, never or unknown."""


def collect(_environ: Mapping[str, str]) -> MemoryFacts:
    """Return the facts about this host; starts a child process, which reads memory of this one."""
    total = free = 0
    if _SHM.is_dir() and os.access(_SHM, os.W_OK):
        total, _, free = shutil.disk_usage(_SHM)
    return MemoryFacts(_cma_error(), host_info.read(_PTRACE_SCOPE), total, free, host_info.huge_pages())


def check(facts: MemoryFacts) -> list[Finding]:
    """Return the findings about memory."""
    return [_check_cma(facts), _check_shm(facts), _check_huge_pages(facts)]


def _cma_error() -> int:
    token = ctypes.create_string_buffer(_TOKEN)
    arguments = [str(os.getpid()), str(ctypes.addressof(token)), str(len(_TOKEN))]
    command = [sys.executable, "-m", "mpicomm.doctor.memory_check", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_CHILD_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return errno.ECHILD
    return done.returncode


def _check_cma(facts: MemoryFacts) -> Finding:
    if facts.cma_error == 0:
        return ok("CMA", "processes may copy from each other's memory (process_vm_readv)")
    if facts.ptrace_scope not in ("", "0"):
        why, remedy = f"kernel.yama.ptrace_scope={facts.ptrace_scope}", "sysctl -w kernel.yama.ptrace_scope=0 (as root)"
    else:
        why = os.strerror(facts.cma_error)
        remedy = (
            "In a container, permit process_vm_readv: `docker run --cap-add=SYS_PTRACE`; in Kubernetes, "
            "securityContext: {capabilities: {add: [SYS_PTRACE]}}"
        )
    message = f"processes may not copy from each other's memory ({why}): MPI copies large messages in a node twice"
    return warning("CMA", message, remedy)


def _check_shm(facts: MemoryFacts) -> Finding:
    remedy = (
        "Remove leftover files of ended jobs there, or enlarge it: `mount -o remount,size=8G /dev/shm`, `docker run "
        "--shm-size=8g`; in Kubernetes, mount an emptyDir with `medium: Memory`."
    )
    if not facts.shm_total:
        return problem("/dev/shm", "it is missing or cannot be written: MPI and DataLoader workers need it", remedy)
    shown = f"{terminal.format_size(facts.shm_free)} of {terminal.format_size(facts.shm_total)} free"
    if facts.shm_free < _LEAST_SHM:
        return problem("/dev/shm", f"{shown}: too little for MPI, whose processes fail or die by SIGBUS", remedy)
    if facts.shm_free < _ENOUGH_SHM:
        return warning("/dev/shm", f"{shown}: DataLoader workers die by SIGBUS if their batches do not fit", remedy)
    return ok("/dev/shm", shown)


def _check_huge_pages(facts: MemoryFacts) -> Finding:
    if facts.huge_pages == "never":
        return warning(
            "huge pages",
            "transparent huge pages are off: large messages and tensors are slower",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)",
        )
    note = {"madvise": " (torch requests them with THP_MEM_ALLOC_ENABLE=1, which `mpicomm run` sets)"}
    return ok("huge pages", f"transparent huge pages: {facts.huge_pages}{note.get(facts.huge_pages, '')}")


# -- the memory of another process -------------------------------------------------------------------------------------


class _Vector(ctypes.Structure):  # struct iovec of C
    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_error(pid: int, address: int, length: int) -> int:
    """Return the error number of reading another process's memory; 0 if it can be read."""
    output = ctypes.create_string_buffer(length)
    local, remote = _Vector(ctypes.addressof(output), length), _Vector(address, length)
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    vectors = (ctypes.POINTER(_Vector), ctypes.c_ulong)
    read.argtypes, read.restype = (ctypes.c_int, *vectors, *vectors, ctypes.c_ulong), ctypes.c_ssize_t
    done = read(pid, local, 1, remote, 1, 0)
    return 0 if done == length else ctypes.get_errno()


if __name__ == "__main__":
    sys.exit(read_error(*map(int, sys.argv[1:])))
