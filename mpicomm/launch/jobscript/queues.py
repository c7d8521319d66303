"""The queue of each scheduler: the commands that query and cancel a job, and what their output means."""

from __future__ import annotations

import abc
import dataclasses
import re
import signal
from collections.abc import Sequence
from pathlib import PurePath
from typing import ClassVar, Literal

from mpicomm.launch.jobscript import quoting
from mpicomm.launch.jobscript.spec import JobSpec

Outcome = Literal["completed", "failed", "cancelled", "time limit", "unknown"]


@dataclasses.dataclass(frozen=True)
class QueueState:
    """The state of a submitted job."""

    name: str
    """The state as its scheduler names it, with the reason."""
    outcome: Outcome | None = None
    """How the job ended; None before its end. Unknown if the scheduler does not know the job (any more)."""
    status: int | None = None
    """Exit status of the script, 128 + N after signal N; None if the scheduler does not report it."""
    output: str | None = None
    """The output file, if the scheduler reports it."""

    @property
    def exit_status(self) -> int:
        """The exit status for a command that waits for the job: never 0 unless the job has completed."""
        status = self.status or 0
        if self.outcome == "completed":
            return status
        return status if 0 < status < 256 else 1


class SchedulerQueue(abc.ABC):
    """Queries and cancels the jobs of a scheduler, whose commands it describes."""

    submit_options: tuple[str, ...] = ()
    """Options of the command that submits a script, to print the ID of the job alone."""
    id_pattern: str
    """The ID of the new job in the output of that command, as a group."""
    list_jobs: str
    """The command with which the user lists jobs."""
    cancel: str
    """The command that cancels a job, without the ID."""
    unknown: str
    """What the queries print about a job that the scheduler does not know."""
    placeholders: str
    """Matches a part of a file name that the scheduler replaces."""
    appends_output: bool = False
    """Whether a job appends to the output file of an earlier one."""
    output_directive: str = "-o|--output"
    """Matches the beginning of a directive that sets the output file."""

    def job_id(self, output: str) -> str | None:
        """Return the ID of the new job from the output of the submission; None if it has no ID."""
        found = re.findall(self.id_pattern, output, re.MULTILINE)
        return found[-1] if found else None

    def cancellation(self, job_id: str) -> str:
        """Return the command that cancels a job."""
        return f"{self.cancel} {quoting.quoted(job_id)}"

    @abc.abstractmethod
    def queries(self, job_id: str) -> list[list[str]]:
        """Return the commands that print the state of a job; a later one is for a job that the first do not know."""

    @abc.abstractmethod
    def read_state(self, output: str) -> QueueState | None:
        """Return the state that the output of a query, with its errors, describes; None without one."""

    def state(self, output: str) -> QueueState | None:
        """Return the state in the output of a query; its outcome is unknown if the scheduler does not know the job."""
        if state := self.read_state(output):
            return state
        return QueueState("unknown", "unknown") if re.search(self.unknown, output, re.IGNORECASE) else None

    @abc.abstractmethod
    def output_files(self, job: JobSpec, job_id: str) -> list[str]:
        """Return the possible names of the output file; none if they contain patterns of unknown value."""

    def late_output(self, job: JobSpec) -> str:  # noqa: ARG002
        """Return when the output appears, if not at once, and how to change that, for users who follow it."""
        return ""


