"""The arithmetic of `benchmarks.recovery_peers` with known logs, and a job of processes that only write a log."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery_peers import killed_job
from benchmarks.recovery_peers.__main__ import summary
from benchmarks.recovery_peers.killed_job import PROCESSES, STEPS_BEFORE


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


def test_the_summary_counts_kills_after_which_the_job_did_not_continue() -> None:
    gaps = [0.1 * each for each in range(1, 12)]
    results = [{"gap_s": gap, "discarded": number % 3, "received": number % 2, "problem": ""}
               for number, gap in enumerate(gaps)]  # fmt: skip
    results.append({"gap_s": None, "discarded": None, "received": None, "problem": "no step within 90 s"})
    found = summary(results)
    assert (found["kills"], found["continued"]) == (len(gaps) + 1, len(gaps))
    assert found["gap_s"] == {"p50": 0.6, "p95": 1.05, "max": 1.1}
    assert (found["discarded_steps"], found["kills_with_state_transfer"]) == (2, len(gaps) // 2)


# A process of rank sys.argv[2] writes steps of all processes, and steps of the remaining ones when the victim is dead.
PROGRAM = """
import glob, json, os, sys, time
directory, rank, victim = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def write(size):
    line = {"time": time.monotonic(), "step": 0, "size": size, "applied": True, "received": False}
    with open(f"{directory}/{rank}-{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(line) + chr(10))
for _ in range(%d):
    write(%d)
while True:
    time.sleep(0.01)
    found = glob.glob(f"{directory}/{victim}-*.jsonl")
    pid = found and found[0].rpartition("-")[2].partition(".")[0]
    if pid and open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z":
        if sys.argv[4] == "end":
            sys.exit()
        write(%d)
"""


@pytest.mark.parametrize("action", ["continue", "end"])
def test_a_job_is_killed_and_ended(action: str) -> None:
    victim = 1
    program = textwrap.dedent(PROGRAM) % (STEPS_BEFORE, PROCESSES, PROCESSES - 1)
    directories: list[Path] = []

    def commands(directory: Path, _limit: int) -> list[list[object]]:
        directories.append(directory)
        return [[sys.executable, "-c", program, directory, rank, victim, action] for rank in range(PROCESSES)]

    found = killed_job.run(commands, victim, 60)
    assert found["killed"] == victim
    if action == "continue":
        assert found["problem"] == ""
        assert 0 < found["gap_s"] < 60
    else:
        assert found["gap_s"] is None
        assert found["problem"].endswith("ended")
    marked = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(directories[0]).encode() in _read(path)]
    assert [path for path in marked if path.parent.name != str(os.getpid())] == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
