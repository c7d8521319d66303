"""Flux job scripts: directives, the start of the ranks, and the handling of their exit status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpicomm.launch.jobscript import scheduler, shell
from mpicomm.launch.jobscript.scheduler import Scheduler, end, run, torchrun_of_one_node

if TYPE_CHECKING:
    from mpicomm.launch.jobscript.spec import JobSpec


def _check(spec: JobSpec) -> None:
    del spec  # the options that Flux lacks have no value here


def _script(spec: JobSpec) -> str:
    resources = _resources(spec)
    outputs = {"output": spec.output or f"{spec.title}-{{{{id}}}}.out", "error": spec.error}
    return scheduler.script(
        spec,
        interactive=f"flux alloc {shell.joined(resources)}",
        options=[
            f"--job-name={spec.title}",
            *resources,
            *[f"--{name}={value}" for name, value in outputs.items() if value],
        ],
        directory=[
            *(["submitted=$PWD"] if spec.requeue else []),
            *([f"cd {shell.quoted(spec.chdir)} || exit"] if spec.chdir else []),
        ],
        threads=str(spec.cpus_per_rank),
        start=_start(spec),
    )


def _resources(spec: JobSpec) -> list[str]:
    """Return the options that flux alloc needs too: a slot is the part of a node that the job uses."""
    options = {
        "nodes": spec.nodes,
        "nslots": spec.nodes,
        "cores-per-slot": spec.cpus_per_node,
        "gpus-per-slot": spec.gpus_per_node or None,
        "time-limit": f"{spec.seconds}s",
        "queue": spec.partition,
        "bank": spec.account,
    }
    return [f"--{name}={value}" for name, value in options.items() if value is not None] + (
        ["--exclusive"] * spec.exclusive
    )


def _start(spec: JobSpec) -> list[list[str]]:
    if spec.torchrun is None:
        number = f"-n {spec.nodes * spec.ranks_per_node}"
        return [run(spec, number, comment="mpicomm run starts the ranks with flux run."), _end(spec)]
    return [[*_torchrun(spec, *spec.torchrun), "status=$?"], _end(spec)]


def _torchrun(spec: JobSpec, program: tuple[str, ...], arguments: tuple[str, ...]) -> list[str]:
    if spec.nodes == 1:
        return ["# torchrun starts the ranks.", torchrun_of_one_node(spec)]
    launcher = ["flux run", f"-N {spec.nodes}", f"-n {spec.nodes}", f"-c {spec.cpus_per_node}"]
    launcher += [f"-g {spec.gpus_per_node}"] * bool(spec.gpus_per_node)
    return [
        "# Flux starts one torchrun on each node, which starts the ranks there. The rendezvous is on this node.",
        "# PET_NODE_RANK sets --node-rank of torchrun, which differs between the tasks.",
        "port=$((20000 + $$ % 10000))  # jobs that share a node need different ports",
        shell.broken(
            launcher,
            ["bash -c 'PET_NODE_RANK=$FLUX_TASK_RANK exec \"$@\"' bash"],
            [spec.joined((*program, f"--nproc-per-node={spec.ranks_per_node}")), f"--nnodes={spec.nodes}"],
            ['--master-addr="$(hostname)"', '--master-port="$port"'],
            [spec.joined(arguments)],
        ),
    ]


def _end(spec: JobSpec) -> list[str]:
    # Without --parent the script would be submitted to the instance of this job, which ends with it.
    submit = FLUX.submission(spec.file or FLUX.file).replace("flux ", "flux --parent ", 1)
    return end(
        spec,
        "Submit the script again.\nrestarts=${JOB_RESTARTS:-0}",
        restarts="$restarts",
        requeue=f'(cd "$submitted" && JOB_RESTARTS=$((restarts + 1)) {submit})',
        refusal="not submitted again",
    )


FLUX = Scheduler(
    title="Flux",
    submit="flux batch",
    commands=("flux",),
    file="job.flux",
    directive="# flux:",
    check=_check,
    script=_script,
    resubmits_file=True,
)
