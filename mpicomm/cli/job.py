"""`mpicomm job`: prints or submits a script or a manifest with which a scheduler runs a program on many ranks."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mpicomm.cli import job_sites, job_submission
from mpicomm.cli.argument_types import Parser
from mpicomm.cli.console import FAILED, failed, print_message
from mpicomm.launch.jobscript import SCHEDULERS, JobSpec, KubernetesJob, quoting, script
from mpicomm.launch.jobscript.advice import advice
from mpicomm.launch.jobscript.options import Option, flag
from mpicomm.launch.jobscript.queues import check_tail

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
        help="print or submit a job script",
        description="Print or submit a script with which a scheduler runs a program on many ranks.",
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
        subparser.set_defaults(run=run, spec_type=spec_type, scheduler=scheduler)

    for scheduler, system in SCHEDULERS.items():
        torchrun = "With `-- torchrun train.py`, torchrun starts the ranks of each node."
        add(scheduler, JobSpec, f"print a script for {system.title}", f"Print or submit a job script. {torchrun}")
    operators = "Print the manifest of a job for the MPI operator or Kubeflow Trainer."
    add("kubernetes", KubernetesJob, "print a manifest for kubectl", operators)


def run(arguments: argparse.Namespace) -> int:
    """Print, write or submit the script, save the options of a site, and return the exit status."""
    command = f"job {arguments.scheduler}"
    try:
        spec = _spec(arguments)
        _check_actions(arguments)
        if arguments.tail and isinstance(spec, JobSpec):
            check_tail(spec)
        if arguments.save:
            for line in job_sites.save(arguments.site, arguments.scheduler, _values_of_site(arguments)):
                print_message(command, line)
            if not arguments.command:
                return 0
        text = script(spec, arguments.template)
        content = _encoded(text)  # before the file is opened, which an error would leave empty
        if arguments.submit and isinstance(spec, JobSpec):
            job_submission.create_directories(spec)
        if spec.file is not None:
            Path(spec.file).write_bytes(content)
    except (ValueError, OSError) as error:
        site = f"; the options of site {arguments.site} are in {job_sites.path()}" if arguments.site else ""
        return failed(command, f"{error}{site}")
    for sentence in [*advice(spec), *job_submission.missing_directories(spec)] if isinstance(spec, JobSpec) else ():
        print_message(command, sentence)
    if arguments.submit and isinstance(spec, JobSpec):
        waits = arguments.wait or arguments.tail
        return job_submission.run(spec, text, waits=waits, follows=arguments.tail)
    if spec.file is None:
        print(text, end="")
    else:
        print(f"wrote {spec.file}; submit it: {spec.submission}")
    return 0


def _check_actions(arguments: argparse.Namespace) -> None:
    """Refuse options that only work together with others."""
    if arguments.save:
        _check_save(arguments)
    for name in ("wait", "tail"):
        if getattr(arguments, name) and not arguments.submit:
            raise ValueError(f"--{name} needs --submit")
        if getattr(arguments, name) and arguments.array:
            raise ValueError(f"--{name} and --array: it waits for one job; submit the array without --{name}")
    if arguments.file:
        _check_file(Path(arguments.file))
    if arguments.tail and sys.stdout is None:
        raise ValueError("--tail prints the output of the job, and the standard output is closed; use --wait")


def _check_save(arguments: argparse.Namespace) -> None:
    """Refuse options that --save would drop."""
    if not arguments.site:
        raise ValueError("--save needs the name of the site: --site NAME")
    if arguments.template:
        raise ValueError("--save does not keep --template; pass it with each job, and remove it here")
    if not arguments.command and (arguments.submit or arguments.file):
        dropped = "--submit" if arguments.submit else "-o"
        raise ValueError(
            f"--save without a program makes no job; append the program, -- python train.py, or remove {dropped}"
        )


def _check_file(path: Path) -> None:
    """Refuse to replace a file that is not empty, unless its header shows that this command has written it."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        header = file.read(4096)
    if header and b"# Generated by:\n#     mpicomm job " not in header:
        raise ValueError(f"-o {path}: this file is not a script of mpicomm job; remove it, or use another name")


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        line = text.split("\n")[text.count("\n", 0, error.start)]
        raise ValueError(f"the script would not be UTF-8; correct the option with this line: {line!r}") from error


