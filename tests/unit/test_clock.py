"""The offset of a rank's clock to that of rank 0."""

from __future__ import annotations

import pytest

from mpicomm.watchdog import clock
from mpicomm.watchdog.clock import ClockMonitor


class Clocks:
    """The clocks of several hosts, of which one at a time is read."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.shift = 0.0  # of the clock that is read

    def monotonic(self) -> float:
        return self.now + self.shift


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    fake = Clocks()
    monkeypatch.setattr(clock, "time", fake)
    monkeypatch.setattr(clock, "clock_identity", lambda: f"host {fake.shift}")
    return fake


def exchange(
    clocks: Clocks, rank: ClockMonitor, hub: ClockMonitor, shifts: tuple[float, float], there: float, back: float
) -> None:
    """Let a rank ask its hub; the messages travel for `there` and `back` seconds."""
    clocks.shift = shifts[0]
    probe = rank.probe()
    clocks.now, clocks.shift = clocks.now + there, shifts[1]
    answer = hub.answer(probe)
    clocks.now, clocks.shift = clocks.now + back, shifts[0]
    rank.record(answer)


@pytest.mark.parametrize(("there", "back"), [(1e-3, 1e-3), (3e-3, 1e-3), (0.0, 5e-3)])
def test_the_error_is_at_most_half_of_the_round_trip(clocks: Clocks, there: float, back: float) -> None:
    rank = ClockMonitor(1)
    exchange(clocks, rank, ClockMonitor(0), (-40.0, 0.0), there, back)
    offset = rank.offset()
    assert offset.error == pytest.approx((there + back) / 2)
    assert abs(offset.seconds - 40.0) <= offset.error + 1e-9
    assert offset.seconds - 40.0 == pytest.approx((there - back) / 2)


def test_the_offset_of_the_hub_is_added(clocks: Clocks) -> None:
    rank, hub = ClockMonitor(5), ClockMonitor(4)
    exchange(clocks, rank, hub, (7.0, -3.0), 1e-4, 1e-4)  # the hub knows nothing yet
    assert rank.offset() is None
    exchange(clocks, hub, ClockMonitor(0), (-3.0, 0.0), 1e-3, 1e-3)
    exchange(clocks, rank, hub, (7.0, -3.0), 1e-4, 1e-4)
    offset = rank.offset()
    assert (offset.seconds, offset.error) == pytest.approx((-7.0, 1.1e-3), rel=1e-4)


def test_ranks_with_one_clock_have_no_error(clocks: Clocks) -> None:
    rank = ClockMonitor(1)
    exchange(clocks, rank, ClockMonitor(0), (0.0, 0.0), 0.2, 0.1)
    offset = rank.offset()
    assert (offset.seconds, offset.error) == (0.0, 0.0)
    assert rank.probe() is None  # until the next period


def test_the_shortest_round_trip_counts_until_the_clocks_may_have_diverged(clocks: Clocks) -> None:
    rank, zero = ClockMonitor(1), ClockMonitor(0)
    for seconds in [1e-4, *[1e-2] * (clock._FIRST_SAMPLES - 1)]:
        exchange(clocks, rank, zero, (2.0, 0.0), 0.0, seconds)
    assert rank.offset().error == pytest.approx(5e-5, abs=1e-5)
    assert rank.probe() is None
    clocks.now += 1000.0
    exchange(clocks, rank, zero, (2.0, 0.0), 0.0, 1e-2)
    assert rank.offset().error == pytest.approx(5e-3, abs=1e-5)
