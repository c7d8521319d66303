"""The schedulers: their commands and limits, and the jobs that each of them cannot run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from mpicomm.launch.jobscript.options import flag

if TYPE_CHECKING:
    from mpicomm.launch.jobscript.spec import JobSpec

_MAIL_TYPES = ("NONE", "BEGIN", "END", "FAIL", "ALL")


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """A scheduler; its template in `launch/templates` is the script."""

    title: str
    submit: str
    """The command line that submits a script, without its name."""
    commands: tuple[str, ...]
    """Its commands that submit jobs or start ranks."""
    file: str
    """The default name of a script."""
    check: Callable[[JobSpec], None] | None = None
    """Raises ValueError if the scheduler cannot run the job."""
    mail_types: tuple[str, ...] = _MAIL_TYPES
    array_index: str | None = None
    """The variable with the index of a job in an array."""
    has_days: bool = False
    """Whether time limits may contain days."""
    requeue_signal: str | None = None
    """The signal that makes the ranks exit in time with --requeue, as SIGNAL@SECONDS."""
    resubmits_file: bool = False
    """Whether --requeue submits the file of the script again."""
    special_values: Collection[tuple[str, str]] = ()
    """Fields with values that it accepts in addition to the form of the option."""


def _check_slurm(spec: JobSpec) -> None:
    for field in ("output", "error"):
        name = getattr(spec, field)
        if spec.array and name and not re.search(r"%[0-9]*[ajJ]", name):
            raise ValueError(
                f"{flag(field)} {name}: all jobs of the array would write to this file; add %A_%a to the name"
            )


def _check_pbs(spec: JobSpec) -> None:
    if spec.array and not re.fullmatch(r"([0-9]+)-(?!\1[:%]|\1$)[0-9]+(:[0-9]+)?(%[0-9]+)?", spec.array):
        raise ValueError(
            f"--array {spec.array}: PBS accepts one range of two jobs or more; expected 0-9, 0-30:10 or 0-9%2"
        )
    if spec.array and spec.requeue:
        raise ValueError("--array and --requeue: PBS cannot resubmit one job of an array; remove one of the two")
    for field in ("output", "error"):
        name = getattr(spec, field)
        if spec.requeue and name and not name.endswith("/"):
            raise ValueError(
                f"{flag(field)} {name}: a resubmitted job would overwrite this file; "
                f"use a directory, {name}/, in which PBS creates one file per job"
            )


def _check_lsf(spec: JobSpec) -> None:
    if spec.array and re.search(r"(?<![0-9:])0+(?![0-9])", spec.array.partition("%")[0]):
        raise ValueError(f"--array {spec.array}: LSF accepts indices from 1; expected 1-9")
    if spec.array and spec.requeue:
        raise ValueError("--array and --requeue: LSF cannot resubmit one job of an array; remove one of the two")


SCHEDULERS: dict[str, Scheduler] = {
    "slurm": Scheduler(
        title="Slurm",
        submit="sbatch",
        commands=("sbatch", "salloc", "srun"),
        file="job.sbatch",
        check=_check_slurm,
        mail_types=(*_MAIL_TYPES, "REQUEUE", "ARRAY_TASKS", "TIME_LIMIT", "TIME_LIMIT_80"),
        array_index="SLURM_ARRAY_TASK_ID",
        has_days=True,
        requeue_signal="USR1@180",
        special_values=[("mem", "0")],  # all memory of the node
    ),
    "pbs": Scheduler(
        title="PBS",
        submit="qsub",
        commands=("qsub", "pbsdsh", "pbs_tmrsh"),
        file="job.pbs",
        check=_check_pbs,
        array_index="PBS_ARRAY_INDEX",
    ),
    "lsf": Scheduler(
        title="LSF",
        submit="bsub <",
        commands=("bsub", "blaunch"),
        file="job.lsf",
        check=_check_lsf,
        array_index="LSB_JOBINDEX",
        requeue_signal="USR1@180",
        resubmits_file=True,
    ),
    "flux": Scheduler(
        title="Flux",
        submit="flux batch",
        commands=("flux",),
        file="job.flux",
        resubmits_file=True,
    ),
}
