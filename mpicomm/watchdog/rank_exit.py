"""The exit of this rank: its report to rank 0, and the deadline for destroying the process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mpicomm.arguments import Deadline
from mpicomm.watchdog import exit_hooks, flight_recorder
from mpicomm.watchdog.protocol import LONGEST_GAP, RankExited

_TAKE_DOWN_SECONDS = 60.0  # time limit for destroying each process group once all ranks have exited


class RankExit:
    """The reports of one rank about its exit, and rank 0's report that all ranks have exited."""

    def __init__(self, rank: int, report: Callable[[RankExited], None]) -> None:
        """Create the record.

        Args:
            report: Sends a message to rank 0.
        """
        self._rank = rank
        self._report = report
        self.is_reported = False
        self.all_exited = threading.Event()
        self.is_stuck = False
        """Once all ranks have exited: whether one of them has an operation that may never end."""

        self._deadline: Deadline | None = None  # for destroying the next process group
        self._last: flight_recorder.Operation | None = None  # the last operation at the last check

    def report(self, status: int | None, *, is_stuck: bool, waits: bool, sends: bool) -> None:
        """Report that this rank calls no more operations, unless it has done so before."""
        if not self.is_reported:
            self.is_reported = True
            self._report(RankExited(self._rank, status, is_stuck, waits, sends, flight_recorder.sequences()))

    def start_deadline(self) -> None:
        """Start the deadline for destroying a group: all ranks destroy their groups now, so none takes long."""
        self._deadline = Deadline(_TAKE_DOWN_SECONDS, LONGEST_GAP)

    def is_late(self, seconds: float) -> bool:
        """Return whether destroying a group has taken longer than its deadline by so many seconds."""
        return self._deadline is not None and self._deadline.count_down() <= -seconds

    def check(self) -> None:
        """Restart the deadline for each group, and report the exit of a program that has ended; once a second."""
        if self._deadline is not None and flight_recorder.last() is not self._last:
            self._last = flight_recorder.last()
            self.start_deadline()
        if _has_program_ended():
            self.report(exit_hooks.exit_status(), is_stuck=False, waits=True, sends=False)


def _has_program_ended() -> bool:
    """Return whether `sys.exit` with a status other than 0 ended the program while threads keep the process alive.

    Without such a status, the threads may do the work of the program.
    """
    if threading.main_thread().is_alive() or not exit_hooks.exit_status():
        return False
    return not flight_recorder.is_used_by_a_thread() and not flight_recorder.has_open_collectives()
