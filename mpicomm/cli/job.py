"""`mpicomm job`: the script with which a scheduler runs a program on many ranks."""

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
        description="Print the script with which Slurm or PBS runs a program on many ranks.",
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
    """Takes what follows `--` for the program, whatever it looks like, and says in one line what is wrong before it."""

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
                f"{unknown!r} is no option; the program and its arguments stand behind two dashes: -- python train.py"
            )
        valid = [option for option in self._option_string_actions if option.startswith("--")]
        name = unknown.partition("=")[0]
        if close := difflib.get_close_matches(name, valid, cutoff=0.7):
            return f"there is no option {name}; did you mean {' or '.join(close)}?"
        return f"there is no option {name}; there are {' '.join(valid)}"


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
    parser.add_argument("-o", dest="file", metavar="FILE", help="write the script to this file, not to the screen")
    _add_size(parser.add_argument_group("size"))
    _add_place(parser.add_argument_group("place"))
    _add_output(parser.add_argument_group("output"))
    _add_environment(parser.add_argument_group("environment of the ranks"))
    _add_end(parser.add_argument_group("leaving in time"))


def _add_size(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (%(default)s)")
    group.add_argument("--ranks-per-node", type=int, metavar="N", help="one for each GPU of the node, or 1")
    group.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="(%(default)s)")
    group.add_argument("--cpus-per-rank", type=int, default=1, metavar="N", help="cores, and threads (%(default)s)")
    group.add_argument("--mem", metavar="4G", help="memory of each node")
    group.add_argument("--mem-per-cpu", metavar="4G", help="or of each core")
    group.add_argument("--mem-per-gpu", metavar="4G", help="or of the node for each GPU")
    group.add_argument("--exclusive", action="store_true", help="share the nodes with no other job")
    group.add_argument(
        "--time", default="1:00:00", metavar="1:00:00", help="or minutes; Slurm: 1-00:00:00 (%(default)s)"
    )
    group.add_argument("--array", metavar="0-9", help="many jobs that differ in an index")


def _add_place(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--name", help="of the job (that of the program)")
    group.add_argument("--partition", "--queue", metavar="P", help="Slurm's partition, PBS's queue")
    group.add_argument("--account", metavar="A", help="who pays")
    group.add_argument("--project", metavar="P", help="PBS: who pays, where qsub wants -P")
    group.add_argument("--qos", metavar="Q", help="Slurm: quality of service")
    group.add_argument("--constraint", metavar="C", help="Slurm: features that the nodes must have")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output", metavar="FILE", help="where output goes, from where the job is submitted")
    group.add_argument("--error", metavar="FILE", help="where errors go (to the output)")
    group.add_argument("--mail-user", metavar="ADDRESS", help="who gets mails")
    kinds = ",".join(kind.lower() for kind in MAIL_TYPES["pbs"])
    group.add_argument("--mail-type", metavar="KINDS", help=f"when: {kinds}, and Slurm's others (end,fail)")


def _add_environment(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--chdir", metavar="DIR", help="where the program runs (where the job is submitted)")
    group.add_argument("--module", action="append", default=[], metavar="M", help="module to load; repeat for more")
    group.add_argument("--venv", metavar="DIR", help="virtual environment of Python to activate")
    group.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="variable; repeat for more")
    group.add_argument("--mpi", choices=MPIS, help="the MPI that mpi4py loads (openmpi)")
    group.add_argument("--no-ssh", action="store_true", help="PBS: mpirun reaches other hosts through PBS, not by ssh")


def _add_end(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--signal", metavar="USR1@180", help="Slurm: warn the ranks so many seconds before the end")
    group.add_argument("--requeue", action="store_true", help="go on in a new run when the ranks leave with status 85")
    group.add_argument("--max-restarts", type=int, default=10, metavar="N", help="no more often (%(default)s)")
