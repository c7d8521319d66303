"""The hosts of a job: `--hosts`, host files, and the allocations of Slurm and PBS in their variables."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from mpicomm.errors import LaunchError

PBS_HOSTS = "PBS_NODEFILE"
"""The file of host names, one line per process, which is all that PBS provides: mpirun sets the rank variables."""

_HOST = re.compile(r"(?P<name>[^\s,:]+)(:(?P<slots>[1-9]\d*))?")
_LINE = re.compile(r"(?P<name>[^\s:]+)(:(?P<hydra>[1-9]\d*))?(?P<rest>(\s+\S+)*)")
_SLOTS = re.compile(r"\bslots\s*=\s*([1-9]\d*)\b")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # "4(x2)": the value 4 for each of two nodes


@dataclasses.dataclass(frozen=True)
class Host:
    """A host and its number of ranks (slots); None if not specified."""

    name: str
    slots: int | None = None

    def __str__(self) -> str:
        return self.name if self.slots is None else f"{self.name}:{self.slots}"


@dataclasses.dataclass(frozen=True)
class SlurmAllocation:
    """A Slurm allocation."""

    nodes: int
    ranks: int
    cpus: tuple[int, ...] = ()
    """Number of CPUs on each node; empty if Slurm does not report it."""
    cpus_per_task: int | None = None
    """The user's --cpus-per-task; None if not set."""
    has_gpus: bool = dataclasses.field(default=False, compare=False, repr=False)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> SlurmAllocation | None:
        """Return the allocation, None outside one.

        If the job has no number of tasks, the default is one rank per GPU.
        """
        if not environ.get("SLURM_JOB_ID"):
            return None
        nodes = _number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
        per_node = _number(environ, "SLURM_NTASKS_PER_NODE")
        gpus_per_node = _number(environ, "SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE")
        gpus = _number(environ, "SLURM_GPUS") or nodes * (gpus_per_node or 0)
        return cls(
            nodes=nodes,
            ranks=_number(environ, "SLURM_NTASKS", "SLURM_NPROCS")
            or (per_node and nodes * per_node)
            or gpus
            or sum(_repeated(environ.get("SLURM_TASKS_PER_NODE", "")))
            or nodes,
            cpus=_repeated(environ.get("SLURM_JOB_CPUS_PER_NODE", "")),
            cpus_per_task=_number(environ, "SLURM_CPUS_PER_TASK"),
            has_gpus=bool(gpus or environ.get("SLURM_JOB_GPUS")),
        )


@dataclasses.dataclass(frozen=True)
class PBSAllocation:
    """A PBS allocation."""

    file: str
    hosts: tuple[Host, ...]
    cpus: int
    """NCPUS: CPUs of the first chunk, or the number of threads that each of its ranks should use; 0 if not set."""
    has_gpus = False
    """PBS does not report them."""

    @staticmethod
    def is_set(environ: Mapping[str, str]) -> bool:
        """Return whether this process runs in a PBS job, by the variables that MPI libraries check too."""
        return all(environ.get(name) for name in ("PBS_JOBID", "PBS_ENVIRONMENT", PBS_HOSTS))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], text: str) -> PBSAllocation:
        """Return the allocation of a PBS job.

        Args:
            text: Contents of the file that PBS_NODEFILE names.
        """
        hosts = with_slots(parse_host_file(text, environ[PBS_HOSTS]), None)
        return cls(environ[PBS_HOSTS], hosts, _number(environ, "NCPUS") or 0)


Allocation = SlurmAllocation | PBSAllocation


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse `a:4,b:4` or `a,b`.

    Raises:
        LaunchError: If the text has another form.
    """
    matches = [_HOST.fullmatch(each) for each in text.split(",")]
    if not all(matches):
        raise LaunchError(f"--hosts {text}: expected names with the number of ranks on each, as in --hosts a:4,b:4")
    return _merged([(match["name"], match["slots"]) for match in matches if match])


def parse_host_file(text: str, path: str) -> tuple[Host, ...]:
    """Parse a host file with one host per line: `a slots=4` (Open MPI), `a:4` (MPICH), or `a` once for each rank (PBS).

    Args:
        text: The contents of the file.
        path: The name of the file, for messages.

    Raises:
        LaunchError: If a line has another form, or if the file has no host.
    """
    found: list[tuple[str, str | None]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        slots = _SLOTS.search(words)
        if match is None or (match["rest"].strip() and "=" not in match["rest"]):
            raise LaunchError(f"{path}, line {number}: expected `host slots=4` or `host:4`, got {line.strip()!r}")
        found.append((match["name"], slots[1] if slots else match["hydra"]))
    if not found:
        raise LaunchError(f"{path} names no host; expected lines like `host slots=4` or `host:4`")
    return _merged(found)


def _merged(found: Sequence[tuple[str, str | None]]) -> tuple[Host, ...]:
    """Merge repeated hosts: a host that is named n times gets n ranks, or the sum of its numbers."""
    sums: dict[str, int] = {}
    for name, slots in found:
        sums[name] = sums.get(name, 0) + int(slots or 1)
    if all(slots is None for _, slots in found) and len(sums) == len(found):
        return tuple(Host(name) for name in sums)
    return tuple(Host(name, slots) for name, slots in sums.items())


def with_slots(hosts: Sequence[Host], ranks: int | None) -> tuple[Host, ...]:
    """Return the hosts with their slots; hosts without a number get an equal share of the ranks, or 1."""
    share = 1 if ranks is None else -(-ranks // len(hosts))
    return tuple(Host(host.name, host.slots or share) for host in hosts)


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first positive number among the variables, without a type prefix as in `a100:4`."""
    values = [environ.get(name, "").rpartition(":")[2] for name in names]
    return next((int(text) for text in values if text.isdigit() and int(text) > 0), None)


def _repeated(text: str) -> tuple[int, ...]:
    return tuple(int(value) for value, times in _REPEATED.findall(text) for _ in range(int(times or 1)))
