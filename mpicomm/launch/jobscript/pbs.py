"""PBS job scripts: directives, `mpirun` on the hosts of the job, and the handling of its exit status."""

from __future__ import annotations

from mpicomm.launch.jobscript import option_values, shell
from mpicomm.launch.jobscript.spec import JobSpec

_MAIL = {"NONE": "n", "BEGIN": "b", "END": "e", "FAIL": "a", "ALL": "abe"}
_UNITS = {"K": "kb", "M": "mb", "G": "gb", "T": "tb"}


def script(spec: JobSpec) -> str:
    """Return the text of the script."""
    parts = [_top(spec), _environment(spec), *_start(spec)]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _top(spec: JobSpec) -> list[str]:
    file = shell.quoted(spec.file or "job.pbs")
    by_hand = [f"qsub -I {' '.join(_resources(spec))}", f'cd "$PBS_O_WORKDIR" && bash {file}']
    directives = [f"#PBS {each}" for each in (f"-N {spec.title}", *_resources(spec), *_others(spec))]
    return ["#!/bin/bash", *shell.header(spec.made_by, f"qsub {file}", *by_hand), *directives]


def _resources(spec: JobSpec) -> list[str]:
    """Return the options that an interactive job needs too."""
    options = {"-q": spec.partition, "-A": spec.account, "-P": spec.project}
    return [
        f"-l select={spec.nodes}:{_chunk(spec)}",
        f"-l place=scatter{':exclhost' if spec.exclusive else ''}",
        f"-l walltime={option_values.clock(spec.seconds)}",
        *[f"{option} {value}" for option, value in options.items() if value],
    ]


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


def _others(spec: JobSpec) -> list[str]:
    mail = "".join(dict.fromkeys("".join(_MAIL[each] for each in spec.mail_types if each)))
    options = {"-J": spec.array, "-o": spec.output, "-e": spec.error, "-M": spec.mail_user, "-m": mail}
    joined = [] if spec.error else ["-j oe"]
    return joined + [f"{option} {value}" for option, value in options.items() if value]


def _environment(spec: JobSpec) -> list[str]:
    where = '"$PBS_O_WORKDIR"' if spec.chdir is None else shell.quoted(spec.chdir)
    lines = [
        f"cd {where} || exit  # PBS starts in the home directory",
        "umask 022  # PBS's default makes all files unreadable for other users",
        *shell.prepared(spec.module, spec.venv),
        f"export OMP_NUM_THREADS={spec.cpus_per_rank}  # otherwise each rank starts one thread per core",
    ]
    return lines + shell.exports(spec.variables)


def _start(spec: JobSpec) -> list[list[str]]:
    if spec.torchrun is None:
        return [*([_agent(spec)] if spec.no_ssh else []), _of_ranks(spec), _end(spec)]
    return [_of_one_torchrun(spec, spec.torchrun)] if spec.nodes == 1 else [_of_torchruns(spec, spec.torchrun)]


def _agent(spec: JobSpec) -> list[str]:
    """Return the lines that replace ssh; pbs_tmrsh takes other arguments than mpirun passes."""
    use = "PRTE_MCA_plm_ssh_agent=$agent" if spec.flavour == "openmpi" else "HYDRA_LAUNCHER_EXEC=$agent"
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
        *["export HYDRA_LAUNCHER=ssh"] * (spec.flavour == "mpich"),
        f"export {use}",
    ]


def _of_ranks(spec: JobSpec) -> list[str]:
    launcher = ["mpirun", '-n "$ranks"', '--hostfile "$PBS_NODEFILE"']
    lines, variables = [], []
    if spec.flavour == "openmpi":
        lines = [
            "# Open MPI counts a host that is named once as one slot per core. It binds ranks to the first cores,",
            "# which another job may use, and forwards only the variables that -x names to other hosts.",
        ]
        launcher += [f"--map-by ppr:{spec.ranks_per_node}:node", "--bind-to none"]
        variables = [f"-x {name}" for name in _forwarded(spec)]
    return [
        'ranks=$(wc -l <"$PBS_NODEFILE")  # one line per rank: select x mpiprocs',
        "",
        "# On qdel and at the end of the walltime PBS sends SIGTERM to all processes. Without the trap this shell",
        "# would exit at once and lose the exit status of the ranks.",
        *(["terminated=", "trap terminated=yes TERM"] if spec.requeue else ["trap : TERM"]),
        *lines,
        *shell.about_gpus(spec.ranks_per_node, spec.gpus_per_node),
        shell.broken(launcher, variables, [shell.joined(spec.command)]),
        "status=$?",
    ]


def _forwarded(spec: JobSpec) -> list[str]:
    """Return the variables that ranks on other hosts need to find Python and libraries, and the user's variables."""
    names = ["PATH", *["LD_LIBRARY_PATH"] * bool(spec.module), "OMP_NUM_THREADS"]
    return list(dict.fromkeys([*names, *[name for name, _ in spec.variables]]))


def _of_one_torchrun(spec: JobSpec, words: tuple[str, ...]) -> list[str]:
    program = spec.command[: len(spec.command) - len(words)]
    command = shell.joined([*program, "--standalone", f"--nproc-per-node={spec.ranks_per_node}", *words])
    return ["# torchrun starts the ranks.", command, 'exit "$?"  # the status of the ranks becomes that of the job']


def _of_torchruns(spec: JobSpec, words: tuple[str, ...]) -> list[str]:
    # PBS's commands start programs on other hosts in the home directory, with almost no variables.
    environment = [f'{name}="${name}"' for name in _forwarded(spec)]
    program = spec.command[: len(spec.command) - len(words)]
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
            [shell.joined(words), "&"],
            indent="    ",
        ),
        "done",
        'for _ in "${hosts[@]}"; do',
        '    wait -n || exit "$?"  # PBS ends the processes on the other hosts',
        "done",
    ]


def _end(spec: JobSpec) -> list[str]:
    last = 'exit "$status"  # the status of the ranks becomes that of the job'
    return [*_resubmission(spec), last] if spec.requeue else [last]


def _resubmission(spec: JobSpec) -> list[str]:
    return [
        "# Status 85: the ranks exited before the time limit, with a checkpoint. Only operators may requeue in PBS, so",
        "# submit the script again, without the options of the first qsub command line; but not after qdel.",
        "restarts=${JOB_RESTARTS:-0}",
        'if [ "$status" -eq 85 ] && [ -z "$terminated" ]; then',
        f'    if [ "$restarts" -lt {spec.max_restarts} ]; then',
        '        (cd "$PBS_O_WORKDIR" && qsub -v JOB_RESTARTS=$((restarts + 1)) "$0")',
        "    else",
        f'        echo "not submitted again: limit of {spec.max_restarts} restarts reached; submit it to continue" >&2',
        "    fi",
        "fi",
    ]
