"""`mpicomm top`: shows what each rank of a running job does, from another terminal of the same user."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mpicomm import terminal
from mpicomm.cli import top_table
from mpicomm.cli.console import FAILED, console, failed, print_json, print_message
from mpicomm.cli.job_observer import JobObserver, JobStatus
from mpicomm.cli.top_table import RankRow
from mpicomm.watchdog import job_files
from mpicomm.watchdog.job_files import JobFile, ListedJob
from mpicomm.watchdog.observers import IDLE_SECONDS

_FRAME_LINES = 5  # of the screen: the line above the table, its title and borders
_INTERVAL = 2.0
_STARTED = "%Y-%m-%d %H:%M:%S"
_LONGEST_INTERVAL = IDLE_SECONDS / 2
_QUIT = (b"q", b"Q")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "top",
        help="show what each rank of a running job does",
        description="Show the operation, source line, throughput, memory and GPU of each rank of a running job. Run it "
        "as the user of the job, on the host of `mpicomm run` or, if another launcher started the job, of rank 0. "
        "q or Ctrl-C ends it; the job is not affected.",
    )
    parser.add_argument(
        "job",
        metavar="JOB",
        nargs="?",
        help="the name of the job, or a part of it that no other job has; "
        "without it, the only job of this user, or a list of the jobs",
    )
    parser.add_argument(
        "--once", action="store_true", help="print the table once, as if the output were not a terminal"
    )
    parser.add_argument("--json", action="store_true", help="print JSON once")
    parser.add_argument(
        "--interval", metavar="S", type=_seconds, default=_INTERVAL, help="seconds between two updates (default: 2)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the job, and return the exit status."""
    jobs = _without_ended(job_files.listed())
    chosen = jobs if arguments.job is None else [listed for listed in jobs if arguments.job in listed.job.name]
    exact = [listed for listed in chosen if listed.job.name == arguments.job]
    chosen = exact or chosen
    if not chosen or (arguments.job is not None and len(chosen) > 1):
        return failed("top", _no_job(arguments.job, chosen))
    if len(chosen) > 1:
        _print_jobs([listed.job for listed in chosen], as_json=arguments.json)
        return 0
    try:
        observer = JobObserver(chosen[0])
    except OSError as error:
        return failed("top", error)
    with contextlib.closing(observer):
        return _show(observer, arguments)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) <= _LONGEST_INTERVAL:
            return seconds
    raise argparse.ArgumentTypeError(
        f"expected a number of seconds greater than 0 and at most {_LONGEST_INTERVAL:g}, got {text}"
    )


# -- the jobs of this user ---------------------------------------------------------------------------------------------


def _without_ended(jobs: Sequence[ListedJob]) -> list[ListedJob]:
    """Return the running jobs; name the others, and remove their files."""
    for listed in jobs:
        if not listed.is_running:
            job = listed.job
            print_message("top", f"job {job.name} ({job.program}) has ended without removing {listed.path}")
            with contextlib.suppress(OSError):
                listed.remove()
    return [listed for listed in jobs if listed.is_running]


def _no_job(name: str | None, several: Sequence[ListedJob]) -> str:
    user, host = os.environ.get("USER") or os.getuid(), socket.gethostname()
    if several:
        names = ", ".join(listed.job.name for listed in several)
        return f"JOB must name one job, got {name}, which is a part of {names}.\nUse the whole name."
    wanted = "no running job" if name is None else f"no running job whose name contains {name}"
    places = " or ".join(map(str, job_files.folders()))
    return (
        f"{wanted} of user {user} on {host}, expected its file in {places}.\n"
        f"Run `mpicomm top` on the host of `mpicomm run`, or, if mpirun or srun started the job, on that of rank 0; "
        f"jobs under torchrun cannot be shown."
    )


def _print_jobs(jobs: Sequence[JobFile], *, as_json: bool) -> None:
    if as_json:
        values = [{"job": job.name, "size": job.size, "started": job.started, "program": job.program} for job in jobs]
        print_json({"jobs": values})
        return
    cells = [(job.name, job.size, time.strftime(_STARTED, time.localtime(job.started)), job.program) for job in jobs]
    console().print(terminal.table(("job", "ranks", "started", "program"), cells, right=("ranks",)))
    console().print(Text("Show one of them: mpicomm top JOB"))


# -- one job -----------------------------------------------------------------------------------------------------------


def _show(observer: JobObserver, arguments: argparse.Namespace) -> int:
    try:
        if arguments.json or arguments.once or not _is_interactive():
            status = observer.ask()
            assert status is not None  # nothing interrupts the wait
            if arguments.json:
                print_json(top_table.as_json(status))
            else:
                console().print(_headline(status), soft_wrap=True)
                console().print(top_table.table(top_table.rows(status)))
        else:
            _update(observer, arguments.interval)
    except ConnectionError as error:
        print_message("top", error)
        return 0 if not (arguments.json or arguments.once) else FAILED
    except OSError as error:
        return failed("top", error)
    except KeyboardInterrupt:
        return 0 if _is_interactive() else 128 + signal.SIGINT
    return 0


def _is_interactive() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _update(observer: JobObserver, interval: float) -> None:
    """Show the status until the user quits or the job ends.

    Raises:
        OSError: If the job does not answer, or has ended.
    """
    with _keyboard() as wants_to_quit, Live(console=console(), screen=True, auto_refresh=False) as live:
        keys = sys.stdin.fileno() if wants_to_quit is not None else None
        while True:
            status = observer.ask(keys)
            if status is not None:
                live.update(_screen(status, live.console), refresh=True)
            if wants_to_quit is None:
                time.sleep(interval)
            elif wants_to_quit(interval if status is not None else 0.0):
                return


@contextlib.contextmanager
def _keyboard() -> Iterator[Callable[[float], bool] | None]:
    """Read keys without echo and without Enter.

    Yields:
        A function that waits some seconds, and returns whether the user has pressed q; None without a keyboard.
    """
    if not sys.stdin.isatty() or os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
        yield None
        return
    file = sys.stdin.fileno()

    def wants_to_quit(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while select.select([file], [], [], max(0.0, end - time.monotonic()))[0]:
            key = os.read(file, 1)
            if key in _QUIT or not key:
                return True
        return False

    before: list[Any] = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)
        yield wants_to_quit
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _screen(status: JobStatus, out: Console) -> Group:
    """Return the table, cut to the height of the terminal."""
    rows = top_table.rows(status)
    fitting = max(1, out.height - _FRAME_LINES)
    shown: Sequence[RankRow] = rows if len(rows) <= fitting else rows[: max(1, fitting - 1)]
    table = top_table.table(shown)
    for column in table.columns:
        column.no_wrap = True  # one line per rank
    parts: list[Text | Table] = [_headline(status), table]
    if len(shown) < len(rows):
        parts.append(Text(f"... and {len(rows) - len(shown)} more ranks; mpicomm top {status.job.name} --once"))
    return Group(*parts)


def _headline(status: JobStatus) -> Text:
    job, running = status.job, time.time() - status.job.started
    hours, minutes = int(running // 3600), int(running // 60) % 60
    ranks = f"{job.size} rank{'s' if job.size > 1 else ''}"
    clock = f"{hours}:{minutes:02}:{int(running) % 60:02}"
    text = f"job {job.name}: {ranks}, running for {clock}, answered in {status.seconds:.3f} s  {job.program}"
    return Text(text, no_wrap=True, overflow="ellipsis")
