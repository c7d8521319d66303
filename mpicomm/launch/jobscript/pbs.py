"""PBS job scripts: directives, `mpirun` on the hosts of the job, and the handling of its exit status."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpicomm.launch.jobscript import scheduler, shell
from mpicomm.launch.jobscript.options import clock, flag
from mpicomm.launch.jobscript.scheduler import Scheduler, end, gpu_comment, torchrun_of_one_node

if TYPE_CHECKING:
    from mpicomm.launch.jobscript.spec import JobSpec

_MAIL = {"NONE": "n", "BEGIN": "b", "END": "e", "FAIL": "a", "ALL": "abe"}
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
    where = '"$PBS_O_WORKDIR"' if spec.chdir is None else shell.quoted(spec.chdir)
    return scheduler.script(
        spec,
        interactive=f'qsub -I {" ".join(resources)}\ncd "$PBS_O_WORKDIR" &&',
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
        return [*([_agent(spec)] if spec.no_ssh else []), _mpirun(spec), _end(spec)]
    if spec.nodes > 1:
        return [_torchrun_on_hosts(spec, *spec.torchrun)]
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


def _agent(spec: JobSpec) -> list[str]:
    """Return the lines that replace ssh; pbs_tmrsh takes other arguments than mpirun passes."""
    variables = {name: value.format(agent="$agent") for name, value in spec.implementation.agent_variables.items()}
    return [
        "# There is no ssh between the hosts: mpirun starts its daemons through PBS.",
        'agent=$(mktemp "$PWD/.pbs-agent-XXXXXX") || exit  # in a directory that all hosts share',
        "trap 'rm -f \"$agent\"' EXIT",
        "cat >\"$agent\" <<'END'",
        "#!/bin/sh",
        "while :; do case $1 in -*) shift ;; *) break ;; esac; done  # skip the options for ssh",
        "host=$1",
        "shift",
        'exec pbs_tmrsh "$host" /bin/sh -c "$*"',
        "END",
        'chmod 755 "$agent"',
        *[f"export {name}={value}" for name, value in variables.items()],
    ]


def _mpirun(spec: JobSpec) -> list[str]:
    mpi = spec.implementation
    mapping = mpi.job_options.format(per_node=spec.ranks_per_node)
    launcher = ["mpirun", '-n "$ranks"', '--hostfile "$PBS_NODEFILE"', *([mapping] if mapping else [])]
    variables = [mpi.forwarded.format(name=name) for name in _forwarded(spec) if mpi.forwarded]
    return [
        'ranks=$(wc -l <"$PBS_NODEFILE")  # one line per rank: select x mpiprocs',
        "",
        "# On qdel and at the end of the walltime PBS sends SIGTERM to all processes. Without the trap this shell",
        "# would exit at once and lose the exit status of the ranks.",
        *(["terminated=", "trap terminated=yes TERM"] if spec.requeue else ["trap : TERM"]),
        *[f"# {line}" for line in mpi.job_comment],
        *gpu_comment(spec),
        shell.broken(launcher, variables, [shell.joined(spec.command)]),
        "status=$?",
    ]


def _forwarded(spec: JobSpec) -> list[str]:
    """Return the variables that ranks on other hosts need to find Python and libraries, and the user's variables."""
    names = ["PATH", *["LD_LIBRARY_PATH"] * bool(spec.module), "OMP_NUM_THREADS"]
    return list(dict.fromkeys([*names, *[name for name, _ in spec.variables]]))


def _torchrun_on_hosts(spec: JobSpec, program: tuple[str, ...], arguments: tuple[str, ...]) -> list[str]:
    # PBS's commands start programs on other hosts in the home directory, with almost no variables.
    environment = [f'{name}="${name}"' for name in _forwarded(spec)]
    number = "${PBS_JOBID%%[!0-9]*}" + (" + PBS_ARRAY_INDEX" if spec.array else "")
    return [
        "# PBS starts one torchrun on each host, which starts the ranks there. The rendezvous is on the first host.",
        "mapfile -t hosts < <(awk '!seen[$0]++' \"$PBS_NODEFILE\")",
        f"port=$((20000 + ({number}) % 10000))  # jobs that share a host need different ports",
        'for node_rank in "${!hosts[@]}"; do',
        shell.broken(
            ['    pbs_tmrsh "${hosts[node_rank]}" /usr/bin/env -C "$PWD"'],
            environment,
            [shell.joined(program), f"--nproc-per-node={spec.ranks_per_node}", '--nnodes="${#hosts[@]}"'],
            ['--node-rank="$node_rank"', '--master-addr="${hosts[0]}"', '--master-port="$port"'],
            [shell.joined(arguments), "&"],
            indent="    ",
        ),
        "done",
        'for _ in "${hosts[@]}"; do',
        '    wait -n || exit "$?"  # PBS ends the processes on the other hosts',
        "done",
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


PBS = Scheduler(title="PBS", commands=("qsub",), file="job.pbs", directive="#PBS", check=_check, script=_script)