class _SlurmQueue(SchedulerQueue):
    submit_options = ("--parsable",)
    id_pattern = r"^([0-9]+(?:;[\w.-]+)?)$"
    list_jobs = "squeue --me"
    cancel = "scancel"
    unknown = "invalid job id specified"
    placeholders = "%"
    _ENDED: ClassVar[dict[str, Outcome]] = {  # the others are failures
        "COMPLETED": "completed",
        "CANCELLED": "cancelled",
        "TIMEOUT": "time limit",
        "DEADLINE": "time limit",
        **dict.fromkeys(("FAILED", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "OUT_OF_MEMORY"), "failed"),
    }

    def cancellation(self, job_id: str) -> str:
        number, _, cluster = job_id.partition(";")
        return f"scancel --clusters={cluster} {number}" if cluster else super().cancellation(number)

    def queries(self, job_id: str) -> list[list[str]]:
        number, _, cluster = job_id.partition(";")
        on = [f"--clusters={cluster}"] if cluster else []
        accounting = ["--noheader", "--parsable2", "--allocations", "--format=State,ExitCode", f"--jobs={number}"]
        return [["scontrol", *on, "show", "job", number], ["sacct", *on, *accounting]]

    def read_state(self, output: str) -> QueueState | None:
        if row := re.fullmatch(r"(\w+)[^|\n]*\|(\d+):(\d+)\s*", output):  # sacct: CANCELLED by 0|0:15
            return self._state(row[1], row[1], row[2], row[3], None)
        state = re.search(r"^\s*JobState=(\S+) Reason=(\S+)", output, re.MULTILINE)
        code = re.search(r"\bExitCode=(\d+):(\d+)", output)
        if not state or not code:
            return None
        file = re.search(r"^\s*StdOut=(.+)$", output, re.MULTILINE)
        name = state[1] if state[2] == "None" else f"{state[1]} ({state[2]})"
        return self._state(state[1], name, code[1], code[2], file[1] if file and "%" not in file[1] else None)

    def _state(self, state: str, name: str, status: str, number: str, output: str | None) -> QueueState:
        outcome = self._ENDED.get(state)
        code = int(status) or (128 + int(number) if int(number) else 0)
        is_known = outcome == "completed" or (outcome is not None and code != 0)  # 0:0 before the script has ended
        return QueueState(name, outcome, code if is_known else None, output)

    def output_files(self, job: JobSpec, job_id: str) -> list[str]:
        number, name = job_id.partition(";")[0], job.output or "%x-%j.out"
        file = name.replace("%j", number).replace("%x", job.title)
        return [] if "%" in file else [file]


class _PbsQueue(SchedulerQueue):
    id_pattern = r"^([0-9]+(?:\[\])?(?:\.[\w.-]+)?)$"
    list_jobs = "qstat -u $USER"
    cancel = "qdel"
    unknown = "unknown job id|has finished"
    placeholders = r"\^"
    _NAMES: ClassVar = {"Q": "queued", "H": "held", "W": "waiting", "R": "running", "E": "exiting", "S": "suspended"}
    _WALLTIME = -29  # JOB_EXEC_KILL_WALLTIME of OpenPBS, whatever the script returned
    _SIGNAL = 256  # added to the number of the signal that ended the script

    def queries(self, job_id: str) -> list[list[str]]:
        # Without a history of jobs on the server, -x is an error.
        return [["qstat", "-x", "-f", job_id], ["qstat", "-f", job_id]]

    def read_state(self, output: str) -> QueueState | None:
        text = re.sub(r"\n\t", "", output)  # qstat wraps long lines
        fields = dict(re.findall(r"^ +(\w+) = (.*)$", text, re.MULTILINE))
        letter = fields.get("job_state")
        if letter is None:
            return None
        host, _, path = fields.get("Output_Path", "").rpartition(":")
        if path.endswith("/"):
            path += f"{re.findall(r'^Job Id: *(.+)$', text, re.MULTILINE)[0].strip()}.OU"
        file = path if host else None
        if letter not in ("F", "X"):
            return QueueState(self._NAMES.get(letter) or letter, output=file)
        code = fields.get("Exit_status")
        if code is None:
            return QueueState("deleted before its start", "cancelled", output=file)
        return dataclasses.replace(self._ended(int(code)), output=file)

    def _ended(self, code: int) -> QueueState:
        if code == self._WALLTIME:
            return QueueState("ended at the walltime", "time limit")
        if code < 0:
            return QueueState(f"ended by PBS, Exit_status {code}", "failed")
        if code > self._SIGNAL:
            number = code - self._SIGNAL
            outcome: Outcome = "cancelled" if number == signal.SIGTERM else "failed"  # by qdel; OpenPBS 23.06
            return QueueState(f"ended by signal {number}", outcome, 128 + number)
        return QueueState("finished", "failed" if code else "completed", code)

    def output_files(self, job: JobSpec, job_id: str) -> list[str]:  # noqa: ARG002
        return [job.output] if job.output and not job.output.endswith("/") else []

    def late_output(self, job: JobSpec) -> str:
        if any(re.search(r"(^|\s)-k\s*\w*d", text) for text in job.directive):
            return ""
        return "PBS copies the output file at the end of the job; with --directive '-k doe' the job writes it"


