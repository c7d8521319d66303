"""Timeouts, in seconds or as a `datetime.timedelta`, and deadlines that ignore the time while a job is suspended."""

from __future__ import annotations

import datetime
import numbers
import time
from typing import Any

from mpicomm.arguments import Expected

LONGEST = 1e9
"""The largest accepted timeout, in seconds: 31 years, so that a larger value is probably an error."""

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


def in_seconds(timeout: Any, shortest: float, otherwise: str) -> float | None:
    """Return a timeout in seconds; None stays None.

    Args:
        timeout: A number of seconds, a `datetime.timedelta` or None.
        shortest: The smallest accepted timeout, in seconds.
        otherwise: The timeout that applies by default, for the message.

    Raises:
        TypeError: If the timeout is neither a number nor a timedelta.
        ValueError: If the timeout is shorter than `shortest`, longer than `LONGEST`, or NaN.
    """
    if timeout is None:
        return None
    expected = Expected(
        "seconds or a datetime.timedelta",
        lambda value: isinstance(value, (numbers.Real, datetime.timedelta)) and not isinstance(value, bool),
        f"from {shortest:g} to {LONGEST:g} seconds",
        lambda value: shortest <= seconds_of(value) <= LONGEST,  # False where it is NaN
        f"Pass seconds or a datetime.timedelta, or omit the timeout for {otherwise}.",
    )
    expected.check(timeout, "timeout")
    return float(seconds_of(timeout))


def clock(seconds: float) -> str:
    """Return a duration as minutes:seconds, or hours:minutes:seconds."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def seconds_of(timeout: Any) -> Any:
    """Return a `datetime.timedelta` in seconds; a number is returned unchanged."""
    return timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
