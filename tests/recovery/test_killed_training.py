"""A few of the kills of `python -m tests.recovery`, with its checks: a run ends with the bits of its reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpicomm import mpi
from tests.recovery import killed_runs
from tests.recovery.kill_plan import RECOVERING, Kill
from tests.recovery.killed_runs import Case
from tests.recovery.training_job import EPOCHS

CASES = [
    Case(
        "on fewer ranks",
        (Kill(0, 0, "in an evaluation", 2), Kill(1, 0, "in a barrier", 2, 0.01)),
    ),
    Case(
        "with spares",
        (
            Kill(0, 2, "at a random moment", delay=0.2),
            Kill(0, 0, RECOVERING, delay=0.02),
            Kill(1, 0, "while a checkpoint is written"),
            Kill(2, 1, "after fit"),
        ),
        spares=4,
    ),
    Case(
        "sharded, with copies of the shards",
        (Kill(0, 1, "in a 64 MiB all_reduce", 7, 0.01),),
        spares=1,
        arguments=("--strategy", "fsdp", "--replicate"),
    ),
]


@pytest.mark.skipif(mpi.library().vendor != "Open MPI", reason="requires an MPI that continues after a failure (ULFM)")
def test_killed_runs_end_with_the_bits_of_runs_without_kills(tmp_path: Path) -> None:
    results = [killed_runs.run(case, tmp_path / f"case-{number}") for number, case in enumerate(CASES)]
    killed_runs.compare(results, tmp_path)
    assert [(each.case.name, each.problems) for each in results if each.problems] == []
    assert [len(each.gaps) for each in results] == [2, 3, 1]  # no step follows the kill after fit
    assert results[0].sizes == [4, 3, 2]
    assert results[2].sizes == [4, 4]
    for number in range(len(CASES)):
        assert_logged(tmp_path / f"case-{number}" / "run" / "metrics.jsonl")


def assert_logged(path: Path) -> None:
    """Check that the values logged on all ranks have the means of the losses, which are equal to them."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    entries = [entry for entry in entries if entry["event"] == "step" and entry["loss"] is not None]
    assert len(entries) > EPOCHS // 2  # rank 0 can die before it writes an entry
    assert {name for entry in entries for name in entry if name.startswith("of_")} >= {"of_0", "of_1"}
    assert all(entry["of_0"] == 1.0 for entry in entries)
    # A rank that dies is the only one that knows its losses since the last reduction, so both means lack them.
    assert [entry["own_loss"] for entry in entries] == [pytest.approx(entry["loss"]) for entry in entries]
