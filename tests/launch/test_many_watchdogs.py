"""The watchdogs of forty ranks on eight nodes, without MPI and torch: their reports are correct with hubs, too."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from mpicomm.watchdog.rank_0_monitor import DEATH_REMEDY
from tests.launching import run_alone, run_command

SIZE, PER_NODE = 40, 5
CAUSE = "its process ended without reporting an error (killed, crashed, os._exit or MPI_Abort)"


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """Run all measurements once; `run_command` fails if they leave a process behind."""
    size = ["tests.launch.many_watchdogs", str(SIZE), "--per-node", str(PER_NODE)]
    outcome = run_command([sys.executable, "-m", *size, "--idle", "0.5", "--json"])
    assert outcome.status == 0, str(outcome)
    assert outcome.stderr == ""
    seen: dict[str, Any] = json.loads(outcome.stdout)
    return seen


def rows(text: str) -> dict[str, str]:
    """Return the rows of a report's table, by their ranks."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    return dict(line.split("  ", 1) for line in lines)


def test_the_watchdog_needs_neither_torch_nor_mpi(figures: dict[str, Any]) -> None:
    assert figures["heavy"] == []


def test_a_hang_is_reported_with_the_ranks_of_all_nodes(figures: dict[str, Any]) -> None:
    first = figures["report_text"].splitlines()[0]
    assert first.startswith("[mpicomm] possible hang: rank 39 has waited ")
    found = rows(figures["report_text"])
    assert list(found) == ["ranks 1-39", "rank 0"]
    assert found["ranks 1-39"].strip().startswith("in all_reduce #1, float32[1024], at many_watchdogs.py:")
    assert found["rank 0"].strip().startswith("not in an operation, none called yet; at many_watchdogs.py:")


def test_a_rank_that_is_stopped_is_named_by_its_hub(figures: dict[str, Any]) -> None:
    found = rows(figures["stopped_text"])
    assert "not responding for " in found["rank 36"]
    assert " on node7: process " in found["rank 36"]
    assert "is stopped by a signal (SIGSTOP); resume it with SIGCONT" in found["rank 36"]
    assert [name for name, text in found.items() if "not responding" in text] == ["rank 36"]


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


def test_rank_0_of_a_large_job_is_measured_alone() -> None:
    """With 40 ranks, to keep `python -m tests.launch.many_watchdogs 200` working, which simulates 10,000 ranks."""
    code = "import json; from tests.launch import many_watchdogs as crowd; "
    outcome = run_alone(code + f"print(json.dumps(crowd.measure_rank_0({SIZE}, {PER_NODE}, 0.5)))")
    assert (outcome.status, outcome.stderr) == (0, ""), outcome
    assert json.loads(outcome.stdout).keys() == {"connected", "idle", "report", "report_cpu", "waits_cpu"}
