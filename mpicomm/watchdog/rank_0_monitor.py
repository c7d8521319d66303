"""Detects that rank 0 is dead or does not respond, so that another rank must act in its place."""

from __future__ import annotations

from collections.abc import Callable

from mpicomm.arguments import Deadline
from mpicomm.recorder import hang_report, rank_text
from mpicomm.recorder.status import Crash
from mpicomm.watchdog import error_output
from mpicomm.watchdog.channel import RankInfo
from mpicomm.watchdog.protocol import COLLECT_SECONDS, LONGEST_GAP, LateOperation, PossibleHang, TimedOut

RESPONSE_SECONDS = 1.5 * COLLECT_SECONDS
"""Seconds without an answer after which rank 0 counts as not responding."""


class Rank0Monitor:
    """Watches rank 0 through the connection to this rank's hub, which is rank 0 itself for the hubs."""

    def __init__(self, rank_info: RankInfo, state_of: Callable[[int], str], synchronous_kernels: str = "") -> None:
        """Create the monitor.

        Args:
            state_of: Returns the state of a rank's process; empty if it is unknown.
            synchronous_kernels: The setting with which calls wait for their kernels on GPUs; empty without one.
        """
        self._rank_info = rank_info
        self._state_of = state_of
        self._synchronous_kernels = synchronous_kernels
        self._request: LateOperation | None = None  # the last request
        self._response_due: Deadline | None = None
        self._lost: tuple[Deadline, str, Crash | None] | None = None  # once the hub is lost: the deadline to act, why

    @property
    def turn(self) -> float:
        """Seconds that this rank waits for other ranks to act in place of rank 0."""
        behind = 0.0 if self._rank_info.hub == 0 else COLLECT_SECONDS
        return error_output.turn_of(self._rank_info.rank) + behind

    def remedy(self, *, recovers: bool) -> str:
        """Return the next step if the connection to the hub is lost; otherwise an empty text.

        Args:
            recovers: Whether the job continues if a rank fails.
        """
        if self._lost is None:
            return ""
        _, lost, crash = self._lost
        if recovers and hang_report.is_unreachable(lost):
            return hang_report.HOST_REMEDY
        return hang_report.remedy_after_death(crash, self._synchronous_kernels)

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
            if deadline.count_down() > 0:
                return ""
            return f"{self._hub_name()} died: {hang_report.cause_of_loss(lost, crash)}"
        return self._describe_missing_response(TimedOut, self.turn)

    def take_cause_of_report(self) -> str:
        """Return, once for each request, why this rank must report a possible hang now; empty if it need not."""
        cause = "" if self._lost is not None else self._describe_missing_response(PossibleHang, 0.0)
        if cause:
            self._response_due = None
        return cause if self._rank_info.rank == 1 else ""  # every rank may wait for rank 0: one prints for all

    def _describe_missing_response(self, kind: type[LateOperation], delay: float) -> str:
        if self._response_due is None or not isinstance(self._request, kind):
            return ""
        late = -self._response_due.count_down()
        return self.describe_silence(RESPONSE_SECONDS + late) if late >= delay else ""

    def describe_silence(self, seconds: float) -> str:
        """Return that the hub has not responded for some seconds, with the state of its process."""
        state = self._state_of(self._rank_info.hub)
        return f"{self._hub_name()} has not responded for {seconds:.0f} s{': ' if state else ''}{state}"

    def _hub_name(self) -> str:
        return rank_text.full_name([self._rank_info.hub], self._rank_info.hosts)
