"""Launches that cannot become one job: one immediate error shows the conflicting values and a working command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mpicomm import mpi
from tests import other_mpis
from tests.launching import Outcome, run_alone, run_command, run_ranks

LIBRARY = mpi.library()  # the MPI library of this Python
BOOTSTRAP = "import mpicomm; mpicomm.bootstrap(); print('came through')"


def check(outcome: Outcome, *expected: str) -> None:
    """Check that a job was refused with one message, which contains all texts in `expected`."""
    assert outcome.status != 0, outcome
    assert "came through" not in outcome.stdout, outcome
    assert outcome.stderr.count("mpicomm.LaunchError: ") == 1, outcome
    assert "Traceback" not in outcome.stderr, f"the user's code is not at fault\n{outcome}"
    for text in expected:
        assert text in outcome.stderr, f"{text!r} is missing\n{outcome}"


@pytest.mark.each_mpi
@other_mpis.each_launcher
def test_the_launcher_of_another_mpi(other: str) -> None:
    mpiexec = other_mpis.launcher(other, can_start=False)
    outcome = run_ranks(2, BOOTSTRAP, mpiexec=mpiexec)
    of_other = f"{other_mpis.variable_of_size(mpiexec)}=2"
    assert Path(LIBRARY.mpiexec).is_absolute(), "a plain `mpiexec` may be another MPI's"
    check(outcome, of_other, f"{LIBRARY.vendor} {LIBRARY.version}", f"  {LIBRARY.mpiexec} -n 2 python -c ")
    assert "Warning" not in outcome.stderr, f"mpi4py warns of a launcher of another MPI too\n{outcome}"


@pytest.mark.each_mpi
@other_mpis.each_launcher
def test_the_launcher_of_another_mpi_with_the_same_protocol(other: str) -> None:
    code = "import mpicomm, sys; w = mpicomm.bootstrap(); sys.stdout.write(f'{w.rank} of {w.size}\\n')"
    outcome = run_ranks(2, code, mpiexec=other_mpis.launcher(other, can_start=True))
    assert outcome.status == 0, outcome
    assert sorted(outcome.stdout.split("\n")[:-1]) == ["0 of 2", "1 of 2"], outcome


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
    is_refused = "DeviceError: NCCL needs one GPU per rank" in outcome.stderr
    assert (outcome.status == 0, is_refused) == (backend == "auto", backend == "nccl"), outcome


@pytest.mark.each_mpi
@pytest.mark.skipif(LIBRARY.vendor == "Open MPI", reason="Open MPI does not read PMI_FD")
def test_a_program_of_a_rank_without_its_connection_to_the_launcher() -> None:
    """Without the check, MPI_Init would end the process; with Intel MPI, by a segmentation fault."""
    outcome = run_alone(BOOTSTRAP, env={"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "77"})
    check(outcome, "a rank has started this process: PMI_FD=77", "MPICOMM_LAUNCHER=single")


def test_a_refused_start_can_be_caught_on_every_rank() -> None:
    code = """
import os, sys
rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK'])
import mpicomm
if rank == 1: os.environ['WORLD_SIZE'] = '3'
try:
    mpicomm.bootstrap()
except mpicomm.LaunchError as error:
    sys.stdout.write(f"rank {rank}: {str(error).splitlines()[0]}\\n")
"""
    outcome = run_ranks(2, code)
    assert outcome.status == 0, outcome
    assert sorted(line for line in outcome.stdout.splitlines() if line) == [
        "rank 0: rank 1: the environment has WORLD_SIZE=3, but MPI reports rank 1 of 2.",
        "rank 1: rank 1: the environment has WORLD_SIZE=3, but MPI reports rank 1 of 2.",
    ], outcome


def test_an_old_mpi4py(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("__version__ = '3.1.6'\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {BOOTSTRAP}"
    outcome = run_command([sys.executable, "-c", code])
    assert outcome.status != 0, outcome
    assert outcome.stderr.splitlines()[-2:] == [
        "mpicomm.errors.MPINotFoundError: mpi4py 3.1.6 is too old: mpicomm needs 4.0 or newer.",
        "Build one with the MPI that you use: pip install --no-cache-dir --no-binary mpi4py --upgrade mpi4py",
    ], outcome
