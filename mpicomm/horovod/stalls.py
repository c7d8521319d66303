"""Reports tensors that some ranks have submitted and others have not."""

from __future__ import annotations

import sys
import time

from mpicomm.horovod.negotiation import Announcement, Negotiation
from mpicomm.horovod.variables import Variables


class StallCheck:
    """Checks after each round how long names have waited. All ranks hold the same names, so one rank reports them."""

    def __init__(self, negotiation: Negotiation, variables: Variables, *, is_reporter: bool) -> None:
        self._negotiation, self._is_reporter = negotiation, is_reporter
        self._report_after = variables.stall_check_seconds
        # A round may be as late as the next heartbeat, and the report must not be.
        self._wait = self._report_after - variables.heartbeat_seconds
        self._shutdown_after = variables.stall_shutdown_seconds
        self._reported: dict[str, float] = {}

    def run(self) -> str:
        """Report the names that have waited for longer than the limit.

        Returns:
            The reason to shut down if a name has waited for HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, otherwise "".
        """
        announced = self._negotiation.announced
        if not self._report_after or not announced:
            return ""
        now = time.monotonic()
        self._reported = {name: at for name, at in self._reported.items() if name in announced}
        late = {
            name: each
            for name, each in announced.items()
            if now - max(each.start, self._reported.get(name, 0.0)) >= self._wait
        }
        if late:
            self._reported.update(dict.fromkeys(late, now))
            if self._is_reporter:
                _write(self._report(late, now))
        if self._shutdown_after:
            for name, each in announced.items():
                if now - each.start >= self._shutdown_after:
                    return (
                        f"{name} waited {now - each.start:.0f} s for ranks {self._missing(each)}.\n"
                        f"Submit it on all ranks, or raise HOROVOD_STALL_SHUTDOWN_TIME_SECONDS."
                    )
        return ""

    def _report(self, late: dict[str, Announcement], now: float) -> str:
        lines = [
            f"  {name}: waiting {now - each.start:.1f} s for ranks {self._missing(each)}" for name, each in late.items()
        ]
        return "\n".join(
            [
                "mpicomm: stalled tensors: some ranks have submitted these names, other ranks have not:",
                *lines,
                "Submit every name on all ranks of its process set, or call hvd.join() on ranks without further data.",
            ]
        )

    def _missing(self, announcement: Announcement) -> str:
        return ", ".join(map(str, self._negotiation.missing(announcement)))


def _write(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
