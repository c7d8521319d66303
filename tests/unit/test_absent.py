"""The notice that a rank prints while it waits for absent ranks: its text and its timing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mpicomm.job.start_timer import Process, Waiting, hosts_of_job, report
from tests.launching import run_alone

WAITING = Waiting(
    pid=100,
    rank=0,
    size=4,
    local_size=4,
    variable="PMI_RANK",
    host="node1",
    phase="MPI_Init",
    seconds=30.0,
    limit=600.0,
    script="train.py",
)


def process(rank: int, *, waits: bool = True, command: str = "python train.py") -> Process:
    return Process(100 + rank, rank, command, waits)


def report_of(processes: list[Process], hosts: str = "", **changes: Any) -> list[str]:
    return (report(dataclasses.replace(WAITING, **changes), processes, hosts) or "").splitlines()


def test_it_names_ranks_by_the_state_of_their_processes() -> None:
    wrapper = Process(98, 1, "sh wrap.sh", is_waiting=False)
    assert report_of([process(0), wrapper, process(1, waits=False), process(3)], "node1 (SLURM_STEP_NODELIST)") == [
        "[mpicomm] rank 0 of 4 on node1 has waited 30 s in bootstrap() (MPI_Init) for other ranks.",
        "  waiting on node1: ranks 0, 3",
        "  rank 1 on node1 has not called bootstrap(): process 98, sh wrap.sh",
        "  rank 2: no process on node1, exited before bootstrap()",
        "  hosts of the job: node1 (SLURM_STEP_NODELIST)",
        "The job is aborted after 600 s; bootstrap(timeout=...) changes this limit.",
        "Check that every rank runs this program, and that no rank exits or blocks before mpicomm.bootstrap().",
    ]


@pytest.mark.parametrize(
    ("changes", "ranks", "line"),
    [
        ({"size": 8}, [0, 1], "  2 of the 4 ranks on node1: no process, exited before bootstrap()"),
        ({"size": 8}, [0, 1, 2, 3], "  all 4 ranks on node1 are waiting: the absent ranks are on other hosts"),
        ({}, [0, 1, 2, 3], "  every rank has called bootstrap(): MPI itself is slow or blocked"),
        (
            {"size": 64, "local_size": 64},
            list(range(20)),
            "  waiting on node1: ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more",
        ),
    ],
)
def test_it_reports_the_known_facts(changes: dict[str, Any], ranks: list[int], line: str) -> None:
    assert line in report_of([process(rank) for rank in ranks], **changes)


def test_if_all_ranks_wait_the_next_step_is_a_program_without_mpicomm() -> None:
    assert report_of([process(rank) for rank in range(4)])[-1] == "  mpirun -n 4 python -m mpi4py.bench helloworld"
    assert "mpi4py.bench" not in report_of([process(rank) for rank in range(3)])[-1]


def test_without_sizes_there_is_no_guess() -> None:
    lines = report_of([process(0)], size=None, local_size=None)
    assert lines[0].startswith("[mpicomm] rank 0 on node1 has waited 30 s")
    assert lines[1:3] == ["  waiting on node1: rank 0", lines[2]]
    assert lines[2].startswith("The job is aborted"), lines


@pytest.mark.parametrize(
    ("rank", "waiting", "prints"),
    [(1, [1, 2], True), (2, [1, 2], False), (17, [17], False), (32, [17, 32], True), (0, [], False)],
    ids=["the lowest", "another", "one of many", "one of a few of many", "it has gone on"],
)
def test_one_rank_of_a_host_prints(rank: int, waiting: list[int], *, prints: bool) -> None:
    assert bool(report_of([process(each) for each in waiting], rank=rank, size=64)) is prints


def test_a_program_on_standard_input() -> None:
    assert report_of([process(0), process(1, waits=False)], script="-", size=2)[-1] == "  mpirun -n 2 python FILE"
    assert report_of([process(0), process(1)], script="-")[-1].startswith("Check that every rank"), (
        "srun passes it to all"
    )


def test_hosts_are_those_of_the_scheduler(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a\na\nb\n")
    assert hosts_of_job({"SLURM_STEP_NODELIST": "n[1-2]", "PBS_NODEFILE": str(file)}) == "n[1-2] (SLURM_STEP_NODELIST)"
    assert hosts_of_job({"PBS_NODEFILE": str(file)}) == "a, b (PBS_NODEFILE)"
    assert hosts_of_job({"PBS_NODEFILE": str(tmp_path / "none")}) == hosts_of_job({}) == ""


def test_it_is_printed_while_the_gil_is_held_and_not_after_the_block() -> None:
    code = """
import ctypes, os, sys
from mpicomm.launch import detect
from mpicomm.job import start_timer
launch = detect.detect(os.environ)
reading, writing = os.pipe()
os.dup2(writing, 2)
text = ctypes.create_string_buffer(10_000)
with start_timer.report_missing_after(0.2, launch, "the first", 60):
    pass
with start_timer.report_missing_after(0.3, launch, "the second", 60):
    ctypes.PyDLL(None).read(reading, text, len(text))  # keeps the GIL, as MPI_Init does
sys.stdout.write(text.value.decode())
"""
    outcome = run_alone(code, env={"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"})
    printed = outcome.stdout
    assert printed.startswith("[mpicomm] rank 0 of 2 on "), outcome
    assert printed.count("has waited 0.3 s in bootstrap() (the second) for other ranks.\n") == 1, outcome
    assert "  rank 1: no process on " in printed, outcome
    assert "the first" not in printed, outcome
