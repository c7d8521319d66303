"""A rank never calls `bootstrap()`: long before the deadline, a waiting rank names it and states what to check."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launching import Outcome, background_job, on_ranks, run_command

SECONDS = {"MPICOMM_HANG_SECONDS": "2"}  # instead of 30
RANKS = """
import os, pathlib, sys, time
from tests.time_limits import synchronise
variables = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
rank = next(int(os.environ[name]) for name in variables if name in os.environ)

def bootstrap_together(ranks, timeout=None):
    import mpicomm.runtime
    synchronise(here, rank, ranks)
    mpicomm.bootstrap(timeout=timeout)
"""


def notices(stderr: str) -> list[str]:
    """Return the complete text of every notice."""
    return re.findall(
        r"^\[mpicomm\] rank .* has waited 2 s .*\n(?:.*\n)*?(?:Check that|  mpirun) .*", stderr, re.MULTILINE
    )


def run_until_the_notice(command: list[str], folder: Path, ranks: Sequence[int]) -> Outcome:
    """Run a job without an end, and kill the waiting ranks two seconds after the notice: a second one would follow."""
    with background_job(command, env=SECONDS) as job:
        job.wait_until(lambda: notices(job.stderr()), "a rank has printed the notice")
        time.sleep(2 * float(SECONDS["MPICOMM_HANG_SECONDS"]))
        for rank in ranks:  # MPICH's launcher takes no notice of a status before MPI_Init
            os.kill(int((folder / str(rank)).read_text()), signal.SIGKILL)
        return job.finish()


@pytest.mark.each_mpi
def test_ranks_that_exit_or_block_before_bootstrap_are_named_once(tmp_path: Path) -> None:
    code = f"""{RANKS}
here = pathlib.Path({str(tmp_path)!r})
if rank == 0:
    sys.exit()
if rank == 3:
    time.sleep(3600)
bootstrap_together([1, 2])
"""
    program = tmp_path / "train.py"
    program.write_text(code)
    outcome = run_until_the_notice(on_ranks(4, [str(program)]), tmp_path, [1, 2])
    assert outcome.status != 0, outcome
    (notice,) = notices(outcome.stderr)
    assert re.fullmatch(
        r"\[mpicomm\] rank 1 of 4 on (\S+) has waited 2 s in bootstrap\(\) \(MPI_Init\) for other ranks\.\n"
        r"  waiting on \1: ranks 1, 2\n"
        rf"  rank 3 on \1 has not called bootstrap\(\): process \d+, {sys.executable} .*\n"
        r"  rank 0: no process on \1, exited before bootstrap\(\)\n"
        r"The job is aborted after 600 s; bootstrap\(timeout=\.\.\.\) changes this limit\.\n"
        r"Check that every rank runs this program, and that no rank exits or blocks before mpicomm\.bootstrap\(\)\.",
        notice,
    ), outcome


@pytest.mark.each_mpi
def test_a_program_on_standard_input_reaches_rank_0_alone(tmp_path: Path) -> None:
    """As in `cat train.py | mpirun -n 2 python -`, with which rank 0 may also miss the end of input (Open MPI 5)."""
    program, elsewhere = tmp_path / "train.py", tmp_path / "ends.py"
    program.write_text(f"{RANKS}\nhere = pathlib.Path({str(tmp_path)!r})\nbootstrap_together([0])\n")
    elsewhere.write_text("import time; time.sleep(3600)")
    rank = "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"
    script = f'case "{rank}" in 0) "$0" - < "$1";; *) "$0" - </dev/null && "$0" "$2";; esac'
    launcher = str(Path(sys.executable).parent / "mpiexec")
    command = [launcher, "-n", "2", "sh", "-c", script, sys.executable, str(program), str(elsewhere)]
    outcome = run_until_the_notice(command, tmp_path, [0])
    (notice,) = notices(outcome.stderr)
    assert notice.startswith("[mpicomm] rank 0 of 2 on "), outcome
    assert notice.endswith(
        "This program comes from standard input, which mpirun passes to rank 0 only. Save it to a file and start\n"
        "  mpirun -n 2 python FILE"
    ), outcome


def test_torchrun_has_absent_ranks_too(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    here = f"here = pathlib.Path({str(tmp_path)!r})"
    program.write_text(f"{RANKS}\n{here}\ntime.sleep(3600) if rank == 0 else bootstrap_together([1], timeout=6)\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    outcome = run_command(command, env=SECONDS)
    (notice,) = notices(outcome.stderr)
    assert re.match(
        r"\[mpicomm\] rank 1 of 2 on (\S+) has waited 2 s in bootstrap\(\) \(rendezvous\) for other ranks\.\n"
        r"  waiting on \1: rank 1\n"
        r"  rank 0 on \1 has not called bootstrap\(\): process \d+, \S*python.*\n",
        notice,
    ), outcome
    assert (
        "RendezvousError: bootstrap(): timed out after 6 s: 1 of 2 ranks did not arrive: rank 0.\n" in outcome.stderr
    ), outcome
