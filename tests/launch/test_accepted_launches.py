"""Starts that look odd and are right: the world is what MPI, or the user, says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import Outcome, run_alone, run_ranks

SHOW = "import mpicomm; w = mpicomm.bootstrap(); import sys; sys.stdout.write(f'{w.rank} of {w.size}\\n')"

# In a batch script; in a step of mpirun's daemons, one per node.
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
    """Return what the ranks say of themselves, checked to have ended well."""
    assert outcome.status == 0, outcome
    return sorted(outcome.stdout.split("\n")[:-1])


def one_world(size: int) -> list[str]:
    return [f"{rank} of {size}" for rank in range(size)]


@pytest.mark.parametrize("env", [SBATCH, DAEMONS], ids=["sbatch", "daemons"])
def test_mpirun_within_a_slurm_job(env: dict[str, str]) -> None:
    outcome = run_ranks(2, SHOW, env=env)
    assert worlds(outcome) == one_world(2)
    assert outcome.stderr == "", outcome


def test_plain_python_in_a_batch_script_is_warned() -> None:
    outcome = run_alone(SHOW, env=SBATCH)
    assert worlds(outcome) == one_world(1)
    assert "this Slurm job has 4 tasks" in outcome.stderr, outcome
    assert "mpicomm/runtime.py" not in outcome.stderr, f"the warning is to show the user's line, not ours\n{outcome}"


def test_plain_python() -> None:
    outcome = run_alone(SHOW)
    assert worlds(outcome) == one_world(1)
    assert outcome.stderr == "", outcome


def test_single_under_mpirun_is_a_world_each() -> None:
    outcome = run_ranks(2, SHOW, env={"MPICOMM_LAUNCHER": "single"})
    assert worlds(outcome) == one_world(1) * 2


def test_installed_commands_of_slurm_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = tmp_path / "called"
    for name in ("srun", "scontrol", "sinfo", "squeue"):
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\necho {name} >> {called}\nexit 1\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert worlds(run_ranks(2, SHOW)) == one_world(2)
    assert worlds(run_alone(SHOW)) == one_world(1)
    assert not called.exists()


def test_variables_that_agree_are_welcome() -> None:
    """A start of bootstrap within a job whose launcher script exported them already."""
    code = "import os; r = os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']\n"
    code += f"os.environ.update(RANK=r, WORLD_SIZE='2', LOCAL_RANK=r)\n{SHOW}"
    assert worlds(run_ranks(2, code)) == one_world(2)
