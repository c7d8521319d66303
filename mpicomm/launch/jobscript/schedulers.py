"""The schedulers: their commands and their limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from mpicomm.launch.selection import FLUX, IBRUN, MPIEXEC, PALS, SRUN

_FLUX_FILE = r"(?!-)([\w./+=-]|{{[\w.]+}})+"  # with {{id}} and other names of flux-batch(1)
_MAIL_TYPES = ("NONE", "BEGIN", "END", "FAIL", "ALL")


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """A scheduler; its template in `launch/templates` is the script."""

    title: str
    submit: tuple[str, ...]
    """The command that submits a script, without its name."""
    commands: tuple[str, ...]
    """Its commands that submit jobs or start ranks."""
    launchers: tuple[str, ...]
    """The launchers of `mpicomm run` in its jobs."""
    file: str
    """The default name of a script."""
    mail_types: tuple[str, ...] = _MAIL_TYPES
    array_index: str | None = None
    """The variable with the index of a job in an array."""
    has_days: bool = False
    """Whether time limits may contain days."""
    requeue_signal: str | None = None
    """The signal that makes the ranks exit in time with --requeue, as SIGNAL@SECONDS."""
    takes_file: bool = True
    """Whether `submit` accepts the name of a script; otherwise it reads the script from its standard input."""
    resubmits_file: bool = False
    """Whether --requeue submits the file of the script again."""
    special_values: Collection[tuple[str, str]] = ()
    """Fields with patterns of values that it accepts in addition to the form of the option."""


SCHEDULERS: dict[str, Scheduler] = {
    "slurm": Scheduler(
        title="Slurm",
        submit=("sbatch",),
        commands=("sbatch", "salloc", "srun", "ibrun"),
        launchers=(SRUN, IBRUN, MPIEXEC),
        file="job.sbatch",
        mail_types=(*_MAIL_TYPES, "REQUEUE", "ARRAY_TASKS", "TIME_LIMIT", "TIME_LIMIT_80"),
        array_index="SLURM_ARRAY_TASK_ID",
        has_days=True,
        requeue_signal="USR1@180",
        special_values=[("mem", "0")],  # all memory of the node
    ),
    "pbs": Scheduler(
        title="PBS",
        submit=("qsub",),
        commands=("qsub", "pbsdsh", "pbs_tmrsh"),
        launchers=(PALS, MPIEXEC),
        file="job.pbs",
        array_index="PBS_ARRAY_INDEX",
    ),
    "lsf": Scheduler(
        title="LSF",
        submit=("bsub",),
        commands=("bsub", "blaunch"),
        launchers=(MPIEXEC,),
        file="job.lsf",
        takes_file=False,
        array_index="LSB_JOBINDEX",
        requeue_signal="USR1@180",
        resubmits_file=True,
    ),
    "flux": Scheduler(
        title="Flux",
        submit=("flux", "batch"),
        commands=("flux",),
        launchers=(FLUX, MPIEXEC),
        file="job.flux",
        resubmits_file=True,
        special_values=[("output", _FLUX_FILE), ("error", _FLUX_FILE)],
    ),
}
