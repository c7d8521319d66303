"""Every way in which a rank leaves a job: one message names the right rank, and the job ends in time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

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


@pytest.mark.parametrize(
    ("name", "exited_rank"),
    [
        pytest.param(name, rank, id=f"{name}-{rank}", marks=pytest.mark.each_mpi if name in OF_THE_MPI_LIBRARY else ())
        for name, rank in CASES
    ],
)
def test_a_rank_leaves(name: str, exited_rank: int) -> None:
    result = ways.run(ways.BY_NAME[name], exited_rank, SIZE)
    assert not result.problems, f"{result}: {'; '.join(result.problems)}\n{result.stderr}"


# Rank 1 is late until the test has read the report.
HANG = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
import mpicomm
from mpicomm.job import session
from tests.time_limits import wait_until

world = mpicomm.bootstrap()
folder = session.current().dumps
if world.rank == 0 and "link" in sys.argv:
    (folder.parent / "victim").mkdir(parents=True)
    folder.symlink_to("victim")
dist.barrier()
if world.rank == 1:
    wait_until(Path(sys.argv[1]).exists, "the test has read the report")
dist.all_reduce(torch.ones(4))
"""


def run_until_reported(folder: Path, *arguments: str, texts: Sequence[str]) -> Outcome:
    """Run a program whose rank 1 is late until the job has printed the texts."""
    program, reported = folder / "train.py", folder / "reported"
    program.write_text(HANG)
    env = {"MPICOMM_DUMP_DIR": str(folder / "dumps"), "MPICOMM_HANG_SECONDS": "1.5"}
    with background_job(on_ranks(3, [str(program), str(reported), *arguments]), env=env) as job:
        job.wait_until(lambda: all(text in job.stderr() for text in texts), "the job has reported the late rank")
        reported.touch()
        outcome = job.finish()
    assert outcome.status == 0, outcome
    assert outcome.stderr.count("[mpicomm] possible hang: rank ") == 1, outcome
    return outcome


def test_all_ranks_write_files_when_the_job_hangs(tmp_path: Path) -> None:
    text = "flight recorder and stacks of every rank: "
    outcome = run_until_reported(tmp_path, texts=[text])
    (folder,) = (tmp_path / "dumps").iterdir()
    assert f"{text}{folder}\n" in outcome.stderr, outcome
    files = {path.name for path in folder.iterdir()}
    names = ("rank-{}.json", "rank-{}.stacks.txt", "fr_trace_rank_{}")
    assert files == {name.format(rank) for rank in range(3) for name in names}, outcome
    operations = [json.loads((folder / f"rank-{rank}.json").read_text())["operations"] for rank in range(2)]
    last = [max(of_rank, key=lambda operation: operation["number"]) for of_rank in operations]
    assert [operation["name"] for operation in last] == ["all_reduce", "barrier"]
    assert not last[0]["is_over"]
    line = 1 + next(number for number, line in enumerate(HANG.splitlines()) if "wait_until(" in line)
    stacks = (folder / "rank-1.stacks.txt").read_text()
    assert f'train.py", line {line} in <module>' in stacks, stacks


def test_a_link_in_the_place_of_the_files_is_refused_once(tmp_path: Path) -> None:
    """Every user who may write to the parent directory can predict the name of the job's directory."""
    outcome = run_until_reported(tmp_path, "link", texts=["possible hang: ", " cannot write its"])
    assert outcome.stderr.count(" cannot write its flight recorder and stacks: ") == 1, outcome
    assert "is a symbolic link, and mpicomm did not create it. Set MPICOMM_DUMP_DIR to a " in outcome.stderr, outcome
    assert list((tmp_path / "dumps" / "victim").iterdir()) == []
