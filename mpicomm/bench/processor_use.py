"""The CPU time of other processes during a measurement: whether the ranks competed with them for the CPUs of a host."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

from mpicomm import host_info
from mpicomm.bench.timing import Bench
from mpicomm.job.session import World

_IDLE_CPUS = 0.2  # CPUs that the launcher, the kernel's interrupts and the services of an idle host may use
_BUSY_FIELDS = (0, 1, 2, 5, 6)  # user, nice, system, irq and softirq in the first line of /proc/stat, see proc(5)


@dataclasses.dataclass(frozen=True)
class HostUse:
    """The use of the CPUs of a host during a measurement."""

    host: str
    ranks: int
    cpus: int
    others: float | None
    """The CPUs that processes other than the ranks used, on average; None if the kernel does not report it."""

    @property
    def warning(self) -> str | None:
        """The warning that the results are those of a busy host; None if the ranks had their CPUs to themselves."""
        if self.ranks > self.cpus:
            return (
                f"{self.ranks} ranks share the {self.cpus} CPUs of {self.host} and wait for each other: the results "
                f"are those of an oversubscribed host.\nStart at most {self.cpus} ranks per host."
            )
        if self.others is None or self.others <= self.cpus - self.ranks + _IDLE_CPUS:
            return None
        return (
            f"{self.host} is busy: during the measurement, other processes used {self.others:.1f} of its {self.cpus} "
            f"CPUs, and {self.ranks} {'rank needs one' if self.ranks == 1 else 'ranks need one each'}. The results "
            f"are worse than those of an idle host, and differ between runs.\nMeasure again when the other processes "
            f"have ended, or with fewer ranks."
        )


@dataclasses.dataclass(frozen=True)
class ProcessorTimes:
    """Seconds of one moment."""

    moment: float
    busy: float | None
    """CPU time that all processes of the host have used; None if the kernel does not report it."""
    own: float
    """CPU time that this process has used."""


def times_now() -> ProcessorTimes:
    """Return the CPU times of this moment."""
    fields = host_info.read("/proc/stat").partition("\n")[0].split()[1:]
    busy = None
    if len(fields) > max(_BUSY_FIELDS):
        busy = sum(int(fields[index]) for index in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")
    return ProcessorTimes(time.monotonic(), busy, time.process_time())


def since(start: ProcessorTimes, bench: Bench, world: World) -> list[HostUse]:
    """Return the use of the CPUs of each node since a sample of each rank, on every rank (collective)."""
    gathered: list[Any] = bench.gather((start, times_now(), os.cpu_count() or 1))
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(world.nodes):
        by_node.setdefault(node, []).append(rank)
    return [
        HostUse(world.hosts[ranks[0]], len(ranks), gathered[ranks[0]][2], _others([gathered[r][:2] for r in ranks]))
        for ranks in by_node.values()
    ]


def _others(samples: Sequence[tuple[ProcessorTimes, ProcessorTimes]]) -> float | None:
    """Return the CPUs that other processes used, from the first and last samples of all ranks of a node."""
    start, end = samples[0]
    if start.busy is None or end.busy is None or end.moment <= start.moment:
        return None
    own = sum(last.own - first.own for first, last in samples)
    return max(0.0, (end.busy - start.busy - own) / (end.moment - start.moment))
