"""Slurm job scripts: directives, `srun`, and the handling of its exit status."""

from __future__ import annotations

from collections.abc import Mapping

from mpicomm.launch.jobscript import option_values, shell
from mpicomm.launch.jobscript.spec import JobSpec

_TYPES = {"openmpi": "pmix", "mpich": "pmi2"}  # values of srun --mpi: a wrong one starts N worlds of size 1
_CPUS = '--cpus-per-task="$SLURM_CPUS_PER_TASK"'


def script(spec: JobSpec) -> str:
    """Return the text of the script."""
    parts = [_top(spec), _environment(spec), _start(spec), _end(spec)]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _top(spec: JobSpec) -> list[str]:
    file = shell.quoted(spec.file or "job.sbatch")
    by_hand = f"salloc {shell.joined(_resources(spec))} bash {file}"
    directives = [f"#SBATCH {each}" for each in (f"--job-name={spec.title}", *_resources(spec), *_others(spec))]
    return ["#!/bin/bash", *shell.header(spec.made_by, f"sbatch {file}", by_hand), *directives]


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
        "signal": spec.warning,  # to the ranks; with the prefix B: only this script would receive it
    }
    # Without --open-mode=append a requeued job would truncate its output file.
    return _written(options) + ["--requeue", "--open-mode=append"] * spec.requeue


def _written(options: Mapping[str, str | int | None]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items() if value is not None]


def _environment(spec: JobSpec) -> list[str]:
    lines = [f"cd {shell.quoted(spec.chdir)} || exit"] if spec.chdir else []
    lines += shell.prepared(spec.module, spec.venv)
    threads = "$SLURM_CPUS_PER_TASK" if spec.torchrun is None else str(spec.cpus_per_rank)
    lines.append(f"export OMP_NUM_THREADS={threads}  # otherwise each rank starts one thread per core")
    return lines + shell.exports(spec.variables)


def _start(spec: JobSpec) -> list[str]:
    lines = _of_torchrun(spec, spec.torchrun) if spec.torchrun is not None else _of_ranks(spec)
    return [*lines, "status=$?"]


def _of_ranks(spec: JobSpec) -> list[str]:
    lines = ["# srun starts the ranks. Since Slurm 22.05 it does not inherit --cpus-per-task from the job."]
    if spec.gpus_per_node:
        lines.append("# Each rank sees all GPUs of its node and uses one; NCCL needs access to the others.")
    lines += shell.about_gpus(spec.ranks_per_node, spec.gpus_per_node)
    if spec.requeue:
        lines += [
            "# srun must not kill the other ranks if one exits with status 85: it would report their status instead.",
            "# If a rank dies, mpicomm aborts the job.",
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
        "# srun starts one torchrun on each node, which starts the ranks there. The rendezvous is on the first node.",
        "# PET_NODE_RANK sets --node-rank of torchrun, which differs between the tasks.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a node need different ports",
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
    last = 'exit "$status"  # the status of the ranks becomes that of the job'
    return [*_requeue(spec), last] if spec.requeue else [last]


def _requeue(spec: JobSpec) -> list[str]:
    # The ID of the last job of an array is that of the array itself: scontrol would requeue the whole array.
    job = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if spec.array else '"$SLURM_JOB_ID"'
    return [
        "# Status 85: the ranks exited before the time limit, with a checkpoint. Slurm does not requeue for it.",
        'if [ "$status" -eq 85 ]; then',
        f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {spec.max_restarts} ]; then',
        f"        scontrol requeue {job}",
        "    else",
        f'        echo "not requeued: limit of {spec.max_restarts} restarts reached; submit it to continue" >&2',
        "    fi",
        "fi",
    ]
