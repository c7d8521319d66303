"""Detects that rank 0 is dead or does not respond, so that another rank must act in its place."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from mpicomm.arguments import Deadline
from mpicomm.watchdog import hang_report
from mpicomm.watchdog.channel import RankInfo
from mpicomm.watchdog.protocol import COLLECT_SECONDS, LONGEST_GAP, Crash, LateOperation, PossibleHang, TimedOut

RESPONSE_SECONDS = 1.5 * COLLECT_SECONDS
"""Seconds without an answer after which rank 0 counts as not responding."""

MAX_REPORTERS = 8
"""How many ranks may report in place of rank 0."""

DEATH_REMEDY = (
    "Check the output of that rank, and the kernel's log of its host (dmesg): it names processes that were killed for "
    "lack of memory."
)
"""The next step after the death of a rank."""

CRASH_REMEDY = (
    "Native code crashed: see the stacks in the output of that rank. To find the call in it, run the job under gdb; "
    "with GPUs, set CUDA_LAUNCH_BLOCKING=1, too."
)
"""The next step after the death of a rank that a signal such as SIGSEGV has ended."""

HOST_REMEDY = (
    "mpirun does not continue without a host. With mpicomm run --max-restarts N, the job starts again on the other "
    "hosts, and continues from its newest checkpoint."
)
"""The next step after the loss of a host."""

_UNREPORTED = (
    "its process ended without reporting an error or a signal (killed, for example for lack of memory, os._exit or "
    "MPI_Abort)"
)
_TURN_SECONDS = 2.0  # delay of each of them after the previous one
_UNREACHABLE = {os.strerror(each) for each in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)}


class Rank0Monitor:
    """Watches rank 0 through the connection to this rank's hub, which is rank 0 itself for the hubs."""

    def __init__(self, place: RankInfo, state_of: Callable[[int], str]) -> None:
        """Create the monitor.

        Args:
            state_of: Returns the state of a rank's process; empty if it is unknown.
        """
        self._place = place
        self._state_of = state_of
        self._request: LateOperation | None = None  # the last request
        self._response_due: Deadline | None = None
        self._lost: tuple[Deadline, str, Crash | None] | None = None  # once the hub is lost: the deadline to act, why

    @property
    def turn(self) -> float:
        """Seconds that this rank waits for other ranks to act in place of rank 0."""
        behind = 0.0 if self._place.hub == 0 else COLLECT_SECONDS
        return turn_of(self._place.rank) + behind

    def remedy(self, *, recovers: bool) -> str:
        """Return the next step if the connection to the hub is lost; otherwise an empty text.

        Args:
            recovers: Whether the job continues if a rank fails.
        """
        if self._lost is None:
            return ""
        _, lost, crash = self._lost
        return HOST_REMEDY if recovers and is_unreachable(lost) else remedy_of_death(crash is not None)

    @property
    def is_lost(self) -> bool:
        """Whether the connection to the hub is lost."""
        return self._lost is not None

    @property
    def is_silent(self) -> bool:
        """Whether rank 0 has not answered a request in the time in which ranks report their status."""
        return self._response_due is not None and self._response_due.count_up() > COLLECT_SECONDS

    def expect_response(self, request: LateOperation) -> None:
        """Start the deadline for rank 0's answer to a request, unless it is running already."""
        self._request = request
        self._response_due = self._response_due or Deadline(RESPONSE_SECONDS, LONGEST_GAP)

    def record_response(self) -> None:
        """Record that a message of rank 0 has arrived."""
        self._response_due = None

    def record_loss(self, lost: str, crash: Crash | None) -> None:
        """Record that the connection to the hub is lost."""
        self._lost = Deadline(self.turn, LONGEST_GAP), lost, crash

    def cause_of_abort(self) -> str:
        """Return why this rank must abort the job now; empty if it need not."""
        if self._lost is not None:
            deadline, lost, crash = self._lost
            return f"{self._hub_name()} died: {cause_of_loss(lost, crash)}" if deadline.count_down() <= 0 else ""
        return self._describe_missing_response(TimedOut, self.turn)

    def cause_of_report(self) -> str:
        """Return why this rank must report a possible hang now; empty if it need not."""
        cause = "" if self._lost is not None else self._describe_missing_response(PossibleHang, 0.0)
        if cause:
            self._response_due = None
        return cause if self._place.rank == 1 else ""

    def _describe_missing_response(self, kind: type[LateOperation], delay: float) -> str:
        if self._response_due is None or not isinstance(self._request, kind):
            return ""
        late = -self._response_due.count_down()
        return self.describe_silence(RESPONSE_SECONDS + late) if late >= delay else ""

    def describe_silence(self, seconds: float) -> str:
        """Return that the hub has not responded for some seconds, with the state of its process."""
        state = self._state_of(self._place.hub)
        return f"{self._hub_name()} has not responded for {seconds:.0f} s{': ' if state else ''}{state}"

    def _hub_name(self) -> str:
        return hang_report.full_name([self._place.hub], self._place.hosts)


def turn_of(rank: int) -> float:
    """Return how many seconds a rank waits for lower ranks to report, when rank 0 does not respond."""
    return _TURN_SECONDS * min(max(rank - 1, 0), MAX_REPORTERS)


def is_unreachable(lost: str) -> bool:
    """Return whether a connection was lost because the other host does not answer."""
    return lost in _UNREACHABLE


def remedy_of_death(has_crashed: bool) -> str:
    """Return the next step after the death of a rank."""
    return CRASH_REMEDY if has_crashed else DEATH_REMEDY


def cause_of_loss(lost: str, crash: Crash | None = None) -> str:
    """Return why a rank died, from the reason why its connection was lost, and its own last message."""
    if crash is not None:
        return f"{crash.signal} ended its process" + (f"; last Python line: {crash.line}" if crash.line else "")
    if is_unreachable(lost):
        return f"its host is unreachable ({lost})"
    return _UNREPORTED