class _LsfQueue(SchedulerQueue):
    id_pattern = r"^Job <([0-9]+)> is submitted"
    list_jobs = "bjobs"
    cancel = "bkill"
    unknown = "is not found"
    placeholders = "%"
    appends_output = True

    def queries(self, job_id: str) -> list[list[str]]:
        return [["bjobs", "-noheader", "-o", "stat exit_code exit_reason delimiter='|'", job_id]]

    def read_state(self, output: str) -> QueueState | None:
        row = re.search(r"^([A-Z]+)\|(\d+|-)\|(.*)$", output, re.MULTILINE)
        if row is None:
            return None
        stat, code, reason = row.groups()
        name = stat if reason.strip() in ("", "-") else f"{stat} ({reason.strip()})"
        status = None if code == "-" else int(code)
        if stat == "DONE":
            return QueueState(name, "completed", status or 0)
        if stat not in ("EXIT", "ZOMBI"):
            return QueueState(name)
        if "TERM_RUNLIMIT" in reason:
            return QueueState(name, "time limit", status)
        is_killed = re.search("TERM_(OWNER|ADMIN|FORCE_OWNER|FORCE_ADMIN)", reason)
        return QueueState(name, "cancelled" if is_killed else "failed", status)

    def output_files(self, job: JobSpec, job_id: str) -> list[str]:
        name = (job.output or f"{job.title}-%J.out").replace("%J", job_id)
        return [] if "%" in name or name.endswith("/") else [name]

    def late_output(self, job: JobSpec) -> str:  # noqa: ARG002
        return "LSF copies the output file at the end of the job, unless LSB_STDOUT_DIRECT=Y is set here"


class _FluxQueue(SchedulerQueue):
    id_pattern = r"^([fƒ][1-9A-HJ-NP-Za-km-z]+)$"
    list_jobs = "flux jobs"
    cancel = "flux cancel"
    unknown = "unknown"
    placeholders = "{{"
    output_directive = "--output"  # -o sets an option of the shell
    _ENDED: ClassVar[dict[str, Outcome]] = {"COMPLETED": "completed", "CANCELED": "cancelled", "TIMEOUT": "time limit"}

    def job_id(self, output: str) -> str | None:
        job_id = super().job_id(output)
        return job_id and f"f{job_id[1:]}"  # not every encoding has ƒ, and Flux accepts both

    def queries(self, job_id: str) -> list[list[str]]:
        return [["flux", "jobs", "--no-header", "--format={state};{result};{returncode}", job_id]]

    def read_state(self, output: str) -> QueueState | None:
        row = re.search(r"^([A-Z]+);(\w*)[^;]*;(-?\d*)", output, re.MULTILINE)
        if row is None:
            return None
        state, result, code = row.groups()
        if state != "INACTIVE":
            return QueueState(state)
        status = None
        if code.lstrip("-"):  # negative: the number of a signal, or -128 after an exception before the start
            status = int(code) if int(code) >= 0 else 128 - int(code)
        return QueueState(result, self._ENDED.get(result, "failed"), status)

    def output_files(self, job: JobSpec, job_id: str) -> list[str]:
        name = job.output or f"{job.title}-{{{{id}}}}.out"
        names = [name.replace("{{id}}", form) for form in (f"ƒ{job_id[1:]}", f"f{job_id[1:]}")]
        return [] if "{{" in names[0] else names


QUEUES: dict[str, SchedulerQueue] = {
    "slurm": _SlurmQueue(),
    "pbs": _PbsQueue(),
    "lsf": _LsfQueue(),
    "flux": _FluxQueue(),
}


def check_tail(job: JobSpec) -> None:
    """Raise ValueError if the output file of a job may be another one than --output names.

    Slurm reports a name with other patterns, but only after the submission: an earlier job may have written that file.
    """
    queue = QUEUES[job.scheduler]
    for text in job.directive:
        if re.search(rf"(^|\s)({queue.output_directive})", text):
            raise ValueError(
                f"--tail and --directive {text!r}: --tail prints the file of --output; pass --output FILE in its place"
            )
    is_new = job.scheduler == "pbs" or (job.scheduler == "slurm" and re.search("%[0-9]*[jJA]", job.output or "%j"))
    if not is_new and not queue.output_files(job, "0"):
        raise ValueError(
            f"--tail and --output {job.output}: the name of the file is known only when the job starts; put the ID of "
            f"the job into it, as without --output"
        )


def directories(job: JobSpec) -> Sequence[str]:
    """Return the directories of the output files that the options name, which most schedulers do not create.

    Raises:
        ValueError: If the scheduler would replace a part of the name of a directory.
    """
    found = []
    for option, name in (("--output", job.output), ("--error", job.error)):
        if not name:
            continue
        directory = name if name.endswith("/") else str(PurePath(name).parent)
        if re.search(QUEUES[job.scheduler].placeholders, directory):
            raise ValueError(
                f"{option} {name}: the directory {directory} must exist when the job starts, and its name is known "
                f"only then; put the number of the job into the name of the file instead"
            )
        found.append(directory)
    return list(dict.fromkeys(found))
