"""The CPU time of other processes during a measurement: whether the ranks of a host competed with them for CPUs."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mpicomm import agreement, host_info
from mpicomm.bench.timing import Bench
from mpicomm.job.session import World

_IDLE_CPUS = 0.2  # CPUs that the launcher, the kernel's interrupts and the services of an idle host may use
_BUSY_FIELDS = (0, 1, 2, 5, 6)  # user, nice, system, irq and softirq in a line of /proc/stat, see proc(5)
_LINE_OF_CPU = re.compile(r"^cpu(\d+) (.*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class HostUse:
    """The use of the CPUs of a host on which the ranks may run, during a measurement."""

    host: str
    ranks: int
    cpus: int
    others: float | None
    """The CPUs that processes other than the ranks used, on average; None if the kernel does not report it."""

    @property
    def warning(self) -> str | None:
        """The warning that the results are those of a busy host; None if the ranks had their CPUs to themselves."""
        cpus = f"{self.cpus} CPU" if self.cpus == 1 else f"{self.cpus} CPUs"
        if self.ranks > self.cpus:
            return (
                f"{self.ranks} ranks share the {cpus} of {self.host} and wait for each other: the results are those "
                f"of an oversubscribed host.\nStart at most {self.cpus} per host."
            )
        if self.others is None or self.others <= self.cpus - self.ranks + _IDLE_CPUS:
            return None
        return (
            f"{self.host} is busy: during the measurement, other processes used {self.others:.1f} of the {cpus} "
            f"of the ranks, and {self.ranks} {'rank needs one' if self.ranks == 1 else 'ranks need one each'}. The "
            f"results are worse than those of an idle host, and differ between runs.\nMeasure again when the other "
            f"processes have ended, or with fewer ranks."
        )


@dataclasses.dataclass(frozen=True)
class ProcessorTimes:
    """Seconds of one moment."""

    moment: float
    busy: Mapping[int, float]
    """CPU time that all processes have used on each CPU of the host; empty if the kernel does not report it."""
    own: float
    """CPU time that this process has used."""


def times_now() -> ProcessorTimes:
    """Return the CPU times of this moment."""
    busy = {}
    for cpu, line in _LINE_OF_CPU.findall(host_info.read("/proc/stat")):
        if len(fields := line.split()) > max(_BUSY_FIELDS):
            busy[int(cpu)] = sum(int(fields[index]) for index in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")
    return ProcessorTimes(time.monotonic(), busy, time.process_time())


def since(start: ProcessorTimes, bench: Bench, world: World) -> list[HostUse]:
    """Return the use of the CPUs of each node since a sample of each rank, on every rank (collective)."""
    gathered: list[Any] = bench.gather((start, times_now(), os.sched_getaffinity(0)))
    uses = []
    for ranks in agreement.ranks_by_value(world.nodes, range(len(world.nodes))).values():
        cpus: set[int] = set().union(*[gathered[rank][2] for rank in ranks])
        others = _others([gathered[rank][:2] for rank in ranks], cpus)
        uses.append(HostUse(world.hosts[ranks[0]], len(ranks), len(cpus), others))
    return uses


def _others(samples: Sequence[tuple[ProcessorTimes, ProcessorTimes]], cpus: Collection[int]) -> float | None:
    """Return how many of the CPUs other processes used, from the first and last samples of all ranks of a node."""
    start, end = samples[0]
    if end.moment <= start.moment or not (start.busy.keys() & end.busy.keys()).issuperset(cpus):
        return None
    busy = sum(end.busy[cpu] - start.busy[cpu] for cpu in cpus)
    own = sum(last.own - first.own for first, last in samples)
    return max(0.0, (busy - own) / (end.moment - start.moment))
