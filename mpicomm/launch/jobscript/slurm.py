"""Slurm job scripts: directives, the start of the ranks, and the handling of their exit status."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpicomm.launch.jobscript import scheduler, shell
from mpicomm.launch.jobscript.options import days_and_clock, flag
from mpicomm.launch.jobscript.scheduler import MAIL_TYPES, Scheduler, end, run, torchrun_of_one_node

if TYPE_CHECKING:
    from mpicomm.launch.jobscript.spec import JobSpec

_CPUS = '--cpus-per-task="$SLURM_CPUS_PER_TASK"'


def _check(spec: JobSpec) -> None:
    for field in ("output", "error"):
        name = getattr(spec, field)
        if spec.array and name and not re.search(r"%[0-9]*[ajJ]", name):
            raise ValueError(
                f"{flag(field)} {name}: all jobs of the array would write to this file; add %A_%a to the name"
            )


def _script(spec: JobSpec) -> str:
    resources = _resources(spec)
    return scheduler.script(
        spec,
        interactive=f"salloc {shell.joined(resources)}",
        options=[f"--job-name={spec.title}", *resources, *_other_options(spec)],
        directory=[f"cd {spec.quoted(spec.chdir)} || exit"] if spec.chdir else [],
        threads="$SLURM_CPUS_PER_TASK" if spec.torchrun is None else str(spec.cpus_per_rank),
        start=_start(spec),
    )


def _resources(spec: JobSpec) -> list[str]:
    """Return the options that salloc needs too."""
    cpus = spec.cpus_per_rank if spec.torchrun is None else spec.cpus_per_node
    options = {
        "nodes": spec.nodes,
        "ntasks-per-node": spec.processes_per_node,
        "cpus-per-task": cpus,
        "gpus-per-node": spec.gpus_per_node or None,
        "mem": spec.mem,
        "mem-per-cpu": spec.mem_per_cpu,
        "mem-per-gpu": spec.mem_per_gpu,
        "time": days_and_clock(spec.seconds),
        "partition": spec.partition,
        "account": spec.account,
        "qos": spec.qos,
        "constraint": spec.constraint,
    }
    return _written(options) + ["--exclusive"] * spec.exclusive


def _other_options(spec: JobSpec) -> list[str]:
    options = {
        "array": spec.array,
        "output": spec.output or ("%x-%A_%a.out" if spec.array else "%x-%j.out"),
        "error": spec.error,
        "mail-user": spec.mail_user,
        "mail-type": ",".join(spec.mail_types) or None,
        "signal": spec.warning,  # to the ranks; with the prefix B: only this script would receive it
    }
    # Without --open-mode=append a requeued job would truncate its output file.
    return _written(options) + ["--requeue", "--open-mode=append"] * spec.requeue


def _start(spec: JobSpec) -> list[list[str]]:
    lines = _run(spec) if spec.torchrun is None else [*_srun_torchrun(spec, *spec.torchrun), "status=$?"]
    # The ID of the last job of an array is that of the array itself: scontrol would requeue the whole array.
    job = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if spec.array else '"$SLURM_JOB_ID"'
    last = end(
        spec,
        "Slurm does not requeue for it.",
        restarts="${SLURM_RESTART_COUNT:-0}",
        requeue=f"scontrol requeue {job}",
        refusal="not requeued",
    )
    return [lines, last]


def _written(options: Mapping[str, str | int | None]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items() if value is not None]


def _run(spec: JobSpec) -> list[str]:
    lines = run(spec, comment="mpicomm run starts the tasks with srun and the PMI of the MPI in use.")
    if spec.gpus_per_node:
        lines.insert(1, "# Each rank sees all GPUs of its node and uses one; NCCL needs access to the others.")
    return lines


def _srun_torchrun(spec: JobSpec, program: tuple[str, ...], arguments: tuple[str, ...]) -> list[str]:
    launcher = ["srun", "--mpi=none", "--kill-on-bad-exit=1", _CPUS]
    if spec.nodes == 1:
        return ["# torchrun starts the ranks.", shell.broken(launcher, [torchrun_of_one_node(spec)])]
    program = (*program, f"--nproc-per-node={spec.ranks_per_node}")
    return [
        "# srun starts one torchrun on each node, which starts the ranks there. The rendezvous is on the first node.",
        "# PET_NODE_RANK sets --node-rank of torchrun, which differs between the tasks.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a node need different ports",
        shell.broken(
            launcher,
            ["bash -c 'PET_NODE_RANK=$SLURM_NODEID exec \"$@\"' bash"],
            [
                spec.joined(program),
                '--nnodes="$SLURM_JOB_NUM_NODES"',
                '--master-addr="$first"',
                '--master-port="$port"',
            ],
            [spec.joined(arguments)],
        ),
    ]


SLURM = Scheduler(
    title="Slurm",
    submit="sbatch",
    commands=("sbatch", "salloc", "srun"),
    file="job.sbatch",
    directive="#SBATCH",
    check=_check,
    script=_script,
    mail_types=(*MAIL_TYPES, "REQUEUE", "ARRAY_TASKS", "TIME_LIMIT", "TIME_LIMIT_80"),
    array_index="SLURM_ARRAY_TASK_ID",
    has_days=True,
    requeue_signal="USR1@180",
    special_values=[("mem", "0")],  # all memory of the node
)
