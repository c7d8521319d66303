"""The launchers: the variables in which each passes rank and size to a process, and the names of its processes.

A launcher is supported by one description here; a scheduler also needs a template and a row in `jobscript.schedulers`,
and a launcher with a command line of its own a function in `commands`.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals after which the job must end."""

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
"""Signals after which a job may end: schedulers send them before the time limit, programs use them otherwise, too."""

COMPARED = ("rank", "size", "local_rank", "local_size")
"""The facts that `detect` compares with MPI."""

FACTS = (*COMPARED, "node_rank", "num_nodes", "master_addr", "master_port")
"""The facts that a launcher may pass to a rank, with the names of the fields of `Launcher` and `World`."""


@dataclasses.dataclass(frozen=True)
class Launcher:
    """A launcher: the variable for each fact, and its commands and daemons."""

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

    other_variables: tuple[str, ...] = ()
    """Patterns of its other variables, which must not reach the ranks of another job."""

    commands: tuple[str, ...] = ()
    """The commands that start ranks."""

    daemons: tuple[str, ...] = ()
    """Parts of the names of its processes between a command and the ranks."""

    def variables(self, facts: Sequence[str] = FACTS) -> list[str]:
        """Return the names of the variables that the launcher sets for the facts."""
        return [name for fact in facts if (name := getattr(self, fact))]


OPEN_MPI = Launcher(
    "Open MPI's mpirun",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    other_variables=("OMPI_COMM_WORLD_*", "OMPI_WORLD_*", "OMPI_UNIVERSE_SIZE", "PRTE_LAUNCHED"),
    commands=("mpirun", "mpiexec", "prterun", "orterun"),
    daemons=("prted", "orted"),
)
MVAPICH = Launcher(
    "MVAPICH's launcher",
    rank="MV2_COMM_WORLD_RANK",
    size="MV2_COMM_WORLD_SIZE",
    local_rank="MV2_COMM_WORLD_LOCAL_RANK",
    local_size="MV2_COMM_WORLD_LOCAL_SIZE",
    other_variables=("MV2_COMM_WORLD_*",),
)
PALS = Launcher(  # sets no size
    "PALS mpiexec",
    rank="PALS_RANKID",
    local_rank="PALS_LOCAL_RANKID",
    local_size="PALS_LOCAL_SIZE",
    node_rank="PALS_NODEID",
    # Not PALS_*: PALS_PMI, PALS_CPU_BIND and others are options of mpiexec, which users and modules set.
    other_variables=("PALS_APID", "PALS_APINFO", "PALS_SPOOL_DIR"),
    commands=("aprun",),
    daemons=("palsd",),
)
ALPS = Launcher("aprun", rank="ALPS_APP_PE", other_variables=("ALPS_APP_*",), commands=("aprun",))
JSRUN = Launcher(
    "jsrun",
    rank="JSM_NAMESPACE_RANK",
    size="JSM_NAMESPACE_SIZE",
    local_rank="JSM_NAMESPACE_LOCAL_RANK",
    commands=("jsrun",),
)
FLUX = Launcher(
    "Flux",
    rank="FLUX_TASK_RANK",
    size="FLUX_JOB_SIZE",
    local_rank="FLUX_TASK_LOCAL_ID",
    daemons=("flux-shell",),
)
PMI = Launcher(
    "a PMI launcher (mpiexec)",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    other_variables=("PMI_*", "HYDI_*"),
    commands=("mpiexec", "mpiexec.hydra"),
    daemons=("hydra",),
)
PMIX = Launcher("a PMIx launcher", rank="PMIX_RANK", other_variables=("PMIX_*",))

# Most specific first: Open MPI and PALS set PMIX_* or PMI_* in addition to their own variables.
MPI_LAUNCHERS = (OPEN_MPI, MVAPICH, PALS, ALPS, JSRUN, FLUX, PMI, PMIX)
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
    other_variables=("TORCHELASTIC_*", "ROLE_*"),
    commands=("torchrun",),
)
SLURM = Launcher(
    "srun",
    rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    node_rank="SLURM_NODEID",
    num_nodes="SLURM_STEP_NUM_NODES",
    commands=("srun",),
)
ALL = (*MPI_LAUNCHERS, TORCHRUN, SLURM)


@dataclasses.dataclass(frozen=True)
class CopyCommand:
    """A scheduler's command that starts copies of a program on the hosts of a job, which MPI cannot connect."""

    title: str
    task: str
    """The variable that numbers its tasks."""
    in_script: str = "(?!)"
    """Pattern of the variable's value in the batch script, which the command did not start."""


COPY_COMMANDS = (
    CopyCommand("pbsdsh", task="PBS_TASKNUM", in_script="0*1"),  # tasks have hexadecimal numbers from 00000002
    CopyCommand("blaunch", task="LSF_PM_TASKID"),  # from 1
)


def starts_ranks(process: str, launchers: Sequence[Launcher] = ALL) -> bool:
    """Return whether a process of this name belongs to one of the launchers."""
    return any(name in process for launcher in launchers for name in (*launcher.commands, *launcher.daemons))
