"""LSF job scripts: directives, the start of the ranks, and the handling of their exit status."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mpicomm.launch.jobscript import scheduler, shell
from mpicomm.launch.jobscript.scheduler import Scheduler, end, run, torchrun_of_one_node, torchrun_on_hosts

if TYPE_CHECKING:
    from mpicomm.launch.jobscript.spec import JobSpec

_MAIL = {"NONE": [], "BEGIN": ["-B"], "END": ["-N"], "FAIL": ["-N"], "ALL": ["-B", "-N"]}
_TERMINATED = "INT TERM"  # the signals of bkill


def _check(spec: JobSpec) -> None:
    if spec.array and re.search(r"(?<![0-9:])0+(?![0-9])", spec.array.partition("%")[0]):
        raise ValueError(f"--array {spec.array}: LSF accepts indices from 1; expected 1-9")
    if spec.array and spec.requeue:
        raise ValueError("--array and --requeue: LSF cannot resubmit one job of an array; remove one of the two")


def _script(spec: JobSpec) -> str:
    resources = _resources(spec)
    return scheduler.script(
        spec,
        interactive=f"bsub -Is {shell.joined(' '.join(resources).split())}",
        options=[f"-J {spec.title}{_array(spec)}", *resources, *_other_options(spec)],
        directory=[f"cd {spec.quoted(spec.chdir)} || exit"] if spec.chdir else [],
        threads=str(spec.cpus_per_rank),
        start=_start(spec),
    )


def _resources(spec: JobSpec) -> list[str]:
    """Return the options that an interactive job needs too."""
    minutes = -(-spec.seconds // 60)
    cores = spec.cpus_per_node // spec.processes_per_node
    options = {
        "-n": spec.nodes * spec.processes_per_node,
        "-R": f"span[ptile={spec.processes_per_node}]",
        "-W": f"{minutes // 60}:{minutes % 60:02}",
        "-q": spec.partition,
        "-P": spec.account,
        "-gpu": f"num={spec.gpus_per_node}" if spec.gpus_per_node else None,
    }
    requirements = [f"affinity[core({cores})]"] * (cores > 1) + _memory(spec)
    return [
        *[f"{option} {value}" for option, value in options.items() if value is not None],
        *[f"-R {each}" for each in requirements],
        *["-x"] * spec.exclusive,
    ]


def _memory(spec: JobSpec) -> list[str]:
    for text, times in ((spec.mem, 1), (spec.mem_per_cpu, spec.cpus_per_node), (spec.mem_per_gpu, spec.gpus_per_node)):
        if text is not None:
            return [f"rusage[mem={int(text[:-1]) * times}{text[-1]}B/host]"]
    return []


def _array(spec: JobSpec) -> str:
    ranges, limit, number = (spec.array or "").partition("%")
    return f"[{ranges}]{limit}{number}" if ranges else ""


def _other_options(spec: JobSpec) -> list[str]:
    options = {
        "-o": spec.output or (f"{spec.title}-%J_%I.out" if spec.array else f"{spec.title}-%J.out"),
        "-e": spec.error,
        "-u": spec.mail_user,
    }
    mail = dict.fromkeys(option for each in spec.mail_types for option in _MAIL[each])
    return [*[f"{option} {value}" for option, value in options.items() if value], *mail, *_warning(spec)]


def _warning(spec: JobSpec) -> list[str]:
    """Return the options for a signal before the time limit, in minutes."""
    if spec.warning is None:
        return []
    signal, _, seconds = spec.warning.partition("@")
    return [f"-wa {signal}", f"-wt {-(-int(seconds) // 60)}"]


def _start(spec: JobSpec) -> list[list[str]]:
    if spec.torchrun is None:
        return [_run(spec), _end(spec)]
    if spec.nodes > 1:
        hosts = 'tr " " "\\n" <<<"$LSB_MCPU_HOSTS" | awk "NR % 2 && NF"'
        number = "LSB_JOBID" + (" + LSB_JOBINDEX" if spec.array else "")
        return [torchrun_on_hosts(spec, title="LSF", hosts=hosts, remote="blaunch -no-shell", number=number)]
    last = 'exit "$?"  # the status of the ranks becomes that of the job'
    return [["# torchrun starts the ranks.", torchrun_of_one_node(spec), last]]


def _run(spec: JobSpec) -> list[str]:
    end_of_job = ["terminated=", f"trap terminated=yes {_TERMINATED}"] if spec.requeue else [f"trap : {_TERMINATED}"]
    return [
        "# LSF sends its signals to all processes: SIGINT and SIGTERM on bkill, SIGUSR2 at the time limit, ten minutes",
        "# before SIGKILL. Without the traps this shell would exit at once and lose the exit status of the ranks.",
        *end_of_job,
        "trap : USR1 USR2",
        *run(spec, comment="mpicomm run starts a rank for each slot, on other hosts with blaunch."),
    ]


def _end(spec: JobSpec) -> list[str]:
    return end(
        spec,
        "Submit the script again; but not after\n# bkill.\nrestarts=${JOB_RESTARTS:-0}",
        restarts="$restarts",
        requeue=f'(cd "$LS_SUBCWD" && JOB_RESTARTS=$((restarts + 1)) {LSF.submission(spec.file or LSF.file)})',
        refusal="not submitted again",
        condition=' && [ -z "$terminated" ]',
    )


LSF = Scheduler(
    title="LSF",
    submit="bsub <",
    commands=("bsub", "blaunch"),
    file="job.lsf",
    directive="#BSUB",
    check=_check,
    script=_script,
    job_variables=("LSB_JOBID",),
    array_index="LSB_JOBINDEX",
    requeue_signal="USR1@180",
    resubmits_file=True,
)
