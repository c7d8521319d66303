"""A rank fails or does not start: one message names the rank, and the job ends within seconds."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.launching import Outcome, run_ranks
from tests.time_limits import scaled

# From the failure to the end of the job; even scaled, it is less than the timeouts and the 600 s of sleep.
SECONDS = 30

# Every program begins with this.
OWN_RANK = """
import os, sys, time
from pathlib import Path
from tests.time_limits import synchronise
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
def now():
    sys.stdout.write(f"failing at {time.time()}\\n")
    sys.stdout.flush()
"""


OWN_GROUP = """
import torch.distributed as dist
import mpicomm

world = mpicomm.bootstrap(None)
dist.init_process_group("gloo")
dist.barrier()
if world.rank == 1:
    now()
    raise ValueError("a bad batch")
time.sleep(600)
"""

ALL_AT_ONCE = """
import torch.distributed as dist
import mpicomm

world = mpicomm.bootstrap()
dist.barrier()
now()
raise ValueError(f"the same on all, here on {world.rank}")
"""

# A program, or an adapter such as that of Lightning, refuses its arguments after bootstrap().
REFUSING = """
import mpicomm

world = mpicomm.bootstrap()
if world.rank in RANKS:
    now()
    raise mpicomm.LaunchError("devices must be 2, got 3.\\nPass devices=2.")
time.sleep(600)
"""

# Native code of a rank crashes, in a job with GPUs.
CRASHING = """
import ctypes
import mpicomm
from mpicomm.devices import vendors

type(vendors.vendor()).synchronous_kernels = "SYNCHRONOUS=1"
world = mpicomm.bootstrap()
if world.rank == CRASHED:
    ctypes.string_at(0)
time.sleep(600)
"""

# The missing rank is the last one: rank 0 must wait for every rank, including the last.
MISSING = """
if rank == 2:
    from mpi4py import MPI
    time.sleep(600)
import mpicomm.job.bootstrap
synchronise(Path("FOLDER"), rank, [0, 1])
now()
mpicomm.bootstrap(timeout=3)
print("came through")
"""

# One rank raises an error that is not an MpicommError in bootstrap(), while the others continue with the next step.
WITHIN = """
import mpicomm
from mpicomm import topology
if rank == 1:
    topology.first_rank_of_node = lambda comm: {}["no such key"]
now()
mpicomm.bootstrap()
print("came through")
"""


def seconds_to_end(outcome: Outcome) -> float:
    """Return the seconds from the last rank's failure to the end of the job."""
    moments = [float(text) for text in re.findall(r"failing at ([\d.]+)", outcome.stdout)]
    assert moments, outcome
    return outcome.ended - max(moments)


def test_one_rank_fails_in_a_group_of_its_program() -> None:
    """Torch's exception hook is installed on top of mpicomm's."""
    outcome = run_ranks(2, OWN_RANK + OWN_GROUP)
    assert outcome.status != 0, outcome
    assert outcome.stderr.count("ValueError: a bad batch") == 1, outcome
    assert outcome.stderr.count("rank 1 of 2") == 1, outcome
    assert seconds_to_end(outcome) < scaled(SECONDS), outcome


@pytest.mark.each_mpi
def test_all_ranks_fail_at_once() -> None:
    outcome = run_ranks(4, OWN_RANK + ALL_AT_ONCE)
    assert outcome.status != 0, outcome
    assert outcome.stderr.count("Traceback (most recent call last)") == 1, outcome
    match = re.search(r"rank (\d) of 4.*aborting the job:\n.*?the same on all, here on (\d)", outcome.stderr, re.DOTALL)
    assert match, outcome
    assert match[1] == match[2], outcome
    assert seconds_to_end(outcome) < scaled(SECONDS), outcome


@pytest.mark.each_mpi
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "one"])
def test_ranks_refuse_to_continue_after_bootstrap(ranks: tuple[int, ...]) -> None:
    outcome = run_ranks(2, f"RANKS = {ranks}" + OWN_RANK + REFUSING)
    assert outcome.status != 0, outcome
    assert outcome.stderr.count("Traceback (most recent call last)") == 1, outcome
    assert outcome.stderr.count("devices must be 2, got 3.\nPass devices=2.") == 1, outcome
    assert "died" not in outcome.stderr, outcome
    assert seconds_to_end(outcome) < scaled(SECONDS), outcome


@pytest.mark.parametrize("rank", [0, 1])
def test_the_report_of_a_crash_names_the_setting_of_the_gpus(rank: int) -> None:
    """The coordinator reports that rank 1 has crashed, and rank 1 that rank 0 has, with the coordinator."""
    outcome = run_ranks(2, f"CRASHED = {rank}" + OWN_RANK + CRASHING)
    assert outcome.status != 0, outcome
    assert outcome.stderr.count(f"rank {rank} of 2 on {socket.gethostname()} died: SIGSEGV ended its process") == 1
    assert outcome.stderr.count("run the job under gdb; with GPUs, set SYNCHRONOUS=1, too.") == 1, outcome


@pytest.mark.each_mpi
def test_one_rank_is_missing(tmp_path: Path) -> None:
    outcome = run_ranks(3, OWN_RANK + MISSING.replace("FOLDER", str(tmp_path)))
    assert outcome.status != 0, outcome
    assert "came through" not in outcome.stdout, outcome
    assert outcome.stderr.count("RendezvousError: bootstrap(): timed out after 3 s: ") == 1, outcome
    assert " 3 s: 1 of 3 ranks did not arrive: rank 2" in outcome.stderr, outcome
    pattern = r"\[mpicomm\] rank 0 of 3 on \S+ has waited 1.5 s in bootstrap\(\) for rank 2 on "
    assert len(re.findall(pattern, outcome.stderr)) == 1, outcome
    assert seconds_to_end(outcome) < scaled(3 + SECONDS), outcome


@pytest.mark.each_mpi
def test_one_rank_never_starts_mpi() -> None:
    """The others block in MPI_Init with the GIL held; a timer in C prints a stack that shows it."""
    code = OWN_RANK + (
        "from mpicomm import mpi\nif rank == 2:\n    time.sleep(600)\n"
        "mpi.initialize(wait_limit=5)\nprint('came through')"
    )
    outcome = run_ranks(3, code)
    assert outcome.status != 0, outcome
    assert "came through" not in outcome.stdout, outcome
    assert "in _wait_for_all_ranks_in_mpi_init" in outcome.stderr, outcome


def test_one_rank_fails_within_bootstrap() -> None:
    outcome = run_ranks(2, OWN_RANK + WITHIN)
    assert outcome.status != 0, outcome
    assert "came through" not in outcome.stdout, outcome
    assert outcome.stderr.count("Traceback (most recent call last)") == 1, outcome
    assert "rank 1 of 2" in outcome.stderr, outcome
    assert seconds_to_end(outcome) < scaled(SECONDS), outcome
