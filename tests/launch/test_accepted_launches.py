"""Unusual but valid launches: the world is the one that MPI or the user specifies."""

from __future__ import annotations

import pytest

from tests import other_mpis
from tests.launching import Outcome, run_ranks

SHOW = "import mpicomm; w = mpicomm.bootstrap(); import sys; sys.stdout.write(f'{w.rank} of {w.size}\\n')"


def worlds(outcome: Outcome) -> list[str]:
    """Check that the job ended with status 0, and return the sorted output of its ranks."""
    assert outcome.status == 0, outcome
    return sorted(outcome.stdout.split("\n")[:-1])


@pytest.mark.each_mpi
@other_mpis.each_launcher
def test_the_launcher_of_another_mpi_with_the_same_protocol(other: str) -> None:
    mpiexec = other_mpis.launcher(other, can_start=True)
    assert worlds(run_ranks(2, SHOW, mpiexec=mpiexec)) == ["0 of 2", "1 of 2"]


@pytest.mark.each_mpi
def test_single_under_mpirun_is_a_world_each() -> None:
    outcome = run_ranks(2, SHOW, env={"MPICOMM_LAUNCHER": "single"})
    assert worlds(outcome) == ["0 of 1", "0 of 1"]
