"""The blocks of cluster adapters: the start on all ranks, and the wait of the other ranks until rank 0 leaves."""

from __future__ import annotations

from tests.launching import run_ranks

WAITS = """
import time, mpicomm
from mpicomm.integrations import serving
world = mpicomm.bootstrap(timeout=50)
last = world.size - 1
assert serving.start_seconds() == 40

def start():
    if world.rank == last:
        raise ValueError("no\\nport") from OSError("in use")

try:
    serving.start_on_all_ranks(world, start, "Free a port.")
except mpicomm.MpicommError as error:
    assert error.is_on_all_ranks
    cause = "cannot start the cluster: ValueError: no port; caused by OSError: in use"
    assert str(error) == f"rank {last} on {world.hostname}: {cause}\\nFree a port.", error
else:
    raise AssertionError

serving._REPORT_SECONDS = 0.1
for fails in (False, True, False):
    error = None
    try:
        with serving.until_rank_0_leaves(world):
            if world.rank == 0:
                time.sleep(0.5)
                left = time.time()
                if fails:
                    raise KeyError("a" * 300 + "b" * 300)
    except (KeyError if world.rank == 0 else mpicomm.MpicommError) as raised:
        error = raised
    now = time.time()
    assert now >= mpicomm.broadcast_object(left if world.rank == 0 else None)  # one host, so one clock
    if fails and world.rank != 0:
        beginning, end = str(error).split(" ... ")
        what = "rank 0 has not completed the block of cluster(), see its output: KeyError: '"
        assert beginning == what + "a" * 189 and end == "b" * 199 + "'", error
    assert (error is not None) == fails
if world.rank == 0:
    print("passed")
"""

ENDS = """
import os, signal, time, mpicomm
from mpicomm.integrations import serving
world = mpicomm.bootstrap()
serving._PAUSES = 0.2, 0.2
with serving.until_rank_0_leaves(world):
    mpicomm.barrier()
    if world.rank == 0:
        {end}
"""


def test_the_other_ranks_wait_until_rank_0_leaves() -> None:
    outcome = run_ranks(4, WAITS)
    assert outcome.status == 0, outcome
    assert outcome.stdout == "passed\n", outcome


def test_an_exception_of_rank_0_is_printed_once() -> None:
    outcome = run_ranks(3, ENDS.format(end='raise KeyError("left")'))
    assert outcome.status != 0, outcome
    assert outcome.stderr.count("KeyError: 'left'") == 1, outcome
    assert outcome.stderr.count("Traceback") == 1, outcome
    assert "TCPStore" not in outcome.stderr, outcome  # torch's report, with a stack, of a query without an answer


def test_the_watchdog_reports_that_rank_0_was_killed() -> None:
    # In the middle between two queries: torch prints a stack if it gets no answer to one.
    outcome = run_ranks(3, ENDS.format(end="time.sleep(1.1); os.kill(os.getpid(), signal.SIGKILL)"))
    assert outcome.status != 0, outcome
    assert outcome.stderr.count(" died: its process ended without reporting an error") == 1, outcome
    assert "TCPStore" not in outcome.stderr, outcome
