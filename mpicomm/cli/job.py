"""`mpicomm job`: prints a script or a manifest with which a scheduler runs a program on many ranks."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mpicomm.cli.argument_types import Parser
from mpicomm.cli.console import FAILED, failed, print_message
from mpicomm.launch.jobscript import SCHEDULERS, JobSpec, KubernetesJob, quoting, script
from mpicomm.launch.jobscript.advice import advice
from mpicomm.launch.jobscript.options import Option, flag

_GROUPS = {
    "nodes": "resources",
    "kind": "job",
    "image": "container",
    "name": "name, queue and account",
    "output": "output",
    "chdir": "environment of the ranks",
    "container": "container of the ranks",
    "signal": "exit before the time limit",
}
"""The groups of options in the help, by the first field of each."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "job",
        help="print a job script",
        description="Print a script with which a scheduler runs a program on many ranks.",
    )
    schedulers = parser.add_subparsers(
        title="schedulers", metavar="SCHEDULER", dest="scheduler", required=True, parser_class=_Parser
    )

    def add(scheduler: str, spec_type: type[JobSpec | KubernetesJob], summary: str, description: str) -> None:
        subparser = schedulers.add_parser(
            scheduler,
            help=summary,
            usage=f"mpicomm job {scheduler} [options] -- PROGRAM [ARGUMENTS]",
            description=description,
            allow_abbrev=False,
        )
        _add_options(subparser, spec_type)
        subparser.set_defaults(run=run, spec_type=spec_type)

    for scheduler, system in SCHEDULERS.items():
        torchrun = "With `-- torchrun train.py`, torchrun starts the ranks of each node."
        add(scheduler, JobSpec, f"print a script for {system.title}", f"Print a job script. {torchrun}")
    operators = "Print the manifest of a job for the MPI operator or Kubeflow Trainer."
    add("kubernetes", KubernetesJob, "print a manifest for kubectl", operators)


def run(arguments: argparse.Namespace) -> int:
    """Print or write the script, and return the exit status."""
    try:
        spec = _spec(arguments)
        text = script(spec, arguments.template)
        if spec.file is not None:
            content = text.encode()  # before the file is opened, which an error would leave empty
            Path(spec.file).write_bytes(content)
    except (ValueError, OSError) as error:
        return failed(f"job {arguments.scheduler}", error)
    for sentence in advice(spec) if isinstance(spec, JobSpec) else ():
        print_message(f"job {arguments.scheduler}", sentence)
    if spec.file is None:
        print(text, end="")
    else:
        print(f"wrote {spec.file}; submit it: {spec.submission}")
    return 0


class _Parser(Parser):
    """Passes all arguments after `--` to the program, and reports an error before it in one line."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = list(args or ())
        end = given.index("--") if "--" in given else len(given)
        parsed, _ = super().parse_known_args(given[:end], namespace)
        parsed.command = given[end + 1 :]
        parsed.made_by = f"{self.prog} {quoting.joined(given)}"
        return parsed, []

    def fail(self, message: str) -> NoReturn:
        self.exit(FAILED, f"{self.prog}: {message}\n")

    def unknown_arguments(self, words: Sequence[str]) -> str:
        if not words[0].startswith("-"):
            return (
                f"unexpected argument {words[0]!r}; put the program and its arguments "
                f"after two dashes: -- python train.py"
            )
        valid = [option for option in self._option_string_actions if option.startswith("--")]
        name = words[0].partition("=")[0]
        if close := difflib.get_close_matches(name, valid, cutoff=0.7):
            return f"unknown option {name}; did you mean {' or '.join(close)}?"
        return f"unknown option {name}; expected one of {' '.join(valid)}"


def _spec(arguments: argparse.Namespace) -> JobSpec | KubernetesJob:
    spec_type: type[JobSpec | KubernetesJob] = arguments.spec_type
    given: Any = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(spec_type)}
    for name, value in given.items():
        given[name] = tuple(value) if isinstance(value, list) else value
    if given["ranks_per_node"] is None:
        given["ranks_per_node"] = max(given["gpus_per_node"], 1)
    return spec_type(**given)


def _add_options(parser: argparse.ArgumentParser, spec_type: type[JobSpec | KubernetesJob]) -> None:
    """Add an option for each field of a description of a job that is one."""
    parser.add_argument("-o", dest="file", metavar="FILE", help="write the script to this file instead of stdout")
    group = parser.add_argument_group()
    for field in dataclasses.fields(spec_type):
        if field.name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[field.name])
        if option := field.metadata.get("option"):
            _add_option(group, field.name, field.default, option)
    parser.add_argument(
        "--template", type=Path, metavar="FILE", help="fill this Jinja2 template instead of that of the package"
    )
    parser.set_defaults(ranks_per_node=None)


def _add_option(group: argparse._ArgumentGroup, field: str, default: Any, option: Option) -> None:
    names = [flag(field), *([option.alias] if option.alias else [])]
    if isinstance(default, bool):
        group.add_argument(*names, action="store_true", help=option.help)
        return
    kind: dict[str, Any] = {"default": default, "type": int if isinstance(default, int) else str}
    if isinstance(default, tuple):
        kind = {"default": [], "action": "append"}
    group.add_argument(*names, dest=field, metavar=option.metavar, help=option.help, choices=option.choices, **kind)
