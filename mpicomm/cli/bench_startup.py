"""`mpicomm bench startup`: measures the startup time of jobs, and that of torchrun for comparison."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from mpicomm.bench import machine, startup
from mpicomm.cli import launch_plan
from mpicomm.cli.argument_types import check_writable, count, counts
from mpicomm.cli.console import console, failed
from mpicomm.errors import LaunchError, MPINotFoundError
from mpicomm.launch.request import Request
from mpicomm.reports import startup_table as tables

_OURS = "mpicomm"
_THEIRS = "torchrun + Gloo"
_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}  # with GPUs there would be no Gloo for comparison


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = kinds.add_parser(
        "startup",
        help="time from the command to the end of the first all_reduce",
        description="Start ranks repeatedly, and measure the time from the command to the end of the first all_reduce, "
        "step by step, and that of torchrun with Gloo for comparison. In a Slurm allocation all of its nodes are "
        "used.",
    )
    parser.add_argument(
        "--ranks", metavar="1,2,4", type=counts, default=(1, 2, 4), help="numbers of ranks (default: 1,2,4)"
    )
    parser.add_argument(
        "--rounds", metavar="R", type=count, default=3, help="starts of each, in turn (default: %(default)s)"
    )
    parser.add_argument(
        "--limit", metavar="S", type=count, default=300, help="seconds until a timeout (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="F", type=Path, help="write the results to this JSON file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure starts, and return the exit status."""
    environ = {**os.environ, **_WITHOUT_GPUS}
    try:
        if arguments.json is not None:
            check_writable(arguments.json)
        found = machine.described("seconds from the command to the end of the first all_reduce; the fastest start")
        found |= {"rounds": arguments.rounds, "seconds of `import mpicomm`": round(startup.import_seconds(7), 4)}
        found["starts"] = startup.measure(
            _ways(environ), arguments.ranks, arguments.rounds, limit=arguments.limit, on_progress=_print_progress
        )
    except (LaunchError, MPINotFoundError, OSError) as error:
        return failed("bench startup", error)
    console().print(tables.table(found["starts"], _OURS))
    print(f"import mpicomm: {1e3 * found['seconds of `import mpicomm`']:.1f} ms")
    if arguments.json is not None:
        machine.write(found, arguments.json)
    return 0


def _ways(environ: Mapping[str, str]) -> list[startup.Way]:
    return [
        startup.Way(_OURS, "mpicomm", lambda program, ranks: launch_plan.build(Request(program, ranks), environ)),
        startup.Way(
            _THEIRS, "gloo", lambda program, ranks: launch_plan.build_torchrun(Request(program, ranks), environ)
        ),
    ]


def _print_progress(what: str) -> None:
    if sys.stderr.isatty():
        print(f"mpicomm bench: {what}", file=sys.stderr)
