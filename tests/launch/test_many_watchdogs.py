"""The watchdogs of forty ranks on eight nodes, without MPI and torch: their reports are correct with hubs, too."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from mpicomm.recorder.hang_report import DEATH_REMEDY, cause_of_loss
from tests.launching import run_command

SIZE, PER_NODE = 40, 5
CAUSE = cause_of_loss("closed")


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """Run all measurements once; `run_command` fails if they leave a process behind."""
    size = ["tests.launch.many_watchdogs", str(SIZE), "--per-node", str(PER_NODE)]
    outcome = run_command([sys.executable, "-m", *size, "--idle", "0.5", "--json"])
    assert outcome.status == 0, str(outcome)
    assert outcome.stderr == ""
    seen: dict[str, Any] = json.loads(outcome.stdout)
    return seen


@pytest.mark.parametrize(("name", "rank", "node"), [("leaf", 38, 7), ("hub", 35, 7)])
def test_a_rank_that_is_killed_is_named_once(figures: dict[str, Any], name: str, rank: int, node: int) -> None:
    printed, ended = figures["ends"][name]
    text = f"[mpicomm] rank {rank} of {SIZE} on node{node} died: {CAUSE}; aborting the job\n{DEATH_REMEDY}"
    assert printed == [[0, text]]
    assert ended == [[0, 1]]


def test_rank_1_reports_for_rank_0(figures: dict[str, Any]) -> None:
    ((speaker, text),), ended = figures["ends"]["rank 0"]
    assert speaker == 1
    assert text.startswith(f"[mpicomm] rank 0 of {SIZE} on node0 died: {CAUSE}; rank 1 aborts the job.\n")
    assert ended == [[1, 1]]
