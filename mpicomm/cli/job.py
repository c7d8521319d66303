"""`mpicomm job`: prints a script with which a scheduler runs a program on many ranks."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mpicomm.cli.console import FAILED, failed
from mpicomm.launch.jobscript import JobSpec, script, shell
from mpicomm.launch.jobscript.spec import MAIL_TYPES, MPIS, SCHEDULERS

_SUBMIT = {"slurm": "sbatch", "pbs": "qsub"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "job",
        help="print a job script",
        description="Print a script with which Slurm or PBS runs a program on many ranks.",
    )
    schedulers = parser.add_subparsers(
        title="schedulers", metavar="SCHEDULER", dest="scheduler", required=True, parser_class=_Parser
    )
    for scheduler in SCHEDULERS:
        each = schedulers.add_parser(
            scheduler,
            help=f"print a script for {_SUBMIT[scheduler]}",
            usage=f"mpicomm job {scheduler} [options] -- PROGRAM [ARGUMENTS]",
            description="Print a job script. With `-- torchrun train.py`, torchrun starts the ranks of each node.",
            allow_abbrev=False,
        )
        _add_options(each)
        each.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print or write the script, and return the exit status."""
    try:
        spec = _spec(arguments)
        text = script(spec)
        if spec.file is not None:
            Path(spec.file).write_text(text)
    except (ValueError, OSError) as error:
        return failed(f"job {arguments.scheduler}", error)
    if spec.file is None:
        print(text, end="")
    else:
        print(f"wrote {spec.file}; submit it: {_SUBMIT[spec.scheduler]} {shell.quoted(spec.file)}")
    return 0


class _Parser(argparse.ArgumentParser):
    """Passes all arguments after `--` to the program, and reports an error before it in one line."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = list(args or ())
        options, command = _divided(given)
        parsed, unknown = super().parse_known_args(options, namespace)
        if unknown:
            self.error(self._about(unknown[0]))
        parsed.command = command
        parsed.made_by = f"{self.prog} {shell.joined(given)}"
        return parsed, []

    def error(self, message: str) -> NoReturn:
        self.exit(FAILED, f"{self.prog}: {message}\n")

    def _about(self, unknown: str) -> str:
        if not unknown.startswith("-"):
            return (
                f"unexpected argument {unknown!r}; put the program and its arguments "
                f"after two dashes: -- python train.py"
            )
        valid = [option for option in self._option_string_actions if option.startswith("--")]
        name = unknown.partition("=")[0]
        if close := difflib.get_close_matches(name, valid, cutoff=0.7):
            return f"unknown option {name}; did you mean {' or '.join(close)}?"
        return f"unknown option {name}; expected one of {' '.join(valid)}"


def _divided(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _spec(arguments: argparse.Namespace) -> JobSpec:
    given: Any = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(JobSpec)}
    for name, value in given.items():
        given[name] = tuple(value) if isinstance(value, list) else value
    if given["ranks_per_node"] is None:
        given["ranks_per_node"] = max(given["gpus_per_node"], 1)
    return JobSpec(**given)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", dest="file", metavar="FILE", help="write the script to this file instead of stdout")
    _add_size(parser.add_argument_group("resources"))
    _add_place(parser.add_argument_group("name, queue and account"))
    _add_output(parser.add_argument_group("output"))
    _add_environment(parser.add_argument_group("environment of the ranks"))
    _add_end(parser.add_argument_group("exit before the time limit"))


def _add_size(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: %(default)s)")
    group.add_argument("--ranks-per-node", type=int, metavar="N", help="ranks (default: one per GPU of the node, or 1)")
    group.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="GPUs (default: %(default)s)")
    group.add_argument(
        "--cpus-per-rank", type=int, default=1, metavar="N", help="cores and threads (default: %(default)s)"
    )
    group.add_argument("--mem", metavar="4G", help="memory per node")
    group.add_argument("--mem-per-cpu", metavar="4G", help="memory per core")
    group.add_argument("--mem-per-gpu", metavar="4G", help="memory of the node per GPU")
    group.add_argument("--exclusive", action="store_true", help="do not share the nodes with other jobs")
    group.add_argument(
        "--time",
        default="1:00:00",
        metavar="1:00:00",
        help="time limit, also in minutes; Slurm also 1-00:00:00 (default: %(default)s)",
    )
    group.add_argument("--array", metavar="0-9", help="indices of a job array")


def _add_place(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--name", help="name of the job (default: that of the program)")
    group.add_argument("--partition", "--queue", metavar="P", help="Slurm partition or PBS queue")
    group.add_argument("--account", metavar="A", help="account to charge")
    group.add_argument("--project", metavar="P", help="PBS: project to charge, where qsub needs -P")
    group.add_argument("--qos", metavar="Q", help="Slurm: quality of service")
    group.add_argument("--constraint", metavar="C", help="Slurm: required features of the nodes")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output", metavar="FILE", help="output file, relative to the submission directory")
    group.add_argument("--error", metavar="FILE", help="error file (default: the output file)")
    group.add_argument("--mail-user", metavar="ADDRESS", help="recipient of mails")
    kinds = ",".join(kind.lower() for kind in MAIL_TYPES["pbs"])
    group.add_argument("--mail-type", metavar="KINDS", help=f"events: {kinds}, and Slurm's others (default: end,fail)")


def _add_environment(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--chdir", metavar="DIR", help="working directory (default: the submission directory)")
    group.add_argument("--module", action="append", default=[], metavar="M", help="module to load; repeat for more")
    group.add_argument("--venv", metavar="DIR", help="Python virtual environment to activate")
    group.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="variable to export; repeat for more"
    )
    group.add_argument("--mpi", choices=MPIS, help="the MPI that mpi4py loads (default: openmpi)")
    group.add_argument("--no-ssh", action="store_true", help="PBS: mpirun uses PBS instead of ssh to reach other hosts")


def _add_end(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--signal", metavar="USR1@180", help="Slurm: signal to the ranks, and seconds before the limit")
    group.add_argument("--requeue", action="store_true", help="continue in a new run if the ranks exit with status 85")
    group.add_argument(
        "--max-restarts", type=int, default=10, metavar="N", help="limit of --requeue (default: %(default)s)"
    )
