"""The script for Slurm: directives, then `srun`, then what follows from its exit status."""

from __future__ import annotations

from collections.abc import Mapping

from mpicomm.launch.jobscript import option_values, shell
from mpicomm.launch.jobscript.spec import JobSpec

_TYPES = {"openmpi": "pmix", "mpich": "pmi2"}  # of srun's --mpi: a wrong one makes N worlds of one rank
_CPUS = '--cpus-per-task="$SLURM_CPUS_PER_TASK"'


def script(spec: JobSpec) -> str:
    """Return the text."""
    parts = [_top(spec), _environment(spec), _start(spec), _end(spec)]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _top(spec: JobSpec) -> list[str]:
    file = shell.quoted(spec.file or "job.sbatch")
    by_hand = f"salloc {shell.joined(_resources(spec))} bash {file}"
    directives = [f"#SBATCH {each}" for each in (f"--job-name={spec.title}", *_resources(spec), *_others(spec))]
    return ["#!/bin/bash", *shell.header(spec.made_by, f"sbatch {file}", by_hand), *directives]


def _resources(spec: JobSpec) -> list[str]:
    """Return what salloc needs as well."""
    cpus = spec.cpus_per_rank if spec.torchrun is None else spec.cpus_per_node
    options = {
        "nodes": spec.nodes,
        "ntasks-per-node": spec.processes_per_node,
        "cpus-per-task": cpus,
        "gpus-per-node": spec.gpus_per_node or None,
        "mem": spec.mem,
        "mem-per-cpu": spec.mem_per_cpu,
        "mem-per-gpu": spec.mem_per_gpu,
        "time": option_values.days_and_clock(spec.seconds),
        "partition": spec.partition,
        "account": spec.account,
        "qos": spec.qos,
        "constraint": spec.constraint,
    }
    return _written(options) + ["--exclusive"] * spec.exclusive


def _others(spec: JobSpec) -> list[str]:
    options = {
        "array": spec.array,
        "output": spec.output or ("%x-%A_%a.out" if spec.array else "%x-%j.out"),
        "error": spec.error,
        "mail-user": spec.mail_user,
        "mail-type": ",".join(spec.mail_types) or None,
        "signal": spec.warning,  # to the ranks; B: would send it to this script alone
    }
    # Without the second, a job that goes on would begin its output anew.
    return _written(options) + ["--requeue", "--open-mode=append"] * spec.requeue


def _written(options: Mapping[str, str | int | None]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items() if value is not None]


def _environment(spec: JobSpec) -> list[str]:
    lines = [f"cd {shell.quoted(spec.chdir)} || exit"] if spec.chdir else []
    lines += shell.prepared(spec.module, spec.venv)
    threads = "$SLURM_CPUS_PER_TASK" if spec.torchrun is None else str(spec.cpus_per_rank)
    lines.append(f"export OMP_NUM_THREADS={threads}  # or each rank makes a thread for every core")
    return lines + shell.exports(spec.variables)


def _start(spec: JobSpec) -> list[str]:
    lines = _of_torchrun(spec, spec.torchrun) if spec.torchrun is not None else _of_ranks(spec)
    return [*lines, "status=$?"]


def _of_ranks(spec: JobSpec) -> list[str]:
    lines = ["# srun starts the ranks. Since Slurm 22.05 it has to be told of the cores again."]
    if spec.gpus_per_node:
        lines.append("# A rank sees all GPUs of its node and takes one; NCCL needs to see the others.")
    lines += shell.about_gpus(spec.ranks_per_node, spec.gpus_per_node)
    if spec.requeue:
        lines += [
            "# The first rank to leave with 85 must not have the others killed: srun would report that instead.",
            "# When a rank dies, mpicomm ends the job.",
        ]
    kill = f"--kill-on-bad-exit={0 if spec.requeue else 1}"
    launcher = ["srun", f"--mpi={_TYPES[spec.flavour]}", kill, _CPUS]
    return [*lines, shell.broken(launcher, [shell.joined(spec.command)])]


def _of_torchrun(spec: JobSpec, words: tuple[str, ...]) -> list[str]:
    launcher = ["srun", "--mpi=none", "--kill-on-bad-exit=1", _CPUS]
    program = [*spec.command[: len(spec.command) - len(words)], f"--nproc-per-node={spec.ranks_per_node}"]
    if spec.nodes == 1:
        return [
            "# torchrun starts the ranks.",
            shell.broken(launcher, [shell.joined([*program, "--standalone", *words])]),
        ]
    return [
        "# srun starts a torchrun on each node; these meet on the first, and start the ranks. PET_NODE_RANK is for the",
        "# --node-rank of torchrun, which only the tasks know.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a node need different ones",
        shell.broken(
            launcher,
            ["bash -c 'PET_NODE_RANK=$SLURM_NODEID exec \"$@\"' bash"],
            [
                shell.joined(program),
                '--nnodes="$SLURM_JOB_NUM_NODES"',
                '--master-addr="$first"',
                '--master-port="$port"',
            ],
            [shell.joined(words)],
        ),
    ]


def _end(spec: JobSpec) -> list[str]:
    last = 'exit "$status"  # that of the ranks, and so of the job'
    return [*_requeue(spec), last] if spec.requeue else [last]


def _requeue(spec: JobSpec) -> list[str]:
    # The number of an array's last job is that of the array: requeue would take them all.
    job = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if spec.array else '"$SLURM_JOB_ID"'
    return [
        "# 85: the ranks have left in time, with a checkpoint. Slurm starts no job again for its status.",
        'if [ "$status" -eq 85 ]; then',
        f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {spec.max_restarts} ]; then',
        f"        scontrol requeue {job}",
        "    else",
        f'        echo "not requeued: {spec.max_restarts} restarts are the limit; to go on, submit it" >&2',
        "    fi",
        "fi",
    ]