def _values_of_site(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options to save: those of the site, and those that were passed."""
    values = {}
    for field in dataclasses.fields(arguments.spec_type):
        value, saved = getattr(arguments, field.name, None), arguments.values_of_site.get(field.name)
        default = None if field.name == "ranks_per_node" else field.default  # which depends on the GPUs
        if not field.metadata or (value in (None, False, [], default) and saved is None):
            continue
        values[field.name] = _appended(saved or [], arguments.passed[field.name]) if isinstance(value, list) else value
    return values


def _appended(saved: list[str], passed: list[str]) -> list[str]:
    """Return the list of a site with the passed values, unless it has them in this order: --save may be repeated."""
    starts = range(len(saved) - len(passed) + 1)
    return saved if any(saved[start : start + len(passed)] == passed for start in starts) else saved + passed


class _Parser(Parser):
    """Passes all arguments after `--` to the program, and reports an error before it in one line."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = list(args or ())
        end = given.index("--") if "--" in given else len(given)
        parsed, _ = super().parse_known_args(given[:end], namespace)
        values: dict[str, Any] = {}
        if parsed.site is not None:
            values = self._values_of_site(parsed)
            passed = parsed
            self.set_defaults(**values)  # a repeatable option adds to its default
            parsed, _ = super().parse_known_args(given[:end], namespace)
            parsed.passed = vars(passed)
            if parsed.scheduler == "pbs" and "directive" in values:
                parsed.directive = self._directives_of_pbs(values["directive"], passed.directive)
        parsed.values_of_site = values
        parsed.command = given[end + 1 :]
        parsed.made_by = f"{self.prog} {quoting.joined(given)}"
        return parsed, []

    def _values_of_site(self, parsed: argparse.Namespace) -> dict[str, Any]:
        try:
            values = job_sites.read(parsed.site, parsed.scheduler, parsed.spec_type)
            if values is None and not parsed.save:
                self.fail(job_sites.missing(parsed.site))
        except (ValueError, OSError) as error:
            self.fail(str(error))
        return values or {}

    def _directives_of_pbs(self, saved: list[str], passed: list[str]) -> list[str]:
        """Order directives: PBS uses the first value of a resource, -l, and the last one of another option."""
        resources = [text for text in passed if re.search(r"(^|\s)-l", text)]
        if mixed := [text for text in resources if re.search(r"(^|\s)-[^l]", text)]:
            self.fail(
                f"--directive {mixed[0]!r} and --site: pass -l and the other options each in a --directive of its own"
            )
        return [*resources, *saved, *(text for text in passed if text not in resources)]

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
    given["env"] = tuple({text.partition("=")[0]: text for text in given["env"]}.values())  # the last of a name
    if arguments.save and not given["command"]:
        given["command"] = ("python", "train.py")  # to check the options
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
    group = parser.add_argument_group("options of a site")
    group.add_argument("--site", metavar="NAME", help="use the options that --save has kept for this site")
    group.add_argument(
        "--save",
        action="store_true",
        help="keep the options as those of --site, in ~/.config/mpicomm/job.toml; the program may be left out",
    )
    parser.set_defaults(ranks_per_node=None, submit=False, wait=False, tail=False)
    if spec_type is JobSpec:
        group = parser.add_argument_group("submission")
        group.add_argument("--submit", action="store_true", help="submit the job, and print its ID")
        group.add_argument("--wait", action="store_true", help="wait for its end, and exit with its status")
        group.add_argument("--tail", action="store_true", help="--wait, and print its output file meanwhile")


def _add_option(group: argparse._ArgumentGroup, field: str, default: Any, option: Option) -> None:
    names = [flag(field), *([option.alias] if option.alias else [])]
    if isinstance(default, bool):
        group.add_argument(*names, action="store_true", help=option.help)
        return
    kind: dict[str, Any] = {"default": default, "type": int if isinstance(default, int) else str}
    if isinstance(default, tuple):
        kind = {"default": [], "action": "append"}
    group.add_argument(*names, dest=field, metavar=option.metavar, help=option.help, choices=option.choices, **kind)
