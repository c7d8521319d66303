"""The arithmetic of `benchmarks.recovery_peers` with known logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.recovery_peers import killed_job
from benchmarks.recovery_peers.killed_job import PROCESSES


def attempt(time: float, size: int = PROCESSES - 1, *, applied: bool = True, received: bool = False) -> dict[str, Any]:
    return {"time": time, "step": 0, "size": size, "applied": applied, "received": received}


def test_the_gap_ends_when_the_last_process_has_completed_a_step_without_the_killed_one() -> None:
    logs = [
        [attempt(9.0), attempt(10.1, PROCESSES), attempt(10.5), attempt(10.6)],
        [attempt(10.2, applied=False), attempt(10.7), attempt(10.8, applied=False)],
        [attempt(10.3, applied=False), attempt(10.4, applied=False), attempt(10.6, received=True)],
    ]
    found = killed_job.result_of(logs, 10.0)
    assert found == {"gap_s": 0.7, "discarded": 2, "received": 1, "problem": ""}


@pytest.mark.parametrize(
    ("last", "ended", "problem"),
    [
        ([attempt(10.5, PROCESSES)], [], "no step within 90 s"),
        ([attempt(10.5, applied=False)], [], "no step within 90 s"),
        ([], [], "no step within 90 s"),
        ([attempt(10.5)], [2], "processes [2] ended"),
    ],
)
def test_a_job_that_does_not_continue_has_no_gap(
    last: Sequence[dict[str, Any]], ended: Sequence[int], problem: str
) -> None:
    found = killed_job.result_of([[attempt(10.5)], last], 10.0, ended, 90)
    assert (found["gap_s"], found["problem"]) == (None, problem)
