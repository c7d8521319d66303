"""The interval between checkpoints by Young and Daly, and when it has passed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpicomm.training import save_interval
from mpicomm.training.save_interval import SaveInterval, optimal_seconds


def expected_seconds(interval: float, save: float, mtbf: float) -> float:
    """Return the expected time per second of training, for failures of a Poisson process (Daly 2006, equation 20).

    The time of a restart is a factor that does not depend on the interval.
    """
    return mtbf * math.expm1((interval + save) / mtbf) / interval


@pytest.mark.parametrize("share", [1e-6, 1e-4, 1e-2, 0.1, 0.3, 1.0])
def test_no_other_interval_loses_much_less_time(share: float) -> None:
    mtbf = 7200.0
    interval = optimal_seconds(share * mtbf, mtbf)
    least = min(expected_seconds(other, share * mtbf, mtbf) for other in np.geomspace(interval / 4, interval * 4, 999))
    assert expected_seconds(interval, share * mtbf, mtbf) < 1.001 * least


@pytest.mark.parametrize(
    ("save", "mtbf", "expected"),
    [
        (1.0, 86400.0, 415.03),  # Young: 415.7
        (60.0, 10800.0, 1098.8),  # Young: 1138.4
        (100.0, 50.0, 50.0),
        (1e3, 50.0, 50.0),
        (0.0, 50.0, 0.0),
    ],
)
def test_the_formula(save: float, mtbf: float, expected: float) -> None:
    assert optimal_seconds(save, mtbf) == pytest.approx(expected, abs=0.05)


def test_the_interval_begins_at_the_end_of_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(save_interval.time, "monotonic", lambda: now[0])
    interval = SaveInterval(node_mtbf_hours=12, num_nodes=4)
    assert interval.is_due, "the first save gives the first measurement"
    interval.choose(2.0)
    assert interval.mtbf_seconds == 3 * 3600
    assert interval.seconds == optimal_seconds(2.0, 3 * 3600)
    now[0] += interval.seconds - 1
    assert not interval.is_due
    now[0] += 1
    assert interval.is_due
    for _ in range(20):
        interval.choose(3.0)
    interval.choose(11.0)
    assert interval.save_seconds == 4.0, "one slow save of the last eight"
