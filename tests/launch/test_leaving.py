"""Every way in which a rank leaves a job: one message names the right rank, and the job ends in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.failures import ways
from tests.launching import Outcome, background_job, on_ranks

SIZE, RANK = 3, 2
OF_RANK_0 = ["exception", "sys.exit(3)", "SIGKILL", "SIGSTOP"]
# Only `python -m tests.failures` runs these: `raise SystemExit(4)` has the outcome of a normal end of the program,
# "exception" that of the exception while another thread runs, and the others differ from another case in the status or
# the signal.
SAME_AS_ANOTHER = {"raise SystemExit(4)", "exception", "sys.exit(0)", "os._exit(0)", "os.abort()"}

CASES = [(way.name, RANK) for way in ways.WAYS if way.name not in SAME_AS_ANOTHER] + [(name, 0) for name in OF_RANK_0]

# The outcome of these cases depends on the MPI library or its launcher; that of the others depends on mpicomm alone.
OF_THE_MPI_LIBRARY = {
    "exception",
    "sys.exit(3)",
    "os._exit(3)",
    "MPI error",
    "segmentation fault",
    "SIGKILL",
    "SIGTERM",
    "SIGSTOP",
    "end of the program, with an unmatched all_reduce",
}


def each_case() -> list[Any]:
    """Return the cases, and mark those that must run with each MPI library."""
    marked = {True: [pytest.mark.each_mpi], False: []}
    return [
        pytest.param(name, exited_rank, id=f"{name}-{exited_rank}", marks=marked[name in OF_THE_MPI_LIBRARY])
        for name, exited_rank in CASES
    ]


@pytest.mark.parametrize(("name", "exited_rank"), each_case())
def test_a_rank_leaves(name: str, exited_rank: int) -> None:
    result = ways.run(ways.BY_NAME[name], exited_rank, SIZE)
    assert not result.problems, f"{result}: {'; '.join(result.problems)}\n{result.stderr}"


BEGINNING = """
import os
from pathlib import Path
import torch
import torch.distributed as dist
import mpicomm
from mpicomm.job import session
from tests.time_limits import wait_until

world = mpicomm.bootstrap()
"""
LINK = """
if world.rank == 0:
    folder = session.current().dumps
    folder.parent.mkdir()
    os.mkdir(folder.parent / "victim")
    folder.symlink_to("victim")
"""
ONE_WAITS = """
dist.barrier()
if world.rank == 1:
    wait_until(Path("REPORTED").exists, "the test has read the report")
dist.all_reduce(torch.ones(4))
"""
HANG = BEGINNING + ONE_WAITS


def test_all_ranks_write_files_when_the_job_hangs(tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    outcome = _run_until_reported(tmp_path, HANG, 3, dumps, "flight recorder and stacks of every rank: ")
    assert outcome.status == 0, outcome
    assert outcome.stderr.count("[mpicomm] possible hang: rank ") == 1, outcome
    (folder,) = dumps.iterdir()
    assert f"flight recorder and stacks of every rank: {folder}\n" in outcome.stderr, outcome
    files = {path.name for path in folder.iterdir()}
    names = ("rank-{}.json", "rank-{}.stacks.txt", "fr_trace_rank_{}")
    assert files == {name.format(rank) for rank in range(3) for name in names}, outcome
    assert _last(folder / "rank-0.json")["name"] == "all_reduce"
    assert not _last(folder / "rank-0.json")["is_over"]
    assert _last(folder / "rank-1.json")["name"] == "barrier"
    stacks = (folder / "rank-1.stacks.txt").read_text()
    assert f'train.py", line {_line(HANG, "wait_until(")} in <module>' in stacks, stacks


def test_a_link_in_the_place_of_the_files_is_refused_once(tmp_path: Path) -> None:
    """Every user exited_rank may write to the parent directory can predict the name of the job's directory."""
    dumps = tmp_path / "dumps"
    program = BEGINNING + LINK + ONE_WAITS
    outcome = _run_until_reported(tmp_path, program, 2, dumps, "possible hang: rank 0 has waited", " cannot write its")
    assert outcome.status == 0, outcome
    assert outcome.stderr.count(" cannot write its flight recorder and stacks: ") == 1, outcome
    assert outcome.stderr.count("is a symbolic link, and mpicomm did not create it. Set MPICOMM_DUMP_DIR to a ") == 1, (
        outcome
    )
    assert "possible hang: rank 0 has waited" in outcome.stderr, outcome
    assert list((dumps / "victim").iterdir()) == []


def _run_until_reported(folder: Path, code: str, size: int, dumps: Path, *texts: str) -> Outcome:
    """Run a program whose rank 1 is late until the job has printed the texts."""
    program, reported = folder / "train.py", folder / "reported"
    program.write_text(code.replace("REPORTED", str(reported)))
    env = {"MPICOMM_DUMP_DIR": str(dumps), "MPICOMM_HANG_SECONDS": "1.5"}
    with background_job(on_ranks(size, [str(program)]), env=env) as job:
        job.wait_until(lambda: all(text in job.stderr() for text in texts), "the job has reported the late rank")
        reported.touch()
        return job.finish()


def _line(code: str, call: str) -> int:
    return next(number for number, line in enumerate(code.splitlines(), 1) if call in line)


def _last(path: Path) -> dict[str, Any]:
    return max(json.loads(path.read_text())["operations"], key=lambda operation: operation["number"])
