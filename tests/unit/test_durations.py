"""Timeouts as arguments of users, and as deadlines of waits."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest

from mpicomm import arguments, mpi
from mpicomm.arguments import Deadline, in_seconds


@pytest.mark.parametrize("timeout", [2, 2.0, np.int64(2), datetime.timedelta(seconds=2)])
def test_seconds_and_timedeltas_are_accepted(timeout: Any) -> None:
    assert in_seconds(timeout, 1, "the default") == 2.0


def test_no_timeout_stays_none() -> None:
    assert in_seconds(None, 1, "the default") is None


@pytest.mark.parametrize("timeout", [-1, 0, 0.5, 2e9, 10**400, float("nan"), datetime.timedelta(-1)])
def test_a_timeout_out_of_range_is_refused(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"^timeout must be from 1 to 1e\+09 seconds, got ") as caught:
        in_seconds(timeout, 1, "the default")
    remedy = "Pass seconds or a datetime.timedelta, or omit the timeout for the default."
    assert str(caught.value).endswith(f", got {timeout!r}.\n{remedy}")


@pytest.mark.parametrize("timeout", ["5", True, [5]])
def test_a_timeout_of_a_wrong_type_is_refused(timeout: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^timeout must be seconds or a datetime.timedelta, got .+ \((str|bool|list)\)\."
    ):
        in_seconds(timeout, 1, "the default")


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(arguments, "time", clock)
    return clock


def test_a_deadline_passes(clock: Clock) -> None:
    deadline = Deadline(3.0)
    left = []
    for _ in range(4):
        clock.now += 0.875
        left.append(deadline.count_down())
    assert left == [2.125, 1.25, 0.375, -0.5]
    assert deadline.count_up() == 3.5
    assert deadline.seconds == 3.0


def test_a_deadline_does_not_count_the_time_of_a_suspension(clock: Clock) -> None:
    deadline = Deadline(3.0)
    clock.now += 3600.0
    assert deadline.count_down() == 2.0
    clock.now += 0.5
    assert deadline.count_down() == 1.5
    clock.now += 3600.0
    assert deadline.count_down() == 0.5


def test_rare_checks_count_with_a_longer_gap(clock: Clock) -> None:
    deadline = Deadline(9.0, longest_gap=2.0)
    clock.now += 1.5
    assert deadline.count_down() == 7.5
    clock.now += 60.0
    assert deadline.count_down() == 5.5


def test_polling_continues_after_a_suspension(clock: Clock) -> None:
    looks = 0

    def done() -> bool:
        nonlocal looks
        looks += 1
        clock.now += 60.0 if looks == 250 else 0.001
        return looks == 300

    assert mpi.poll(done, 2.0)
    looks = 0
    assert not mpi.poll(done, 0.25)
