"""Unusual but valid launches: the world is the one that MPI or the user specifies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import other_mpis
from tests.launching import Outcome, run_alone, run_ranks

SHOW = "import mpicomm; w = mpicomm.bootstrap(); import sys; sys.stdout.write(f'{w.rank} of {w.size}\\n')"


# Slurm's variables in a batch script, and in a step of mpirun's daemons with one daemon per node.
SBATCH = {
    "SLURM_JOB_ID": "17",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "1",
}
DAEMONS = SBATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}


def worlds(outcome: Outcome) -> list[str]:
    """Check that the job ended with status 0, and return the sorted output of its ranks."""
    assert outcome.status == 0, outcome
    return sorted(outcome.stdout.split("\n")[:-1])


def one_world(size: int) -> list[str]:
    return [f"{rank} of {size}" for rank in range(size)]


@pytest.fixture
def calls_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put fake Slurm commands first in PATH; fail if one of them is called."""
    called = tmp_path / "called"
    for name in ("srun", "scontrol", "sinfo", "squeue"):
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\necho {name} >> {called}\nexit 1\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    yield
    assert not called.exists(), f"called: {called.read_text()}"


@pytest.mark.each_mpi
def test_mpirun_within_a_slurm_job() -> None:
    outcome = run_ranks(2, SHOW, env=DAEMONS)
    assert worlds(outcome) == one_world(2)
    assert outcome.stderr == "", outcome


@pytest.mark.each_mpi
@other_mpis.each_launcher
def test_the_launcher_of_another_mpi_with_the_same_protocol(other: str) -> None:
    mpiexec = other_mpis.launcher(other, can_start=True)
    assert worlds(run_ranks(2, SHOW, mpiexec=mpiexec)) == one_world(2)


def test_plain_python_in_a_batch_script_is_warned() -> None:
    outcome = run_alone(SHOW, env=SBATCH)
    assert worlds(outcome) == one_world(1)
    assert "this Slurm job has 4 tasks" in outcome.stderr, outcome
    assert "mpicomm/runtime.py" not in outcome.stderr, f"the warning is to show the user's line, not ours\n{outcome}"


def test_plain_python(calls_no_slurm: None) -> None:
    outcome = run_alone(SHOW)
    assert worlds(outcome) == one_world(1)
    assert outcome.stderr == "", outcome


@pytest.mark.each_mpi
def test_single_under_mpirun_is_a_world_each() -> None:
    outcome = run_ranks(2, SHOW, env={"MPICOMM_LAUNCHER": "single"})
    assert worlds(outcome) == one_world(1) * 2


@pytest.mark.each_mpi
def test_variables_that_agree_are_accepted(calls_no_slurm: None) -> None:
    """The launcher script has already exported the variables that bootstrap sets."""
    code = "import os; r = os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']\n"
    code += f"os.environ.update(RANK=r, WORLD_SIZE='2', LOCAL_RANK=r)\n{SHOW}"
    assert worlds(run_ranks(2, code)) == one_world(2)
