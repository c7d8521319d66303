"""Checks of the limits of a process: open files, and locked memory for RDMA networks."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Mapping
from pathlib import Path

from mpicomm import open_files
from mpicomm.doctor.findings import Finding, ok, problem, warning

_RDMA = Path("/sys/class/infiniband")
_USUAL_FILES = 1024  # the default soft limit of Linux, which programs expect
_ENOUGH_LOCKED = 2**30  # bytes


@dataclasses.dataclass(frozen=True)
class LimitFacts:
    """The limits of this process."""

    open_now: int
    """The number of open files."""

    soft_files: int
    """The soft limit of open files; -1 (RLIM_INFINITY) without a limit."""

    hard_files: int
    """The hard limit, up to which a process may raise its soft limit."""

    locked: int
    """The soft limit of locked memory in bytes."""

    rdma_devices: tuple[str, ...] = ()
    """The RDMA network devices (InfiniBand, RoCE)."""


def collect(_environ: Mapping[str, str]) -> LimitFacts:
    """Return the facts about this process."""
    devices = sorted(path.name for path in _RDMA.iterdir()) if _RDMA.is_dir() else []
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return LimitFacts(
        open_files.count_open(), *resource.getrlimit(resource.RLIMIT_NOFILE), locked, rdma_devices=tuple(devices)
    )


def check(facts: LimitFacts) -> list[Finding]:
    """Return the findings about the limits."""
    results = [_check_files(facts)]
    is_limited = facts.locked != resource.RLIM_INFINITY and facts.locked < _ENOUGH_LOCKED
    if facts.rdma_devices and is_limited:
        message = (
            f"a process may lock {facts.locked // 1024} KiB of memory: too little for the RDMA network "
            f"({', '.join(facts.rdma_devices)}), so that MPI fails or uses TCP"
        )
        remedy = "Set it to unlimited: memlock in /etc/security/limits.conf, LimitMEMLOCK of the scheduler's daemon."
        results.append(problem("locked memory", message, remedy))
    return results


def _check_files(facts: LimitFacts) -> Finding:
    hard = facts.hard_files
    if hard == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    fit = open_files.ranks_on_one_node(hard - facts.open_now)
    shown = f"{facts.soft_files}, which mpicomm raises up to the hard limit, {hard}"
    if hard < _USUAL_FILES:
        return problem(
            "open files",
            f"a process may open {hard} files (hard limit): at most {fit} ranks fit on a node, and DataLoader "
            f"workers may fail with `Too many open files`",
            "Raise the hard limit (`ulimit -Hn` shows it): nofile in /etc/security/limits.conf, LimitNOFILE of the "
            "daemon that starts the ranks, `docker run --ulimit nofile=65536`.",
        )
    if hard == _USUAL_FILES:
        return warning(
            "open files",
            f"a process may open {hard} files (hard limit): at most {fit} ranks fit on a node",
            "For larger jobs, raise the hard limit: nofile in /etc/security/limits.conf.",
        )
    return ok("open files", shown)
