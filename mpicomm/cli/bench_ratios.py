"""`mpicomm bench ratios`: measures the performance targets of this project on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from mpicomm.bench import machine, ratios
from mpicomm.cli.argument_types import check_writable, count
from mpicomm.cli.console import console, failed

_NOT_MET = 1  # the exit status


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = kinds.add_parser(
        "ratios",
        help="the targets in docs/performance.md",
        description="Measure the ratios whose targets docs/performance.md lists, with two ranks on this host and "
        "starts of four. Both figures of a ratio are measured in alternating rounds. The command "
        "takes some minutes; its exit status is 1 if a target is not met.",
    )
    parser.add_argument("--rounds", metavar="R", type=count, default=7, help="rounds of each measurement (default: 7)")
    parser.add_argument("--json", metavar="F", type=Path, help="write the results to this JSON file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and return the exit status."""
    try:
        if arguments.json is not None:
            check_writable(arguments.json)
        found = ratios.measure(lambda command: _result([*command, "--rounds", str(arguments.rounds)]))
        if arguments.json is not None:
            whole = machine.described("ratios, or the unit in the name")
            whole["ratios"] = [{**dataclasses.asdict(each), "value": round(each.value, 3)} for each in found]
            machine.write(whole, arguments.json)
    except (OSError, subprocess.CalledProcessError) as error:
        return failed("bench ratios", error)
    console().print(_table(found))
    return 0 if all(each.is_met for each in found) else _NOT_MET


def _result(command: Sequence[str]) -> Mapping[str, Any]:
    """Return the results of a command of `mpicomm bench`.

    Raises:
        CalledProcessError: If the command fails; it has printed the reason.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "found.json"
        program = [sys.executable, "-m", "mpicomm", "bench", *command, "--json", str(path)]
        subprocess.run(program, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        found: Mapping[str, Any] = json.loads(path.read_text())
        return found


def _table(found: Sequence[ratios.Ratio]) -> Table:
    table = Table(title="ratios", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("figure")
    for title in ("measured", "target"):
        table.add_column(title, justify="right")
    table.add_column("")
    for each in found:
        bound = f"{'>=' if each.is_least else '<='} {each.target:g}"
        table.add_row(each.what, f"{each.value:.3g}", bound, "" if each.is_met else "not met")
    return table
