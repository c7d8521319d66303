"""A launch of `mpicomm run`; with `--stage-env` on copies of the Python environment, which it makes and removes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence

from mpicomm.cli import launching
from mpicomm.cli.console import print_message
from mpicomm.cli.supervisor import End, handling
from mpicomm.errors import LaunchError
from mpicomm.launch.known_launchers import STOPS, WARNINGS
from mpicomm.launch.request import Request, Start
from mpicomm.launch.staged_env import StagedEnv

# For the 50,000 files of an environment with torch: 1 s, but a minute on a busy disk. If a host does not answer, the
# launcher may wait forever.
_REMOVE_SECONDS = 600.0
_REMOVE_SECONDS_AFTER_FAILURE = 60.0
_PROGRAM = (sys.executable, "-m", "mpicomm.cli.env_copy")


def starts(request: Request) -> list[Start]:
    """Return the launches of a request: of the program that copies the environment, if requested, and of the ranks.

    Raises:
        LaunchError: If the ranks cannot be started, or not from a copy.
        MPINotFoundError: If there is no MPI library.
    """
    env = _env(request)
    return [launching.build(request, os.environ)] if env is None else list(_starts(request, env))


def run(request: Request, grace: float) -> tuple[Start, End]:
    """Run the launches of a request, and return that of the ranks, and how it ended.

    Raises:
        LaunchError: If the ranks cannot be started, or the environment cannot be copied to every node.
        MPINotFoundError: If there is no MPI library.
        OSError: If the launcher cannot be executed.
    """
    env = _env(request)
    if env is None:
        ranks = launching.build(request, os.environ)
        return ranks, launching.execute(ranks, "run", grace)
    copying, ranks = _starts(request, env)
    seconds = _REMOVE_SECONDS_AFTER_FAILURE
    with _noting_signals(env.copy) as received:
        try:
            end = _run_on_copies(copying, ranks, grace, received)
            if end.status == 0:
                seconds = _REMOVE_SECONDS
        finally:
            _remove(request, env.copy, seconds)
        return ranks, _stopped(end, received)


def _run_on_copies(copying: Start, ranks: Start, grace: float, received: list[int]) -> End:
    copied = launching.execute(copying, "run", grace, received)
    if copied.stopped_by is None and copied.status:
        raise LaunchError(
            "no rank was started, since the environment could not be copied to every node.\n"
            "Pass another directory that is local to every node (--stage-env=DIR), or remove --stage-env."
        )
    copied = _stopped(copied, received)
    if copied.stopped_by is not None:
        return dataclasses.replace(copied, status=copied.status or 128 + copied.stopped_by)
    return launching.execute(ranks, "run", grace, received)


def _stopped(end: End, received: Sequence[int]) -> End:
    """Return the end of a launch, after which nothing more is started if a signal to stop has arrived meanwhile."""
    stops = [number for number in received if number in STOPS]
    return end if end.stopped_by is not None or not stops else dataclasses.replace(end, stopped_by=stops[0])


@contextlib.contextmanager
def _noting_signals(copy: str) -> Iterator[list[int]]:
    """Let no signal end this process, which would leave copies: yield those that arrive between launches and later."""
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)
        if number in STOPS:
            print_message("run", f"{signal.Signals(number).name}: removing {copy} from the nodes, then it exits")

    with handling((*STOPS, *WARNINGS, signal.SIGQUIT), note):
        yield received


def _env(request: Request) -> StagedEnv | None:
    if request.stage_directory is None:
        return None
    return StagedEnv.new(sys.prefix, request.stage_directory, secrets.token_hex(4))


def _starts(request: Request, env: StagedEnv) -> tuple[Start, Start]:
    """Return the launches of the program that copies the environment, and of the ranks."""
    copying = launching.on_every_host(request, (*_PROGRAM, env.prefix, env.copy), os.environ)
    copy, ranks = [launching.build(part, os.environ) for part in (copying, env.staged(request, sys.executable))]
    return dataclasses.replace(copy, has_input=False), ranks  # the input is that of the ranks


def _remove(request: Request, copy: str, seconds: float) -> None:
    """Remove the copies from all hosts: from one host at a time if not all of them can be reached.

    Args:
        seconds: The time limit for all hosts together.
    """
    program = (*_PROGRAM, "--remove", copy)
    try:
        removal = launching.build(launching.on_every_host(request, program, os.environ), os.environ)
        if launching.run_briefly(removal, seconds, in_own_session=True)[0] == 0:
            return
        hosts, is_step = launching.hosts(request, os.environ)
        reasons = launching.try_on_hosts(request, hosts, program, os.environ, is_step=is_step, in_own_session=True)
        left = [host.name for host, reason in reasons.items() if reason]
    except (LaunchError, OSError):
        hosts, left = (), []
    if left or not hosts:
        print_message(
            "run",
            f"{copy} may remain on {', '.join(left) or 'the nodes'}.\n"
            f"Remove it there: chmod -R u+rwX {copy} && rm -r {copy}",
        )
