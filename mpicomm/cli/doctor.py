"""`mpicomm doctor`: checks whether this host, or the hosts of a job, are ready, and prints the remedy of each fault."""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from mpicomm import terminal
from mpicomm.cli.console import console, print_json
from mpicomm.errors import LaunchError, MpicommError
from mpicomm.launch import detect
from mpicomm.watchdog import hang_report

if TYPE_CHECKING:  # `mpicomm run` must not import the checks
    from mpicomm.doctor.findings import Finding
    from mpicomm.doctor.links import Link

HAS_PROBLEM = 1  # the exit status
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_SHOWN_LINKS = 10
_COLUMNS = 120  # the most, so that long lines remain readable
_DESCRIPTION = """\
Check what will go wrong in a job: MPI and its launchers, Slurm's PMI, memory that processes share, limits, the network,
processors and GPUs, and versions. Each fault is a problem (a job fails, or is many times slower) or a warning, and is
printed with its remedy. The exit status is 1 if there is a problem.

Without a launcher, the command checks this host, and starts a job of two ranks. Under mpirun or srun it checks each
rank, compares the hosts, and measures latency and bandwidth between each pair of hosts, or of ranks on one host."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="check what will go wrong in a job",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-job", dest="starts_job", action="store_false", help="do not start a job of two ranks")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the findings, and return the exit status."""
    from mpicomm.doctor import examination, findings, launcher_check, software_check

    environ = dict(os.environ)  # before bootstrap() exports variables
    facts = examination.collect(environ)
    can_start, launchers = facts[software_check].can_start, facts[launcher_check]
    if _is_alone(environ):
        found = examination.check(facts)
        if arguments.starts_job and can_start and launchers is not None and launchers.own:
            found += _trial(environ)
        return _report(found, [], [socket.gethostname()], arguments)
    if not can_start:  # perhaps on this host only
        return _report_without_job(examination.check(facts), arguments, is_shown=not _local_rank(environ))
    from mpicomm import runtime

    try:
        world = runtime.bootstrap()
    except MpicommError as error:
        found = examination.check(facts)
        if not any(each.check == "launcher" and each.status == "problem" for each in found):
            found.append(findings.from_error("start", error))
        is_shown = not error.is_on_all_ranks or detect.guess_rank(environ) == 0
        return _report_without_job(found, arguments, is_shown=is_shown)
    with world:
        found, links = examination.check_job(world, facts)
        hosts = list(dict.fromkeys(world.hosts))
        if world.rank == 0:
            return _report(found, links, hosts, arguments, world.hosts)
        return _status(found)


def _is_alone(environ: Mapping[str, str]) -> bool:
    try:
        return detect.detect(environ).is_plain
    except LaunchError:
        return True


def _trial(environ: Mapping[str, str]) -> list[Finding]:
    from mpicomm.cli import trial_job
    from mpicomm.doctor import findings, launcher_check

    try:
        return launcher_check.check_trial_job(trial_job.run(environ))
    except (MpicommError, OSError) as error:
        return [findings.from_error("test job", error)]


def _local_rank(environ: Mapping[str, str]) -> int:
    return detect.detect(environ).value("local_rank") or 0


def _report_without_job(found: Sequence[Finding], arguments: argparse.Namespace, *, is_shown: bool) -> int:
    """Print the findings of a process that is not part of a job, and return the exit status."""
    return _report(found, [], [socket.gethostname()], arguments) if is_shown else _status(found)


def _status(found: Sequence[Finding]) -> int:
    from mpicomm.doctor import findings

    return HAS_PROBLEM if findings.worst(found) == "problem" else 0


# -- output ------------------------------------------------------------------------------------------------------------


def _report(
    found: Sequence[Finding],
    links: Sequence[Link],
    hosts: Sequence[str],
    arguments: argparse.Namespace,
    hosts_of_ranks: Sequence[str] = (),
) -> int:
    from mpicomm.doctor import findings

    ordered = sorted(found, key=lambda each: findings.STATUSES.index(each.status))
    if arguments.json:
        print_json(
            {
                "status": findings.worst(found),
                "hosts": list(hosts),
                "ranks": max(1, len(hosts_of_ranks)),
                "findings": [dataclasses.asdict(each) for each in ordered],
                "links": [dataclasses.asdict(each) for each in links],
            }
        )
    else:
        _print(ordered, links, hosts, hosts_of_ranks)
    return _status(found)


def _print(
    ordered: Sequence[Finding], links: Sequence[Link], hosts: Sequence[str], hosts_of_ranks: Sequence[str]
) -> None:
    out = console()
    counts = Counter(each.status for each in ordered)
    where = f"{hosts[0]}" if len(hosts) == 1 else f"{len(hosts)} hosts"
    if len(hosts_of_ranks) > 1:
        where = f"{len(hosts_of_ranks)} ranks on {where}"
    summary = f"{_many(counts['problem'], 'problem')}, {_many(counts['warning'], 'warning')}, {counts['ok']} ok"
    out.print(Text(f"{where}: {summary}"), soft_wrap=True)
    for each in ordered:
        for line in _lines(each, _place(each, hosts_of_ranks), max(len(other.check) for other in ordered)):
            text = Text(line)
            if line.startswith(each.status):
                text.stylize(_STYLES[each.status], 0, len(each.status))
            out.print(text, soft_wrap=True)
    if len(links) > 1:
        rows = [
            (*each.ranks, *(hosts_of_ranks[rank] for rank in each.ranks), f"{each.microseconds:.1f}",
                f"{each.gigabytes:.2f}")
            for each in sorted(links, key=lambda link: link.gigabytes)[:_SHOWN_LINKS]
        ]  # fmt: skip
        titles = ["rank", "rank ", "host", "host ", "latency, us", "GB/s"]
        out.print(terminal.table(titles, rows, right=("rank", "rank ", "latency, us", "GB/s"), title="slowest links"))


def _lines(finding: Finding, place: str, width: int) -> list[str]:
    """Return the lines that show a finding; indented lines of a message or remedy, such as commands, are not wrapped.

    Args:
        place: The hosts or ranks with the finding.
        width: The width of the column with the names of the checks.
    """
    columns = min(terminal.columns(sys.stdout) or _COLUMNS, _COLUMNS)
    indent = " " * (len("problem") + width + 4)
    first, *rest = f"{finding.message}{place}".splitlines()
    remedies = finding.remedy.splitlines()
    paragraphs = [
        (f"{finding.status:<7}  {finding.check:<{width}}  ", first),
        *((indent, line) for line in rest),
        *((f"{indent}-> ", line) for line in remedies[:1]),
        *((f"{indent}   ", line) for line in remedies[1:]),
    ]
    found = []
    for start, text in paragraphs:
        parts = [text]
        if not text.startswith("  "):
            parts = textwrap.wrap(text, max(40, columns - len(start)), break_long_words=False, break_on_hyphens=False)
        found += [(" " * len(start) if number else start) + part for number, part in enumerate(parts)]
    return found


def _place(finding: Finding, hosts_of_ranks: Sequence[str]) -> str:
    """Return the ranks with a finding; empty if it is that of all ranks."""
    if len(finding.ranks) in (0, len(hosts_of_ranks)):
        return ""
    hosts = {hosts_of_ranks[rank] for rank in finding.ranks}
    of_hosts = [rank for rank, host in enumerate(hosts_of_ranks) if host in hosts]
    return f" [{', '.join(sorted(hosts)) if list(finding.ranks) == of_hosts else hang_report.called(finding.ranks)}]"


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
