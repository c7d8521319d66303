"""`mpicomm info`: shows the ranks of a job in tables; started directly, or with the launcher to examine."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from mpicomm.cli.console import FAILED, console, failed
from mpicomm.errors import MPINotFoundError

if TYPE_CHECKING:
    from mpicomm.job_info import JobInfo
    from mpicomm.runtime import World

_NO_MPI = 1  # the exit status
# The facts in the table of launcher variables, as World names them.
_FACTS = (
    "rank",
    "size",
    "local_rank",
    "local_size",
    "node_rank",
    "num_nodes",
    "master_addr",
    "master_port",
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "info",
        help="show the ranks of a job",
        description="Show the node, device and cores of each rank, and the software that it loads. "
        "Start it as you start your program: srun mpicomm info, mpirun -n 4 mpicomm info.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--env",
        metavar="RANK",
        type=int,
        nargs="?",
        const=0,
        help="show the launcher variables of a rank (default: 0), and PyTorch's names for them",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the job, and return the exit status."""
    from mpicomm import job_info, runtime

    try:
        world = runtime.bootstrap()
    except MPINotFoundError as error:
        failed("info", error)
        return _NO_MPI
    with world:
        if arguments.env is not None and not 0 <= arguments.env < world.size:
            why = f"--env {arguments.env}: expected a rank from 0 to {world.size - 1}"
            return failed("info", why) if world.rank == 0 else FAILED
        gathered = job_info.of_all(world)
        if world.rank == 0:
            _show(world, gathered, arguments)
    return 0


def _show(world: World, gathered: Sequence[JobInfo], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(_as_json(world, gathered), indent=2))
        return
    out = console()
    nodes = f"{world.num_nodes} node{'s' if world.num_nodes > 1 else ''}"
    ranks = f"{world.size} rank{'s' if world.size > 1 else ''}"
    place = f"{world.master_addr} port {world.master_port}"
    out.print(Text(f"{ranks} on {nodes}, started by {world.launcher}, rendezvous at {place}"), soft_wrap=True)
    out.print(_ranks(gathered))
    out.print(_software(gathered))
    if arguments.env is not None:
        out.print(_variables(gathered[arguments.env]))


def _as_json(world: World, gathered: Sequence[JobInfo]) -> dict[str, object]:
    return {
        "size": world.size,
        "num_nodes": world.num_nodes,
        "launcher": world.launcher,
        "backend": world.backend,
        "master_addr": world.master_addr,
        "master_port": world.master_port,
        "ranks": [dataclasses.asdict(each) for each in gathered],
    }


def _ranks(gathered: Sequence[JobInfo]) -> Table:
    table = Table()
    has_gpus = any(each.uuid for each in gathered)
    for name in ("rank", "host", "node", "local rank", "device", *["GPU", "UUID"] * has_gpus, "processors", "NUMA"):
        table.add_column(name, justify="right" if name in {"rank", "node", "local rank"} else "left")
    for each in gathered:
        gpu = [each.device_name, each.uuid] if has_gpus else []
        places = [each.rank, each.host, each.node_rank, each.local_rank, each.device]
        table.add_row(*[Text(str(cell)) for cell in (*places, *gpu, each.cpus, each.numa_nodes or "-")])
    return table


def _software(gathered: Sequence[JobInfo]) -> Table:
    from mpicomm import job_info
    from mpicomm.watchdog import hang_report

    table = Table(show_header=False)
    for name, values in job_info.differences(gathered).items():
        for value, ranks in values.items():
            is_everybodys = len(ranks) == len(gathered)
            table.add_row(Text(name), Text(value if is_everybodys else f"{value} on {hang_report.called(ranks)}"))
    return table


def _variables(which: JobInfo) -> Table:
    """Return the table of launcher variables: for each fact, the variable of each launcher and its value."""
    from mpicomm import job_info

    table = Table()
    for name in ("", "set by", "variable", f"on rank {which.rank}"):
        table.add_column(name)
    for fact in _FACTS:
        named = [(party, getattr(party, fact)) for party in job_info.tables_of_variables(which.environment)]
        shown = fact
        for party, name in named:
            if name is not None:
                title = "PyTorch" if party.title == "torchrun" else party.title
                table.add_row(*map(Text, (shown, title, name, which.environment.get(name, "not set"))))
                shown = ""
        table.add_section()
    return table
