"""Checks of user arguments and environment variables, and deadlines.

Every error states the expected value, the value got and the next step.
"""

from __future__ import annotations

import dataclasses
import datetime
import numbers
import os
import time
from collections.abc import Callable
from typing import Any

from mpicomm.errors import LaunchError

Timeout = float | datetime.timedelta | None
"""A timeout argument of a public function: seconds, a timedelta, or None for the default."""

_SHOWN = 500  # the most characters of a value in a message
_LONGEST_TIMEOUT = 1e9  # seconds: 31 years, so that a larger value is probably an error
_MOST_DIGITS = 18  # of a whole number in a variable: it fits in 64 bits; int() refuses more than 4,300 digits
_LONGEST_GAP = 1.0  # seconds between two checks of a deadline that count


@dataclasses.dataclass(frozen=True)
class Expected:
    """The type and the range of an argument."""

    kind: str
    """The type, as the message shows it: `an integer`."""

    is_kind: Callable[[Any], bool]
    limits: str = ""
    """The range, as the message shows it: `an integer from 0 to 3`; `kind` by default."""

    is_within: Callable[[Any], bool] = lambda _: True
    remedy: str = ""
    """The last line of the message, the next step; by default, to pass a value in range."""

    def check(self, value: Any, name: str, caller: str = "") -> None:
        """Check a value.

        Args:
            value: The value.
            name: The name of the argument.
            caller: The name of the function, if the traceback alone does not show it.

        Raises:
            TypeError: If the value is of another type.
            ValueError: If the value is out of range.
        """
        if not self.is_kind(value):
            raise TypeError(self._message(self.kind, f"{shown(value)} ({type(value).__name__})", name, caller))
        if not self.is_within(value):
            raise ValueError(self._message(self.limits or self.kind, shown(value), name, caller))

    def or_none(self) -> Expected:
        """Return a check that accepts None too."""
        return dataclasses.replace(
            self,
            kind=f"{self.kind} or None",
            is_kind=lambda value: value is None or self.is_kind(value),
            limits=f"{self.limits.replace(' or ', ', ')} or None" if self.limits else "",
            is_within=lambda value: value is None or self.is_within(value),
        )

    def _message(self, expected: str, got: str, name: str, caller: str) -> str:
        prefix = f"{caller}: " if caller else ""
        return f"{prefix}{name} must be {expected}, got {got}.\n{self.remedy or f'Pass {expected}.'}"


def shown(value: Any) -> str:
    """Return the repr of a value, shortened to `_SHOWN` characters."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def integer(least: int | None = None, most: int | None = None, remedy: str = "") -> Expected:
    """Expect an integer, from `least` to `most` if they are given."""
    if most is not None:
        limits = f"an integer from {least} to {most}"
    else:
        limits = {None: "", 1: "a positive integer"}.get(least, f"an integer from {least}")
    return Expected(
        "an integer",
        lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool),
        limits,
        lambda value: (least is None or value >= least) and (most is None or value <= most),
        remedy,
    )


def number(limits: str, is_within: Callable[[Any], bool]) -> Expected:
    """Expect a real number within limits."""
    return Expected("a number", _is_real, limits, is_within)


def one_of(*known: str) -> Expected:
    """Expect one of the given strings."""
    names = [repr(word) for word in known]
    limits = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
    return Expected("a str", lambda value: isinstance(value, str), limits, lambda value: value in known)


def instance(kind: str, *types: type, remedy: str = "") -> Expected:
    """Expect an instance of one of the given classes."""
    return Expected(kind, lambda value: isinstance(value, types), remedy=remedy)


def in_seconds(timeout: Any, shortest: float, otherwise: str) -> float | None:
    """Return a timeout in seconds; None stays None.

    Args:
        timeout: A number of seconds, a `datetime.timedelta` or None.
        shortest: The smallest accepted timeout, in seconds.
        otherwise: The timeout that applies by default, for the message.

    Raises:
        TypeError: If the timeout is neither a number nor a timedelta.
        ValueError: If the timeout is shorter than `shortest`, longer than `_LONGEST_TIMEOUT`, or NaN.
    """
    if timeout is None:
        return None
    expected = Expected(
        "seconds or a datetime.timedelta",
        lambda value: _is_real(value) or isinstance(value, datetime.timedelta),
        f"from {shortest:g} to {_LONGEST_TIMEOUT:g} seconds",
        lambda value: shortest <= seconds_of(value) <= _LONGEST_TIMEOUT,  # False where it is NaN
        f"Pass seconds or a datetime.timedelta, or omit the timeout for {otherwise}.",
    )
    expected.check(timeout, "timeout")
    return float(seconds_of(timeout))


def seconds_of(timeout: Any) -> Any:
    """Return a `datetime.timedelta` in seconds; a number is returned unchanged."""
    return timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout


def function(kind: str, remedy: str) -> Expected:
    """Expect a function or another callable that is not a class, or None."""
    return Expected(
        kind, lambda value: value is None or (callable(value) and not isinstance(value, type)), remedy=remedy
    )


@dataclasses.dataclass(frozen=True)
class Variable:
    """The valid values of an environment variable."""

    expected: str
    is_valid: Callable[[str], bool]
    default: str = ""
    """The effect of unsetting the variable, for the message."""

    parse: Callable[[str], Any] = str

    def read(self, text: str, name: str, remedy: str = "") -> Any:
        """Return the value of a variable.

        Args:
            text: Its text.
            name: Its name, for the message.
            remedy: The last line of the message; by default, to correct or unset the variable.

        Raises:
            LaunchError: If it is invalid.
        """
        if not self.is_valid(text):
            remedy = remedy or f"Correct it, or unset it{self.default}."
            raise LaunchError(f"{name} must be {self.expected}, got {shown(text)}.\n{remedy}")
        return self.parse(text)


def whole_number(least: int, most: float = float("inf")) -> Callable[[str], bool]:
    """Return a check whether a text, without blanks around it, is a whole number within limits.

    Unlike int(), isdigit() accepts `²`.
    """

    def is_valid(text: str) -> bool:
        digits = text.strip()
        return digits.isdecimal() and len(digits) <= _MOST_DIGITS and least <= int(digits) <= most

    return is_valid


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


FLAG = instance("True or False", bool)
TEXT = instance("a str", str)
POSITIVE = integer(1)
PATH = instance("a path (a str or an os.PathLike)", str, os.PathLike)
PORT = Variable("a number from 1 to 65535", whole_number(1, 65535), parse=int)


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

    def count_down(self) -> float:
        """Count the time since the last call, and return the seconds left, negative once the deadline has passed.

        Call it at least once per `longest_gap`.
        """
        now = time.monotonic()
        self._left -= min(now - self._looked, self._longest_gap)
        self._looked = now
        return self._left

    def count_up(self) -> float:
        """Count the time since the last call, and return the seconds counted so far."""
        return self.seconds - self.count_down()
