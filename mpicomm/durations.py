"""Deadlines that ignore the time while a job is suspended, and durations as text."""

from __future__ import annotations

import time

_LONGEST_GAP = 1.0  # seconds between two checks of a deadline that count


class Deadline:
    """The end of a wait, in seconds during which this process ran.

    The monotonic clock continues while a job is suspended (Ctrl-Z, `scontrol suspend`). A waiting thread checks its
    deadline often, so a long gap between two checks means that the process was suspended. The part of a gap that
    exceeds `longest_gap` does not count.
    """

    def __init__(self, seconds: float, longest_gap: float = _LONGEST_GAP) -> None:
        """Begin the wait.

        Args:
            seconds: The length of the wait.
            longest_gap: The most seconds between two checks that count.
        """
        self.seconds = seconds
        """The length of the wait, in seconds."""

        self._longest_gap = longest_gap
        self._left = seconds
        self._looked = time.monotonic()

    def left(self) -> float:
        """Return the seconds left, negative once the deadline has passed; call it at least once per `longest_gap`."""
        now = time.monotonic()
        self._left -= min(now - self._looked, self._longest_gap)
        self._looked = now
        return self._left

    def passed(self) -> float:
        """Return the seconds counted so far."""
        return self.seconds - self.left()


def clock(seconds: float) -> str:
    """Return a duration as minutes:seconds, or hours:minutes:seconds."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
