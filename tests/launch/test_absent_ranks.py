"""A rank never calls `bootstrap()`: long before the deadline, a waiting rank names it and states what to check."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.launching import background_job, on_ranks, run_command

SECONDS = {"MPICOMM_HANG_SECONDS": "2"}  # instead of 30
RANKS = """
import os, pathlib, sys, time
from tests.time_limits import synchronise
variables = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
rank = next(int(os.environ[name]) for name in variables if name in os.environ)

def bootstrap_together(ranks, timeout=None):
    import mpicomm.job.bootstrap
    synchronise(here, rank, ranks)
    mpicomm.bootstrap(timeout=timeout)
"""


def notices(stderr: str) -> list[str]:
    """Return the complete text of every notice."""
    return re.findall(r"^\[mpicomm\] rank .* has waited 2 s .*\n(?:.*\n)*?Check that .*", stderr, re.MULTILINE)


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
    with background_job(on_ranks(4, [str(program)]), env=SECONDS) as job:
        job.wait_until(lambda: notices(job.stderr()), "a rank has printed the notice")
        time.sleep(2 * float(SECONDS["MPICOMM_HANG_SECONDS"]))  # a second one would follow
        for rank in (1, 2):  # MPICH's launcher takes no notice of a status before MPI_Init
            os.kill(int((tmp_path / str(rank)).read_text()), signal.SIGKILL)
        outcome = job.finish()
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
        "RendezvousError: bootstrap(): timed out after 6 s: 1 of 2 ranks did not arrive: "
        "rank 0 (host unknown: it has not called bootstrap).\n"
    ) in outcome.stderr, outcome
