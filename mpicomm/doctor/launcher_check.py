"""Checks of the launchers: whether they fit the MPI library that mpi4py loads."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path

from mpicomm import mpi
from mpicomm.doctor.findings import Finding, from_error, ok, problem, warning
from mpicomm.errors import LaunchError, MPINotFoundError
from mpicomm.launch import detect, queries
from mpicomm.launch.mpi_library import Library

COMMANDS = ("mpirun", "mpiexec")
"""The commands that users type."""

_SRUN_LIST_HEAD = "MPI plugin types are"
_PROGRAM = "python train.py"  # in remedies
_SHOWN_LINES = 8  # of the output of a failed job: the end of a traceback


@dataclasses.dataclass(frozen=True)
class LauncherFacts:
    """The launchers of this host, and how this process was started."""

    library: Library
    environ: Mapping[str, str]
    found_in_path: Mapping[str, tuple[str, str]]
    """For each of `COMMANDS` in PATH, its path and the output of `--version`."""

    mpiexec_path: str = ""
    """The path of the mpiexec of the library; empty without one."""

    is_pals: bool = False
    """Whether this mpiexec is that of PALS, which belongs to no MPI library."""

    not_found: str = ""
    """The error message without an mpiexec; otherwise empty."""

    srun_list: str = ""
    """The output of `srun --mpi=list`; empty without Slurm."""

    scheduler: str = ""
    """The scheduler in whose job this process runs."""


@dataclasses.dataclass(frozen=True)
class TrialJob:
    """The result of a job of two ranks."""

    command: str
    status: int | None
    """The exit status; None after a timeout."""

    size: int
    """The size of the world in rank 0; 0 if it was not reported."""

    has_threads: bool = False
    """Whether MPI provides MPI_THREAD_MULTIPLE."""

    output: str = ""
    """The output, if it failed."""


def collect(environ: Mapping[str, str]) -> LauncherFacts | None:
    """Return the facts about this host, None without an MPI library; runs the launchers to get their versions."""
    try:
        library = mpi.library()
    except MPINotFoundError:  # software_check reports it
        return None
    path, mpiexec_path, is_pals, not_found = environ.get("PATH", ""), "", False, ""
    try:
        mpiexec_path, launcher = queries.mpiexec(library, path)
        is_pals = launcher in library.launchers_of_pals
    except LaunchError as error:
        not_found = str(error)
    found_in_path = {
        name: (command, queries.constant_output(command, "--version"))
        for name in COMMANDS
        if (command := shutil.which(name, path=path)) is not None
    }
    job = None
    with contextlib.suppress(LaunchError):
        job = queries.current_allocation(environ)
    return LauncherFacts(
        library,
        environ,
        found_in_path,
        mpiexec_path,
        is_pals,
        not_found,
        srun_list=queries.srun_list(),
        scheduler="" if job is None else job.title,
    )


def check(facts: LauncherFacts | None) -> list[Finding]:
    """Return the findings about the launchers."""
    if facts is None:
        return []
    return [*_check_start(facts), *_check_mpiexec(facts), *_check_srun(facts)]


def _check_start(facts: LauncherFacts) -> list[Finding]:
    """Check that the launcher of this process, or the variables of the shell, fit the MPI library."""
    try:
        launch = detect.detect(facts.environ, facts.environ.get("MPICOMM_LAUNCHER") or None)
        fault = detect.problem_before_init(launch, facts.environ, facts.library, _PROGRAM)
        if fault is None and launch.is_plain:
            fault = detect.problem_after_init(launch, facts.environ, facts.library, 0, 1, _PROGRAM)
    except LaunchError as error:
        return [from_error("launcher", error)]
    return [ok("launcher", f"this process: {launch.title}") if fault is None else from_error("launcher", fault)]


def _check_mpiexec(facts: LauncherFacts) -> list[Finding]:
    library, is_plain = facts.library, False
    with contextlib.suppress(LaunchError):  # _check_start reports it
        is_plain = detect.detect(facts.environ).is_plain
    others = {path: None for path, output in facts.found_in_path.values() if library.is_of_other_mpi(output)}
    has_srun = bool(facts.scheduler and library.srun_type_in(facts.srun_list, facts.environ))
    name = f"{library.vendor} {library.version}"
    if not facts.mpiexec_path:
        fault = from_error("mpiexec", facts.not_found)
        return [dataclasses.replace(fault, status="warning") if has_srun or not is_plain else fault]
    if not others:
        directory = Path(facts.mpiexec_path).parent
        advice = "" if facts.found_in_path else f", not in PATH: start with `mpicomm run`, or add {directory}"
        return [ok("mpiexec", f"{facts.mpiexec_path} of {'PALS, for ' if facts.is_pals else ''}{name}{advice}")]
    commands = " and ".join(Path(other).name for other in others)
    report = warning if has_srun or not is_plain else problem
    return [
        report(
            "mpiexec",
            f"PATH has {commands} of another MPI than {name}, which mpi4py loads: their ranks cannot form one job "
            f"({', '.join(others)})",
            f"Start with `mpicomm run -n 4 train.py`, or with the launcher of {library.vendor}:\n"
            f"  {facts.mpiexec_path} -n 4 python train.py",
        )
    ]


def _check_srun(facts: LauncherFacts) -> list[Finding]:
    _, is_list, listed = facts.srun_list.partition(_SRUN_LIST_HEAD)
    if not is_list:  # no Slurm, or one that is installed without a cluster
        return []
    library, listed = facts.library, ", ".join(listed.strip(". \n").split())
    mpi_type = library.srun_type_in(facts.srun_list, facts.environ)
    if mpi_type is None:
        needed = library.implementation.srun_variable
        if needed and not facts.environ.get(needed):
            remedy = f"Set {needed} to the path of Slurm's libpmi2.so, or start with `mpicomm run`, which uses mpiexec."
        else:
            remedy = "Start with `mpicomm run` in the allocation, which uses mpiexec, or install the plugin for Slurm."
        message = f"srun has no PMI for {library.vendor}, which needs {' or '.join(library.srun_types)}: {listed}"
        return [warning("srun", message, remedy)]
    default = facts.environ.get("SLURM_MPI_TYPE")
    if default and not any(default.startswith(mpi_type) for mpi_type in library.srun_types):
        return [
            problem(
                "srun",
                f"SLURM_MPI_TYPE={default} does not fit {library.vendor}: each task of srun is a world of size 1",
                f"Use `srun --mpi={mpi_type}`, or: export SLURM_MPI_TYPE={mpi_type}",
            )
        ]
    return [ok("srun", f"srun --mpi={mpi_type} starts ranks of {library.vendor}")]


def check_trial_job(job: TrialJob) -> list[Finding]:
    """Return the findings about a job of two ranks."""
    if job.status is None:
        remedy = f"Run it, and examine it:\n  {job.command}"
        return [problem("test job", f"two ranks timed out: {job.command}", remedy)]
    if job.status != 0 or job.size != 2:
        lines = [line for line in job.output.splitlines() if line.strip()]
        reason = f"exited with status {job.status}" if job.status else f"formed a world of size {job.size}"
        shown = "".join(f"\n  {line}" for line in lines[-_SHOWN_LINES:])
        return [problem("test job", f"two ranks {reason}: {job.command}", f"Correct the cause that they print:{shown}")]
    return [
        ok("test job", f"{job.command.split()[0]} started two ranks, which formed one job"),
        *check_threads(has_threads=job.has_threads),
    ]


def check_threads(*, has_threads: bool) -> list[Finding]:
    """Return the finding about the thread level of MPI.

    Args:
        has_threads: Whether MPI provides MPI_THREAD_MULTIPLE.
    """
    if has_threads:
        return [ok("thread level", "MPI_THREAD_MULTIPLE")]
    return [
        problem(
            "thread level",
            "MPI provides less than MPI_THREAD_MULTIPLE: asynchronous operations, which DDP uses, raise an error",
            "Use an MPI that was built with MPI_THREAD_MULTIPLE, and let mpicomm.bootstrap() initialise it.",
        )
    ]
