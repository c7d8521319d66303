"""For commands that measure ranks: starts the ranks if there are none, and provides the functions for timing."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import Progress

from mpicomm import terminal
from mpicomm.cli import launch_plan
from mpicomm.cli.argument_types import count
from mpicomm.cli.console import console
from mpicomm.launch import detect
from mpicomm.launch.request import Request

if TYPE_CHECKING:
    from mpicomm.bench.timing import Bench
    from mpicomm.runtime import World


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that compare backends on several ranks."""
    parser.add_argument(
        "--rounds",
        metavar="R",
        type=count,
        default=7,
        help="rounds, in each of which the backends run in turn (default: 7)",
    )
    parser.add_argument("-n", dest="ranks", metavar="N", type=count, help="ranks to start, outside mpirun and srun")
    parser.add_argument("--json", metavar="F", type=Path, help="write the results to this JSON file")


def writes() -> bool:
    """Return whether this process writes the files: rank 0, or the process that starts the ranks."""
    return detect.guess_rank(os.environ) == 0


def ensure(ranks: int | None) -> None:
    """Return in a rank; otherwise exec the launcher of this same command.

    Args:
        ranks: Number of ranks to start; None for the capacity of the machine or the allocation.

    Raises:
        LaunchError: If the ranks cannot be started.
        MPINotFoundError: If there is no MPI library.
    """
    if not detect.detect(os.environ).is_plain:
        return
    program = (sys.executable, "-m", "mpicomm", *sys.argv[1:])
    launch_plan.execute(launch_plan.build(Request(program, ranks), os.environ), "bench")


def timing(rounds: int, device: str) -> Bench:
    """Return the `Bench` for tensors on this device."""
    import torch

    from mpicomm.bench.timing import Bench
    from mpicomm.collective_ops.collectives import all_gather_object, barrier

    settle = torch.cuda.synchronize if device == "cuda" else lambda: None
    return Bench(all_gather_object, barrier, settle, rounds)


@contextlib.contextmanager
def progress(world: World, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar of `total` steps on rank 0's terminal, and yield the function that advances it by one."""
    with Progress(console=console(sys.stderr), disable=world.rank != 0 or terminal.columns(sys.stderr) is None) as bar:
        task = bar.add_task("measuring", total=total)
        yield lambda: bar.advance(task)
