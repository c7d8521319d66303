"""The hosts of a job: `--hosts`, host files, and the allocations of Slurm, PBS, LSF and Flux."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

from mpicomm.errors import LaunchError
from mpicomm.launch import visible_devices

PBS_HOSTS = "PBS_NODEFILE"
"""The file of host names, one line per process, which is all that PBS provides: mpirun sets the rank variables."""

LSF_HOSTS = "LSB_MCPU_HOSTS"
"""The hosts of an LSF job, each followed by its number of slots: `a 4 b 4`."""

FLUX_VARIABLE = "FLUX_URI"
"""The address of the Flux instance in which a process runs."""

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
    groups: int = 1
    """Number of components of a heterogeneous job; SLURM_* describe only the first one."""

    title = "Slurm"
    launcher = "srun"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> SlurmAllocation:
        """Return the allocation of a Slurm job.

        If the job has no number of tasks, the default is one rank per GPU.
        """
        nodes = _number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
        per_node = _number(environ, "SLURM_NTASKS_PER_NODE")
        gpus_per_node = _number(environ, "SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE")
        gpus = _number(environ, "SLURM_GPUS") or nodes * (gpus_per_node or 0)
        groups = _number(environ, "SLURM_HET_SIZE") or 1
        ranks_of_groups = [_number(environ, f"SLURM_NTASKS_HET_GROUP_{group}") or 1 for group in range(groups)]
        return cls(
            nodes=nodes,
            ranks=sum(ranks_of_groups)
            if groups > 1
            else _number(environ, "SLURM_NTASKS", "SLURM_NPROCS")
            or (per_node and nodes * per_node)
            or gpus
            or sum(_repeated(environ.get("SLURM_TASKS_PER_NODE", "")))
            or nodes,
            cpus=_repeated(environ.get("SLURM_JOB_CPUS_PER_NODE", "")),
            cpus_per_task=_number(environ, "SLURM_CPUS_PER_TASK"),
            groups=groups,
        )


@dataclasses.dataclass(frozen=True)
class HostAllocation:
    """The hosts that PBS or LSF allocates to a job; mpiexec starts the ranks there."""

    title: str
    hosts: tuple[Host, ...]
    file: str | None = None
    """The host file of PBS."""
    cpus: int = 0
    """NCPUS: CPUs of PBS's first chunk, or the number of threads that each of its ranks should use; 0 if not set."""

    launcher = "mpicomm run"

    @property
    def ranks(self) -> int:
        """Number of ranks for which the scheduler has reserved resources."""
        return sum(host.slots or 1 for host in self.hosts)

    def with_rank_per_gpu(self, gpus: int) -> HostAllocation:
        """Return the allocation with a rank for each GPU of its hosts, if they have one rank each: PBS's default.

        Args:
            gpus: Number of GPUs of a host.
        """
        if not gpus or any((host.slots or 1) > 1 for host in self.hosts):
            return self
        return dataclasses.replace(self, hosts=tuple(Host(host.name, gpus) for host in self.hosts))

    @classmethod
    def of_pbs(cls, environ: Mapping[str, str], text: str) -> HostAllocation:
        """Return the allocation of a PBS job.

        Args:
            text: Contents of the file that PBS_NODEFILE names.
        """
        hosts = with_slots(parse_host_file(text, environ[PBS_HOSTS]), None)
        return cls("PBS", hosts, environ[PBS_HOSTS], _number(environ, "NCPUS") or 0)

    @classmethod
    def of_lsf(cls, environ: Mapping[str, str]) -> HostAllocation:
        """Return the allocation of an LSF job.

        Raises:
            LaunchError: If its list of hosts has an unknown form.
        """
        words = environ[LSF_HOSTS].split()
        if len(words) % 2 or not all(number.isdigit() for number in words[1::2]):
            raise LaunchError(
                f"{LSF_HOSTS}={environ[LSF_HOSTS]}: expected hosts, each with its number of slots: `a 4 b 4`.\n"
                f"If the variable is left over from another job: unset LSB_JOBID {LSF_HOSTS}"
            )
        return cls("LSF", _merged(list(zip(words[::2], words[1::2], strict=True))))


@dataclasses.dataclass(frozen=True)
class FluxAllocation:
    """The resources of a Flux instance, such as a batch job."""

    nodes: int
    cores: int
    gpus: int

    title = "Flux"
    launcher = "flux run"
    query = ("flux", "resource", "list", "--states=up", "-no", "{nnodes} {ncores} {ngpus}")
    """The command that prints the resources."""

    @property
    def ranks(self) -> int:
        """Default number of ranks: one per GPU, or one per core without GPUs."""
        return self.gpus or self.cores

    @classmethod
    def from_output(cls, text: str) -> FluxAllocation:
        """Return the resources of an instance.

        Args:
            text: The output of `query`.

        Raises:
            LaunchError: If it is not three numbers.
        """
        if not re.fullmatch(r"\s*[1-9]\d*\s+[1-9]\d*\s+\d+\s*", text):
            raise LaunchError(
                f"cannot read the resources of this Flux instance: `flux resource list` printed {text.strip()!r}.\n"
                f"If {FLUX_VARIABLE} is left over from another instance: unset {FLUX_VARIABLE}"
            )
        return cls(*map(int, text.split()))


