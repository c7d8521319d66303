"""PBS job scripts: directives, the start of the ranks, and the handling of their exit status."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpicomm.launch.jobscript import scheduler
from mpicomm.launch.jobscript.options import clock, flag
from mpicomm.launch.jobscript.scheduler import Scheduler, end, run, torchrun_of_one_node, torchrun_on_hosts

if TYPE_CHECKING:
    from mpicomm.launch.jobscript.spec import JobSpec

_MAIL = {"NONE": "n", "BEGIN": "b", "END": "e", "FAIL": "a", "ALL": "abe"}
_GPU_COMMENT = [
    "If qsub reports `Unknown resource: ngpus`, this site has another name for GPUs: `pbsnodes -a` shows it among",
    "resources_available. Replace ngpus below.",
]
_UNITS = {"K": "kb", "M": "mb", "G": "gb", "T": "tb"}


def _check(spec: JobSpec) -> None:
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


def _script(spec: JobSpec) -> str:
    resources = _resources(spec)
    where = '"$PBS_O_WORKDIR"' + (f" && cd {spec.quoted(spec.chdir)}" if spec.chdir else "")
    return scheduler.script(
        spec,
        interactive=f'qsub -I {" ".join(resources)}\ncd "$PBS_O_WORKDIR" &&',
        comment=_GPU_COMMENT if spec.gpus_per_node else [],
        options=[f"-N {spec.title}", *resources, *_other_options(spec)],
        directory=[
            f"cd {where} || exit  # PBS starts in the home directory",
            "umask 022  # PBS's default makes all files unreadable for other users",
        ],
        threads=str(spec.cpus_per_rank),
        start=_start(spec),
    )


def _resources(spec: JobSpec) -> list[str]:
    """Return the options that an interactive job needs too."""
    options = {"-q": spec.partition, "-A": spec.account, "-P": spec.project}
    return [
        f"-l select={spec.nodes}:{_chunk(spec)}",
        f"-l place=scatter{':exclhost' if spec.exclusive else ''}",
        f"-l walltime={clock(spec.seconds)}",
        *_written(options),
    ]


def _other_options(spec: JobSpec) -> list[str]:
    mail = "".join(dict.fromkeys("".join(_MAIL[each] for each in spec.mail_types)))
    options = {"-J": spec.array, "-o": spec.output, "-e": spec.error, "-M": spec.mail_user, "-m": mail}
    return [*([] if spec.error else ["-j oe"]), *_written(options)]


def _start(spec: JobSpec) -> list[list[str]]:
    if spec.torchrun is None:
        return [_run(spec), _end(spec)]
    if spec.nodes > 1:
        number = "${PBS_JOBID%%[!0-9]*}" + (" + PBS_ARRAY_INDEX" if spec.array else "")
        hosts = "awk '!seen[$0]++' \"$PBS_NODEFILE\""
        return [torchrun_on_hosts(spec, title="PBS", hosts=hosts, remote="pbs_tmrsh", number=number)]
    last = 'exit "$?"  # the status of the ranks becomes that of the job'
    return [["# torchrun starts the ranks.", torchrun_of_one_node(spec), last]]


def _written(options: Mapping[str, str | None]) -> list[str]:
    return [f"{option} {value}" for option, value in options.items() if value]


def _chunk(spec: JobSpec) -> str:
    """Return the resources of one chunk, which is one node."""
    resources = {
        "ncpus": str(spec.cpus_per_node),
        "mpiprocs": str(spec.processes_per_node),
        "ompthreads": str(spec.cpus_per_rank),
        "ngpus": str(spec.gpus_per_node or ""),
        "mem": _memory(spec),
    }
    return ":".join(f"{name}={value}" for name, value in resources.items() if value)


def _memory(spec: JobSpec) -> str:
    """Return the memory of a node; PBS has no memory per CPU or per GPU."""
    for text, times in ((spec.mem, 1), (spec.mem_per_cpu, spec.cpus_per_node), (spec.mem_per_gpu, spec.gpus_per_node)):
        if text is not None:
            return f"{int(text[:-1]) * times}{_UNITS[text[-1]]}"
    return ""


def _run(spec: JobSpec) -> list[str]:
    comment = "mpicomm run starts a rank for each line of PBS_NODEFILE: select x mpiprocs."
    return [
        "# On qdel and at the end of the walltime PBS sends SIGTERM to all processes. Without the trap this shell",
        "# would exit at once and lose the exit status of the ranks.",
        *(["terminated=", "trap terminated=yes TERM"] if spec.requeue else ["trap : TERM"]),
        *run(spec, comment=comment),
    ]


def _end(spec: JobSpec) -> list[str]:
    return end(
        spec,
        "Only operators may requeue in PBS, so\n"
        "# submit the script again, without the options of the first qsub command line; but not after qdel.\n"
        "restarts=${JOB_RESTARTS:-0}",
        restarts="$restarts",
        requeue='(cd "$PBS_O_WORKDIR" && qsub -v JOB_RESTARTS=$((restarts + 1)) "$0")',
        refusal="not submitted again",
        condition=' && [ -z "$terminated" ]',
    )


PBS = Scheduler(
    title="PBS",
    submit="qsub",
    commands=("qsub", "pbsdsh", "pbs_tmrsh"),
    file="job.pbs",
    directive="#PBS",
    check=_check,
    script=_script,
    job_variables=("PBS_JOBID",),
    array_index="PBS_ARRAY_INDEX",
)
