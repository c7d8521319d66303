"""The tables of docs/launching.md: every scheduler with every MPI, and the systems of tests/centres.json."""

from __future__ import annotations

import re

import pytest

from mpicomm.launch.jobscript import SCHEDULERS
from mpicomm.launch.mpi_library import MPICH, OPEN_MPI, Implementation
from tests.docs import centre_table
from tests.docs.documents import LAUNCHING

ROWS = [
    [cell.strip() for cell in line.strip("|\n").split(" | ")]
    for line in LAUNCHING.read_text().splitlines()
    if re.search(r"\| (real|stand-in|not run|variables only) \|$", line)
]


@pytest.mark.parametrize("mpi", [OPEN_MPI, MPICH], ids=lambda mpi: mpi.vendor)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_each_scheduler_has_a_result_with_each_mpi(scheduler: str, mpi: Implementation) -> None:
    rows = [row for row in ROWS if row[0] == SCHEDULERS[scheduler].title and mpi.vendor in row[1]]
    assert rows
    assert all(len(row) == 5 for row in rows)
    if scheduler == "slurm":
        assert any(row[2] == f"`srun --mpi={mpi.srun_types[-1]} python train.py`" for row in rows)


def test_the_document_has_the_table_of_systems() -> None:
    document = LAUNCHING.read_text()
    assert document == centre_table.inserted(document), "python -m tests.docs.centre_table --write"