Allocation = SlurmAllocation | HostAllocation | FluxAllocation


def from_environ(environ: Mapping[str, str], read: Callable[[str], str]) -> SlurmAllocation | HostAllocation | None:
    """Return the allocation of a Slurm, PBS or LSF job; None outside one.

    Args:
        read: Returns the contents of a file.

    Raises:
        LaunchError: If the list of hosts of the job cannot be read.
    """
    if environ.get("SLURM_JOB_ID"):
        return SlurmAllocation.from_environ(environ)
    if environ.get("LSB_JOBID") and environ.get(LSF_HOSTS):
        return HostAllocation.of_lsf(environ)
    if not all(environ.get(name) for name in ("PBS_JOBID", "PBS_ENVIRONMENT", PBS_HOSTS)):  # MPI libraries need all too
        return None
    try:
        text = read(environ[PBS_HOSTS])
    except OSError as error:
        raise LaunchError(
            f"cannot read the list of hosts of PBS job {environ['PBS_JOBID']}: {error}\n"
            f"If the variables are left over from another job: unset PBS_JOBID PBS_ENVIRONMENT PBS_NODEFILE"
        ) from error
    return HostAllocation.of_pbs(environ, text)


def requeues(environ: Mapping[str, str]) -> int:
    """Return how often Slurm has requeued this job."""
    return _number(environ, "SLURM_RESTART_COUNT") or 0


def assigned_gpus(environ: Mapping[str, str]) -> str | None:
    """Return the variable in which the scheduler or the user assigns GPUs to this process; None without one."""
    if assigning := visible_devices.assigning(environ):
        return assigning
    if any(visible_devices.hiding(names, environ) for names in visible_devices.VARIABLES.values()):
        return None
    names = ("SLURM_STEP_GPUS", "SLURM_GPUS_PER_TASK")
    return next((f"{name}={environ[name]}" for name in names if environ.get(name)), None)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse `a:4,b:4` or `a,b`.

    Raises:
        LaunchError: If the text has another form.
    """
    matches = [_HOST.fullmatch(host) for host in text.split(",")]
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
    listed: list[tuple[str, str | None]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        slots = _SLOTS.search(words)
        if match is None or (match["rest"].strip() and "=" not in match["rest"]):
            raise LaunchError(f"{path}, line {number}: expected `host slots=4` or `host:4`, got {line.strip()!r}")
        listed.append((match["name"], slots[1] if slots else match["hydra"]))
    if not listed:
        raise LaunchError(f"{path} names no host; expected lines like `host slots=4` or `host:4`")
    return _merged(listed)


def _merged(listed: Sequence[tuple[str, str | None]]) -> tuple[Host, ...]:
    """Merge repeated hosts: a host that is named n times gets n ranks, or the sum of its numbers."""
    sums: dict[str, int] = {}
    for name, slots in listed:
        sums[name] = sums.get(name, 0) + int(slots or 1)
    if all(slots is None for _, slots in listed) and len(sums) == len(listed):
        return tuple(Host(name) for name in sums)
    return tuple(Host(name, slots) for name, slots in sums.items())


def with_slots(hosts: Sequence[Host], ranks: int | None) -> tuple[Host, ...]:
    """Return the hosts with their slots; hosts without a number get an equal share of the ranks, or 1."""
    share = 1 if ranks is None else -(-ranks // len(hosts))
    return tuple(Host(host.name, host.slots or share) for host in hosts)


def distributed(names: Sequence[str], ranks: int) -> tuple[Host, ...]:
    """Return hosts with their share of the ranks, of which the first ones have one more."""
    least, more = divmod(ranks, len(names) or 1)
    return tuple(Host(name, least + (index < more)) for index, name in enumerate(names))


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first positive number among the variables; for several types, as in `a100:4,v100:2`, their sum."""
    for name in names:
        numbers = [entry.rpartition(":")[2] for entry in environ.get(name, "").split(",")]
        if all(number.isdigit() for number in numbers) and (total := sum(map(int, numbers))) > 0:
            return total
    return None


def _repeated(text: str) -> tuple[int, ...]:
    return tuple(int(value) for value, times in _REPEATED.findall(text) for _ in range(int(times or 1)))
