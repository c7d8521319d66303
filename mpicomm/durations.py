"""Timeouts: as users pass them, seconds or a `datetime.timedelta`, and as waits keep them."""

from __future__ import annotations

import datetime
import numbers
import time
from typing import Any

from mpicomm.arguments import Expected

LONGEST = 1e9
"""Seconds; a timeout above this is more likely an error than 31 years."""

_LONGEST_GAP = 1.0  # seconds between two looks at a deadline that count


class Deadline:
    """The end of a wait: after so many seconds in which this process ran.

    The clock runs on while a job is suspended (Ctrl-Z, `scontrol suspend`). Who waits looks at its deadline often, so
    that a long gap between two looks says that the process stood still; what is too long of it does not count.
    """

    def __init__(self, seconds: float, longest_gap: float = _LONGEST_GAP) -> None:
        """Begin the wait.

        Args:
            longest_gap: As many seconds between two looks count.
        """
        self.seconds = seconds
        """How long the wait is in all."""

        self._longest_gap = longest_gap
        self._left = seconds
        self._looked = time.monotonic()

    def left(self) -> float:
        """Return how many seconds are left, less than 0 once it has passed; to be called at least once a second."""
        now = time.monotonic()
        self._left -= min(now - self._looked, self._longest_gap)
        self._looked = now
        return self._left

    def passed(self) -> float:
        """Return how many seconds have counted so far."""
        return self.seconds - self.left()


def in_seconds(timeout: Any, shortest: float, otherwise: str) -> float | None:
    """Return a timeout in seconds; None stays None.

    Args:
        shortest: The smallest timeout that is accepted, in seconds.
        otherwise: What holds if the caller passes no timeout, for the message.

    Raises:
        TypeError: If it is neither a number nor a timedelta.
        ValueError: If it is shorter than `shortest`, longer than `LONGEST`, or not a number.
    """
    if timeout is None:
        return None
    expected = Expected(
        "seconds or a datetime.timedelta",
        lambda value: isinstance(value, (numbers.Real, datetime.timedelta)) and not isinstance(value, bool),
        f"from {shortest:g} to {LONGEST:g} seconds",
        lambda value: shortest <= seconds_of(value) <= LONGEST,  # False where it is NaN
        f"Pass seconds or a datetime.timedelta, or leave the timeout out for {otherwise}.",
    )
    expected.check(timeout, "timeout")
    return float(seconds_of(timeout))


def seconds_of(timeout: Any) -> Any:
    """Return the seconds of a `datetime.timedelta`; a number is seconds already."""
    return timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
