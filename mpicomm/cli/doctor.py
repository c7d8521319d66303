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
from mpicomm.doctor import findings
from mpicomm.doctor.findings import Finding
from mpicomm.errors import LaunchError, MpicommError
from mpicomm.launch import detect
from mpicomm.recorder import rank_text

if TYPE_CHECKING:  # `mpicomm run` must not import the checks, nor torch
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
    parser.add_argument(
        "--fabric",
        action="store_true",
        help="show the network devices and which of them libraries use, and check the settings that centres demand",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the findings, and return the exit status."""
    from mpicomm.doctor import examination, launcher_check, software_check

    environ = dict(os.environ)  # before bootstrap() exports variables
    facts = examination.collect(environ, has_fabric=arguments.fabric)
    can_start, launchers = facts[software_check].can_start, facts[launcher_check]
    # 1. this host alone
    if _is_alone(environ):
        results = examination.check(facts)
        if arguments.starts_job and can_start and launchers is not None and launchers.mpiexec_path:
            results += _trial(environ)
        return _report(results, arguments)
    # 2. ranks that cannot form a job
    if not can_start:  # perhaps on this host only
        is_shown = not detect.detect(environ).value("local_rank")
        return _report(examination.check(facts), arguments, is_shown=is_shown)
    from mpicomm.job.bootstrap import bootstrap

    try:
        world = bootstrap()
    except MpicommError as error:
        results = examination.check(facts)
        if not any(finding.check == "launcher" and finding.status == "problem" for finding in results):
            results.append(findings.from_error("start", error))
        is_shown = not error.is_on_all_ranks or detect.guess_rank(environ) == 0
        return _report(results, arguments, is_shown=is_shown)
    # 3. the ranks of a job
    with world:
        results, links = examination.check_job(world, facts)
        return _report(results, arguments, world.hosts, links, is_shown=world.rank == 0)


def _is_alone(environ: Mapping[str, str]) -> bool:
    try:
        return detect.detect(environ).is_plain
    except LaunchError:
        return True


def _trial(environ: Mapping[str, str]) -> list[Finding]:
    from mpicomm.cli import trial_job
    from mpicomm.doctor import launcher_check

    try:
        return launcher_check.check_trial_job(trial_job.run(environ))
    except (MpicommError, OSError) as error:
        return [findings.from_error("test job", error)]


# -- output ------------------------------------------------------------------------------------------------------------


def _report(
    results: Sequence[Finding],
    arguments: argparse.Namespace,
    hosts_of_ranks: Sequence[str] = (),
    links: Sequence[Link] = (),
    *,
    is_shown: bool = True,
) -> int:
    """Print the findings unless another process does, and return the exit status.

    Args:
        hosts_of_ranks: The host of every rank; empty for a process that is not part of a job.
    """
    status = findings.worst(results)
    hosts_of_ranks = hosts_of_ranks or [socket.gethostname()]
    ordered = sorted(results, key=lambda finding: findings.STATUSES.index(finding.status))
    if is_shown and arguments.json:
        print_json(
            {
                "status": status,
                "hosts": list(dict.fromkeys(hosts_of_ranks)),
                "ranks": len(hosts_of_ranks),
                "findings": [dataclasses.asdict(finding) for finding in ordered],
                "links": [dataclasses.asdict(link) for link in links],
            }
        )
    elif is_shown:
        _print(ordered, links, hosts_of_ranks)
    return HAS_PROBLEM if status == "problem" else 0


def _print(ordered: Sequence[Finding], links: Sequence[Link], hosts_of_ranks: Sequence[str]) -> None:
    out = console()
    # 1. the summary
    counts = Counter(finding.status for finding in ordered)
    hosts = set(hosts_of_ranks)
    place = hosts_of_ranks[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    if len(hosts_of_ranks) > 1:
        place = f"{len(hosts_of_ranks)} ranks on {place}"
    summary = f"{_many(counts['problem'], 'problem')}, {_many(counts['warning'], 'warning')}, {counts['ok']} ok"
    out.print(Text(f"{place}: {summary}"), soft_wrap=True)
    # 2. the findings
    width = max(len(finding.check) for finding in ordered)
    for finding in ordered:
        for line in _lines(finding, _place(finding, hosts_of_ranks), width):
            text = Text(line)
            if line.startswith(finding.status):
                text.stylize(_STYLES[finding.status], 0, len(finding.status))
            out.print(text, soft_wrap=True)
    # 3. the slowest links
    if len(links) > 1:
        rows = [
            (*link.ranks, *(hosts_of_ranks[rank] for rank in link.ranks), f"{link.microseconds:.1f}",
                f"{link.gigabytes:.2f}")
            for link in sorted(links, key=lambda link: link.gigabytes)[:_SHOWN_LINKS]
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
    lines = []
    for start, text in paragraphs:
        parts = [text]
        if not text.startswith("  "):
            parts = textwrap.wrap(text, max(40, columns - len(start)), break_long_words=False, break_on_hyphens=False)
        lines += [(" " * len(start) if number else start) + part for number, part in enumerate(parts)]
    return lines


def _place(finding: Finding, hosts_of_ranks: Sequence[str]) -> str:
    """Return the ranks with a finding; empty if it is that of all ranks."""
    if len(finding.ranks) in (0, len(hosts_of_ranks)):
        return ""
    hosts = {hosts_of_ranks[rank] for rank in finding.ranks}
    host_ranks = [rank for rank, host in enumerate(hosts_of_ranks) if host in hosts]
    return (
        f" [{', '.join(sorted(hosts)) if list(finding.ranks) == host_ranks else rank_text.name_ranks(finding.ranks)}]"
    )


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
