"""`mpicomm run`: starts ranks with the launcher that belongs to the MPI, or with that of a scheduler."""

from __future__ import annotations

import argparse
import functools
import math
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpicomm.cli import attempts, foreign_options, launching, stage_env
from mpicomm.cli.argument_types import Parser, count
from mpicomm.cli.attempts import RestartPolicy
from mpicomm.cli.console import failed, print_message
from mpicomm.errors import LaunchError, MPINotFoundError
from mpicomm.launch import allocation, binding, environment, request, selection
from mpicomm.launch.allocation import Host
from mpicomm.launch.containers import PYTHON, RUNTIMES, Container
from mpicomm.launch.node_range import NodeRange
from mpicomm.launch.request import Node, Request
from mpicomm.settings import SPARES

_PORT = 29500  # torchrun's default
_ELASTIC = "HOROVOD_ELASTIC"  # with it, hvd.init() lets hvd.elastic.run continue without failed ranks
_DESCRIPTION = """\
Start a program on several ranks, with the launcher that belongs to the MPI that mpi4py loads.

In the allocation of a scheduler it starts ranks on all allocated hosts. The command prints the launch command and runs
it. On SIGTERM or Ctrl-C, a program that handles SIGTERM, as mpicomm.Trainer with a checkpoint_dir does, has the grace
period to save a checkpoint and exit. The exit status is that of the launcher, but not 0 if a rank that called
bootstrap() did not reach the end of the program."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "run",
        help="start a program on several ranks",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="mpicomm run [OPTIONS] SCRIPT.py|-m MODULE|COMMAND [ARGUMENT ...]",
        allow_abbrev=False,
    )
    # 1. ranks, hosts and output
    number = parser.add_mutually_exclusive_group()
    number.add_argument(
        "-n",
        dest="ranks",
        metavar="N",
        type=count,
        help="number of ranks (default: that of the allocation or of the hosts, or one per GPU, or one per core)",
    )
    number.add_argument(*foreign_options.PER_NODE, metavar="N", type=_per_node, help="number of ranks on each host")
    parser.add_argument(*foreign_options.FOREIGN, action=_Refuse, help=argparse.SUPPRESS)
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--hosts", metavar="A:4,B:4", help="hosts, and the number of ranks on each")
    hosts.add_argument("--hostfile", metavar="F", help="hosts in a file: `a slots=4` or `a:4` on each line")
    _add_repeated(parser, "--env", "NAME[=VALUE]", "pass this variable to the ranks on all hosts")
    _add_container_options(parser)
    parser.add_argument(
        "--launcher",
        choices=selection.LAUNCHERS,
        help="the launcher that starts the ranks (default: that of the scheduler, or the mpiexec of the MPI in use)",
    )
    _add_repeated(
        parser,
        foreign_options.LAUNCHER_ARGUMENT,
        "ARG",
        "pass this argument to the launcher, after the options that mpicomm run passes",
        type=_launcher_argument,
    )
    _add_repeated(
        parser,
        "--no-env",
        "NAME",
        "start the ranks on all hosts as if this variable were not set; NAME may be a pattern, as in 'NCCL_*'",
    )
    parser.add_argument(
        foreign_options.BIND,
        choices=binding.MODES,
        help="the cores of each rank: an equal share of all (cores), a share within a NUMA node (numa), those near its "
        "GPU (gpu), gpu or without GPUs numa (auto), or all (none) (default: the launcher's binding)",
    )
    parser.add_argument(
        "--stage-env",
        metavar="DIR",
        nargs="?",
        const=os.environ.get("TMPDIR") or "/tmp",
        type=_node_directory,
        help="copy the Python environment to DIR on every node (default: %(const)s) before the ranks start, and run "
        "them from there",
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "mpi"),
        help="let init_process_group() of the program call mpicomm.bootstrap(BACKEND), in place of starting the "
        "program's backend",
    )
    parser.add_argument("--log-dir", metavar="D", help="write each rank's output to D/rank_003.log; show only rank 0's")
    parser.add_argument("--tag-output", action="store_true", help="show every rank's output, with its rank")
    parser.add_argument("--dry-run", action="store_true", help="print the launch command without running it")
    parser.add_argument(
        foreign_options.HOROVOD,
        action="store_true",
        help="run a script that imports horovod.torch, with mpicomm.horovod in its place; accepts horovodrun's options",
    )
    # 2. nodes, restarts and stop
    parser.add_argument(
        "--nnodes", metavar="MIN:MAX", type=_node_range, help="number of hosts to use, N or MIN:MAX (default: all)"
    )
    parser.add_argument(
        "--max-restarts",
        metavar="N",
        type=_number,
        default=0,
        help="start the ranks again after a failure, up to N times, on the hosts that are left (default: 0)",
    )
    parser.add_argument(
        "--exclude-failed",
        action="store_true",
        help="leave out of a restart the host on which a rank failed first; allocate spare hosts, and pass --nnodes",
    )
    parser.add_argument(
        "--fault-tolerant",
        action="store_true",
        help='let the other ranks continue if a rank dies, in programs that call bootstrap(on_failure="recover") '
        "(Open MPI 5)",
    )
    parser.add_argument(
        "--spares",
        metavar="N",
        type=_number,
        default=0,
        help="let N of the ranks of -n wait to replace ranks that die; implies --fault-tolerant",
    )
    parser.add_argument(
        "--grace-period",
        metavar="S",
        type=_seconds,
        default=launching.GRACE_SECONDS,
        help="seconds for the ranks to save a checkpoint and exit on SIGTERM or Ctrl-C (default: %(default)g)",
    )
    # 3. launch without MPI
    by_hand = parser.add_argument_group(
        "launch without MPI, one command on each node",
        "starts torchrun: -n is the number of ranks on this node, --nnodes the number of nodes",
    )
    by_hand.add_argument("--node-rank", metavar="K", type=int, help="rank of this node, from 0")
    by_hand.add_argument("--master-addr", metavar="HOST", help="address of node 0 that all nodes can reach")
    by_hand.add_argument("--master-port", metavar="P", type=count, help=f"free port on node 0 (default: {_PORT})")
    # 4. program: REMAINDER passes it all arguments that follow
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, default=[], help="a module and its arguments")
    parser.add_argument("words", metavar="COMMAND", nargs=argparse.REMAINDER, help="the program and its arguments")
    parser.set_defaults(run=run, parser=parser)
    assert isinstance(parser, Parser)
    parser.translate = functools.partial(_translated, parser)


def _add_container_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--container", metavar="IMAGE", help="run each rank in a container of this image, with its python and its MPI"
    )
    parser.add_argument(
        "--container-runtime",
        choices=tuple(RUNTIMES),
        help="runtime of the containers (default: an installed one that is made for the image)",
    )
    _add_repeated(
        parser,
        "--container-bind",
        "PATH[:TARGET[:ro]]",
        "make a path of the hosts visible in the containers, as the working directory is",
    )


def _add_repeated(parser: argparse.ArgumentParser, option: str, metavar: str, purpose: str, **others: Any) -> None:
    """Add an option whose values, one for each time that it is passed, are a list."""
    purpose += "; repeat for more"
    parser.add_argument(option, metavar=metavar, action="append", default=[], help=purpose, **others)


def _translated(parser: Parser, line: Sequence[str]) -> list[str]:
    """Replace the options of horovodrun after `--horovod`, and print the equivalents."""
    try:
        translated, notes = foreign_options.translated(line)
    except ValueError as error:
        parser.error(str(error))
    for note in notes:
        print_message("run", note)
    return translated


class _Refuse(argparse.Action):
    """Rejects an option of another launcher, with the correct command line."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        assert isinstance(parser, Parser)
        option = rest[-1]
        ours = foreign_options.FOREIGN[option]
        meant = request.command_line(foreign_options.corrected(parser.line))
        parser.error(f"unknown option {option}; the option of mpicomm run is {ours}:\n  {parser.prog} {meant}")


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks, and return their exit status."""
    if (note := foreign_options.note(arguments.parser.line)) is not None:
        print_message("run", f"note: {note}")
    try:
        asked, policy = _request(arguments), _policy(arguments)
        if arguments.dry_run:
            for start in stage_env.starts(attempts.first(asked, policy)):
                print(start.shown(os.environ))
            return 0
        if arguments.log_dir is not None:
            Path(arguments.log_dir).mkdir(parents=True, exist_ok=True)
        return attempts.run(asked, policy, arguments.grace_period)
    except (LaunchError, MPINotFoundError, OSError) as error:
        return failed("run", error)
    except KeyboardInterrupt:  # between two attempts
        return 128 + signal.SIGINT


def _request(arguments: argparse.Namespace) -> Request:
    hosts, container = _hosts(arguments), _container(arguments)
    python = sys.executable if container is None else PYTHON
    environment.refuse_contradiction([word.partition("=")[0] for word in arguments.env], arguments.no_env)
    environ = environment.without(os.environ, arguments.no_env)
    program = request.program(arguments.words, arguments.module, python)
    if container is None:  # else the program may be a file of the image
        _check_exists(program)
    spares = {SPARES: str(arguments.spares)} if arguments.spares else {}
    is_fault_tolerant = _is_fault_tolerant(arguments)
    elastic = {}
    if arguments.horovod:
        program = request.with_horovod(program, python)
        elastic = {_ELASTIC: "1"} if is_fault_tolerant else {}
    return Request(
        program=program,
        ranks=arguments.ranks or (arguments.nproc_per_node if arguments.node_rank is not None else None),
        hosts=hosts,
        launcher=arguments.launcher,
        node=_node(arguments),
        log_dir=_log_dir(arguments),
        appends_logs=allocation.requeues(os.environ) > 0,
        tag_output=arguments.tag_output,
        is_fault_tolerant=is_fault_tolerant,
        launcher_arguments=tuple(arguments.launcher_arg),
        variables={**request.variables(arguments.env, environ), **spares, **elastic},
        excluded=tuple(arguments.no_env),
        sets_variables=arguments.node_rank is None,
        replaced_backend=arguments.backend,
        bind=arguments.bind,
        stage_directory=arguments.stage_env,
        container=container,
    )


def _is_fault_tolerant(arguments: argparse.Namespace) -> bool:
    return arguments.fault_tolerant or arguments.spares > 0


def _log_dir(arguments: argparse.Namespace) -> str | None:
    """Return the directory of the logs; its real path with a container, in which a symbolic link may not exist."""
    directory: str | None = arguments.log_dir
    return directory if directory is None or arguments.container is None else str(Path(directory).resolve())


def _container(arguments: argparse.Namespace) -> Container | None:
    if arguments.container is None:
        if arguments.container_runtime or arguments.container_bind:
            raise LaunchError("--container-runtime and --container-bind need --container.\nPass --container IMAGE.")
        return None
    if arguments.stage_env is not None:
        raise LaunchError(
            "--stage-env copies the Python environment of this host, which ranks in a container do not use.\n"
            "Remove --stage-env, or --container."
        )
    is_of_scheduler = arguments.launcher in (None, selection.SRUN) and arguments.node_rank is None
    is_for_mpirun = arguments.hosts is not None or arguments.hostfile is not None or _is_fault_tolerant(arguments)
    environ = environment.without(os.environ, arguments.no_env)
    return launching.container(
        arguments.container,
        arguments.container_runtime,
        arguments.container_bind,
        {**environ, **request.outside_container(request.variables(arguments.env, environ))},
        log_dir=_log_dir(arguments),
        may_use_srun=is_of_scheduler and not is_for_mpirun,
    )


def _policy(arguments: argparse.Namespace) -> RestartPolicy:
    if arguments.node_rank is not None:
        if arguments.max_restarts:
            raise LaunchError("--max-restarts does not work with --node-rank.\nUse torchrun --max-restarts.")
        if arguments.backend:
            raise LaunchError(
                f"--backend {arguments.backend} needs MPI, which --node-rank does not: it starts torchrun.\n"
                "Remove one of the two."
            )
        if arguments.stage_env:
            raise LaunchError("--stage-env does not work with --node-rank, which starts torchrun.\nRemove --stage-env.")
        return RestartPolicy()
    if arguments.exclude_failed and not arguments.max_restarts:
        raise LaunchError("--exclude-failed has no effect without restarts.\nAdd --max-restarts N.")
    nodes = arguments.nnodes
    return RestartPolicy(
        max_restarts=arguments.max_restarts,
        nodes=nodes or NodeRange(),
        is_range_given=nodes is not None,
        per_node=arguments.nproc_per_node,
        excludes_failed=arguments.exclude_failed,
    )


def _node_range(text: str) -> NodeRange:
    try:
        return NodeRange.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _per_node(text: str) -> int | None:
    """Parse the number of ranks on each host; torchrun's words stand for the default."""
    return None if text in ("auto", "cpu", "gpu") else count(text)


