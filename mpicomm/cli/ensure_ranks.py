"""For commands that measure ranks: starts the ranks if there are none, and shows the progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.progress import Progress

from mpicomm import terminal
from mpicomm.cli import launch_plan
from mpicomm.cli.console import console
from mpicomm.launch import detect
from mpicomm.launch.request import Request

Case = TypeVar("Case")


def ensure(ranks: int | None) -> None:
    """Return in a rank; otherwise run this same command in ranks, and exit with its status.

    Args:
        ranks: Number of ranks to start; None for the capacity of the machine or the allocation.

    Raises:
        LaunchError: If the ranks cannot be started.
        MPINotFoundError: If there is no MPI library.
    """
    if not detect.detect(os.environ).is_plain:
        return
    program = (sys.executable, "-m", "mpicomm", *sys.argv[1:])
    sys.exit(launch_plan.execute(launch_plan.build(Request(program, ranks), os.environ), "bench").status)


def progress(rank: int, cases: Sequence[Case]) -> Iterator[Case]:
    """Yield the cases, and show a progress bar on rank 0's terminal."""
    with Progress(console=console(sys.stderr), disable=rank != 0 or terminal.columns(sys.stderr) is None) as bar:
        yield from bar.track(cases, description="measuring")
