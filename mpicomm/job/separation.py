"""How the container of this rank is separated from the launcher, which it has in common with the ranks of its node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpicomm import host_info, terminal
from mpicomm.launch import containers
from mpicomm.launch.containers import Separation
from mpicomm.launch.known_launchers import starts_ranks

_FIRST_PIDS = "pid:[4026531836]"  # the PID namespace of the host, PROC_PID_INIT_INO in linux/proc_ns.h
_ALL_USERS = ["0", "0", "4294967295"]  # the map of the host's user namespace, user_namespaces(7)
_SHM = re.compile(r"^\S+ \S+ (\S+) \S+ /dev/shm ", re.MULTILINE)  # the device of the mount, proc_pid_mountinfo(5)
_STEP_DAEMON = "slurmstepd"


def of_this_process(environ: Mapping[str, str]) -> Separation:
    """Return the separation; that of no container outside one."""
    container = containers.running_in(environ)
    if not container:
        return Separation()
    process, launcher = _launcher(terminal.processes_above())
    return Separation(
        container,
        launcher if starts_ranks(launcher) else "",  # a batch script has the step daemon above it, too
        has_own_users=Path("/proc/self/uid_map").read_text().split() != _ALL_USERS,
        has_own_pids=not launcher and str(Path("/proc/self/ns/pid").readlink()) != _FIRST_PIDS,
        has_own_shm=_shm(process) not in ("", _shm("self")),
    )


def _launcher(ancestors: Sequence[tuple[int, str]]) -> tuple[int | str, str]:
    """Return a process outside the container, and the name of the launcher; `self` and empty if neither is visible."""
    for index, (pid, name) in enumerate(ancestors):
        if starts_ranks(name):
            return pid, name
        if _STEP_DAEMON in name:
            # With job_container/tmpfs, only its child is in the mount namespace of the job: job_container.conf(5).
            return (ancestors[index - 1][0] if index else "self"), name
    return "self", ""


def _shm(process: int | str) -> str:
    """Return the device of the last mount on /dev/shm that a process sees; empty if it is unknown."""
    mounts = host_info.read(f"/proc/{process}/mountinfo")
    return (_SHM.findall(mounts) or [""])[-1]