def _node_directory(text: str) -> str:
    """Parse the path of a directory of every node; the next word is another one if the user has omitted it."""
    if not Path(text).is_absolute() or Path(text).is_file():
        raise argparse.ArgumentTypeError(
            f"expected the absolute path of a directory, got {text}; to omit it, write --stage-env -- {text}"
        )
    return text


def _number(text: str) -> int:
    """Parse an integer of 0 or more."""
    return 0 if text == "0" else count(text)


def _launcher_argument(text: str) -> str:
    """Parse an argument of the launcher, which would take an empty one for the program."""
    if not text:
        raise argparse.ArgumentTypeError("expected an argument of the launcher, got an empty one")
    return text


def _seconds(text: str) -> float:
    """Parse a positive number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text}")
    return seconds


def _check_exists(program: tuple[str, ...]) -> None:
    """Report a missing program once, instead of once on each rank."""
    command = program[0]
    if command == sys.executable:
        script = program[1] if len(program) > 1 else ""
        if script.endswith(".py") and not Path(script).is_file():
            raise LaunchError(f"script {script} does not exist in {Path.cwd()}.\nCorrect the path.")
    elif not shutil.which(command):
        raise LaunchError(f"command {command} was not found in PATH.\nPass its full path, or correct PATH.")


def _hosts(arguments: argparse.Namespace) -> tuple[Host, ...]:
    if arguments.hosts is not None:
        return allocation.parse_hosts(arguments.hosts)
    if arguments.hostfile is not None:
        return allocation.parse_host_file(Path(arguments.hostfile).read_text(), arguments.hostfile)
    return ()


def _node(arguments: argparse.Namespace) -> Node | None:
    nodes, rank, addr, port = arguments.nnodes, arguments.node_rank, arguments.master_addr, arguments.master_port
    if not any(given is not None for given in (rank, addr, port)):
        return None
    if arguments.launcher is not None:
        raise LaunchError(
            f"--launcher {arguments.launcher} cannot be combined with --node-rank, with which torchrun starts the "
            f"ranks.\nRemove one of the two."
        )
    if nodes is not None and nodes.least != nodes.most:
        raise LaunchError(f"--nnodes must be one number with --node-rank, got {nodes}.\nPass --nnodes N.")
    if None in (nodes, rank, addr):
        raise LaunchError(
            "--nnodes, --node-rank and --master-addr must be given together.\n"
            "On each node: mpicomm run --nnodes 2 --node-rank 0 --master-addr HOST train.py, with its own --node-rank"
        )
    if arguments.hosts is not None or arguments.hostfile is not None:
        raise LaunchError(
            "--node-rank cannot be combined with --hosts or --hostfile.\n"
            "Remove --hosts and --hostfile, or remove --node-rank, --master-addr and --master-port."
        )
    if not 0 <= rank < nodes.least:
        raise LaunchError(
            f"--node-rank must be from 0 to {nodes.least - 1} with --nnodes {nodes}, got {rank}.\n"
            f"Pass the index of this node."
        )
    return Node(rank, nodes.least, addr, port or _PORT)
