"""Checks of the processors: OpenMP threads, binding and the CPU limit of a container."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping

from mpicomm import host_info
from mpicomm.doctor.findings import Finding, ok, problem, warning
from mpicomm.errors import LaunchError
from mpicomm.launch import detect
from mpicomm.recorder import rank_text

OMP = "OMP_NUM_THREADS"
_GOMP = "GOMP_CPU_AFFINITY"
_OPENMP = ("OMP_PROC_BIND", "OMP_PLACES", _GOMP, "KMP_AFFINITY")
"""With the first three, GNU's OpenMP, which torch's wheels contain, binds the main thread when it is loaded."""


@dataclasses.dataclass(frozen=True)
class ProcessorFacts:
    """The processors that this process may use."""

    cpus: tuple[int, ...]
    """The CPUs to which it is bound; all without a binding."""

    cores: int
    """The cores of these CPUs: hardware threads of one core count once."""

    cpus_of_host: int
    quota: int | None
    """The CPU limit of the container, rounded up; None without one."""

    omp: str | None
    """OMP_NUM_THREADS; None if it is not set."""

    local_size: int
    """The number of ranks on this host."""

    core_numbers: tuple[int, ...] = ()
    """The first CPU of each of the cores; empty if they are not known."""

    job_cores: int = 0
    """The cores of the CPUs that the control group permits, such as those of a job; 0 if they are not known."""

    cpus_before_torch: tuple[int, ...] = ()
    """The CPUs to which this process was bound before it imported torch."""

    openmp: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The variables that bind OpenMP's threads."""

    @property
    def is_narrowed(self) -> bool:
        """Whether the import of torch has narrowed the affinity."""
        return len(self.cpus) < len(self.cpus_before_torch)

    @property
    def share(self) -> int:
        """The number of the job's cores on this host for each rank; 0 if it is not known."""
        return self.job_cores // max(1, self.local_size)

    @property
    def usable(self) -> int:
        """The number of cores that this process can use at a time."""
        return min(self.cores, self.quota or self.cores)

    @property
    def threads(self) -> int | None:
        """The number of threads that OMP_NUM_THREADS requests; None if it is not set or invalid."""
        first = (self.omp or "").split(",")[0].strip()  # "4,2": the second is for nested parallel regions
        return int(first) if first.isdecimal() and int(first) else None


def collect(environ: Mapping[str, str]) -> ProcessorFacts:
    """Return the facts about this process; imports torch."""
    cpus_before_torch = os.sched_getaffinity(0)
    with contextlib.suppress(Exception):  # software_check reports it
        import torch  # noqa: F401
    local_size = 1
    with contextlib.suppress(LaunchError):  # launcher_check reports it
        local_size = detect.detect(environ).local_size
    cpus = os.sched_getaffinity(0)
    return ProcessorFacts(
        tuple(sorted(cpus)),
        host_info.cores(cpus),
        os.cpu_count() or len(cpus),
        host_info.cpu_quota(),
        environ.get(OMP),
        local_size,
        core_numbers=tuple(core[0] for core in host_info.cpus_by_core(cpus)),
        job_cores=host_info.cores(host_info.cgroup_cpus() or range(os.cpu_count() or len(cpus))),
        cpus_before_torch=tuple(sorted(cpus_before_torch)),
        openmp={name: environ[name] for name in _OPENMP if environ.get(name)},
    )


def check(facts: ProcessorFacts) -> list[Finding]:
    """Return the findings about the processors."""
    return [_check_threads(facts), *_check_affinity(facts), *_check_quota(facts)]


def _check_threads(facts: ProcessorFacts) -> Finding:
    cores = f"{facts.usable} core{'s' if facts.usable > 1 else ''}"
    share = max(1, facts.usable // max(1, facts.local_size))
    if facts.omp and facts.threads is None:
        remedy = f"Set it to the number of threads of a rank: export {OMP}={share}"
        return problem("threads", f"{OMP}={facts.omp} is not a positive number", remedy)
    if facts.threads is not None and facts.threads > facts.usable:
        remedy = (
            f"Unset it, and start with `mpicomm run`, which divides the cores among ranks; or: export {OMP}={share}"
        )
        if facts.cores == 1 < facts.share:
            remedy = f"{_more_cores(facts)}; or: export {OMP}=1"
        return problem(
            "threads",
            f"{OMP}={facts.threads}, but this process may use {cores}: each rank starts {facts.threads} threads, which "
            f"wait for each other",
            remedy,
        )
    if facts.threads is None and facts.local_size > 1 and facts.usable > 1:
        return warning(
            "threads",
            f"{OMP} is not set: each of the {facts.local_size} ranks on this host starts a thread for each of {cores}",
            f"Start with `mpicomm run`, which divides the cores among the ranks; or: export {OMP}={share}",
        )
    threads = "not set (`mpicomm run` sets it)" if facts.threads is None else str(facts.threads)
    return ok("threads", f"{OMP} is {threads}; this process may use {cores}, CPUs {rank_text.ranges(facts.cpus)} "
              f"of {facts.cpus_of_host}")  # fmt: skip


def _check_affinity(facts: ProcessorFacts) -> list[Finding]:
    settings = " ".join(f"{name}={value}" for name, value in facts.openmp.items())
    lists = [name for name, value in facts.openmp.items() if name == _GOMP or "proclist" in value]
    if facts.is_narrowed:
        cause, remedy = "", "Restore it after the import: os.sched_setaffinity(0, cpus)"
        if settings:
            cause = f", by {settings}"
            remedy = f"unset {' '.join(facts.openmp)}\nTo bind the ranks, and not the threads: mpicomm run --bind auto"
        message = (
            f"`import torch` has narrowed the affinity of this process from CPUs "
            f"{rank_text.ranges(facts.cpus_before_torch)} to {rank_text.ranges(facts.cpus)}{cause}: DataLoader workers "
            f"and all threads except OpenMP's share these"
        )
        return [problem("affinity", message, remedy)]
    if lists and facts.local_size > 1:
        message = f"{settings} binds the threads of all {facts.local_size} ranks on this host to the same CPUs"
        return [warning("affinity", message, f"unset {' '.join(lists)}\nTo bind the ranks: mpicomm run --bind auto")]
    if facts.cores == 1 < facts.share and facts.threads is None:
        message = (
            f"this process is bound to one core, but its job may use {facts.share} for each rank on this host: all "
            f"of its threads, and DataLoader workers, share the core"
        )
        return [warning("affinity", message, f"{_more_cores(facts)}.")]
    return []


def _more_cores(facts: ProcessorFacts) -> str:
    return (
        f"Give each rank more cores: `mpicomm run --bind auto`, `srun --cpus-per-task={facts.share}`, "
        f"`mpirun --map-by ppr:{facts.local_size}:node:PE={facts.share}`"
    )


def _check_quota(facts: ProcessorFacts) -> list[Finding]:
    if facts.quota is None or facts.quota >= len(facts.cpus):
        return []
    return [
        warning(
            "CPU limit",
            f"the container may use {facts.quota} CPUs at a time (cpu.max), but {len(facts.cpus)} are visible: "
            f"programs that count them start too many threads, which the kernel suspends",
            f"Set {OMP}, and the number of DataLoader workers, for {facts.quota} CPUs (`mpicomm run` sets {OMP}), or "
            f"raise the limit: `docker run --cpus`, resources.limits.cpu in Kubernetes.",
        )
    ]
