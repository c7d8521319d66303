"""`mpicomm info`: shows the ranks of a job in tables; started directly, or with the launcher to examine."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from mpicomm import terminal
from mpicomm.cli.console import FAILED, console, failed, print_json
from mpicomm.errors import MPINotFoundError
from mpicomm.launch.known_launchers import FACTS

if TYPE_CHECKING:
    from rich.table import Table

    from mpicomm.job.session import World
    from mpicomm.job_info import JobInfo

_NO_MPI = 1  # the exit status


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
    from mpicomm import job_info
    from mpicomm.job.bootstrap import bootstrap

    try:
        world = bootstrap()
    except MPINotFoundError as error:
        failed("info", error)
        return _NO_MPI
    with world:
        if arguments.env is not None and not 0 <= arguments.env < world.size:
            why = f"--env {arguments.env}: expected a rank from 0 to {world.size - 1}"
            return failed("info", why) if world.rank == 0 else FAILED
        gathered = job_info.gather(world)
        if world.rank == 0:
            _show(world, gathered, arguments)
    return 0


def _show(world: World, gathered: Sequence[JobInfo], arguments: argparse.Namespace) -> None:
    if arguments.json:
        names = ("size", "num_nodes", "launcher", "backend", "master_addr", "master_port")
        job = {name: getattr(world, name) for name in names}
        print_json(job | {"ranks": [dataclasses.asdict(rank) for rank in gathered]})
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


def _ranks(gathered: Sequence[JobInfo]) -> Table:
    gpu = ["GPU", "UUID", "NUMA of GPU"] if any(rank.uuid for rank in gathered) else []
    titles = ["rank", "host", "node", "local rank", "device", *gpu, "processors", "NUMA"]
    rows = [
        [rank.rank, rank.host, rank.node_rank, rank.local_rank, rank.device]
        + ([rank.device_name, rank.uuid, rank.gpu_numa_node or "-"] if gpu else [])
        + [rank.cpus, rank.numa_nodes or "-"]
        for rank in gathered
    ]
    return terminal.table(titles, rows, right=("rank", "node", "local rank"))


def _software(gathered: Sequence[JobInfo]) -> Table:
    from mpicomm import job_info
    from mpicomm.recorder import rank_text

    rows = [
        (name, value if len(ranks) == len(gathered) else f"{value} on {rank_text.name_ranks(ranks)}")
        for name, values in job_info.differences(gathered).items()
        for value, ranks in values.items()
    ]
    return terminal.table(("", ""), rows, show_header=False)


def _variables(rank: JobInfo) -> Table:
    """Return the table of launcher variables: for each fact, the variable of each launcher and its value."""
    from mpicomm import job_info

    rows: list[tuple[str, ...] | None] = []
    for fact in FACTS:
        shown = fact
        for launcher in job_info.shown_launchers(rank.environment):
            for name in launcher.variables([fact]):
                title = "PyTorch" if launcher.title == "torchrun" else launcher.title
                rows.append((shown, title, name, rank.environment.get(name, "not set")))
                shown = ""
        rows.append(None)
    return terminal.table(("", "set by", "variable", f"on rank {rank.rank}"), rows)
