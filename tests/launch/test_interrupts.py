"""A signal handler raises while a rank waits in an operation, after which the ranks are out of step."""

from __future__ import annotations

import re

import pytest

from tests.launching import run_ranks

SCRIPT = """
import datetime
import signal
import sys
import time

import torch
import torch.distributed as dist

import mpicomm

from tests.time_limits import slowness

world = mpicomm.bootstrap("mpi")
unit = mpicomm.broadcast_object(slowness()) # seconds
small, large = torch.ones(4), torch.ones(2**20)
CALLS = {  # what rank 0 calls, and the part of it that rank 1 joins
    "small": (lambda group: dist.all_reduce(small, group=group),) * 2,
    "asynchronous": (lambda group: dist.all_reduce(small, group=group, async_op=True).wait(),) * 2,
    "coalesced": (
        lambda group: dist.all_reduce_coalesced([small, torch.ones(8)], group=group),
        lambda group: dist.all_reduce(small, group=group),
    ),
    "sparse": (
        lambda group: dist.all_reduce(torch.eye(3).to_sparse(), group=group),
        lambda group: group._executor.comm.allgather(3),
    ),
    "opening": (lambda group: dist.all_reduce(large, group=group),) * 2,
    "large": (lambda group: dist.all_reduce(large, group=group),) * 2,
}


def interrupt(*_):
    raise KeyboardInterrupt


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()


signal.signal(signal.SIGALRM, interrupt)
for case in sys.argv[1:]:
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=4 * unit))
    call, part = CALLS[case]
    if case != "opening":
        dist.all_reduce(large, group=group)
    dist.barrier()
    if world.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3 * unit)
        try:
            call(group)
            say(case, "not interrupted")
        except KeyboardInterrupt:
            pass
    else:
        time.sleep(unit)
        try:
            part(group)
        except mpicomm.MpicommError:  # the C library's waits are interrupted at once, and rank 1 has been notified
            assert case != "sparse"
    dist.barrier()
    while not group._executor.record.broken:  # the watchdog notifies rank 1
        time.sleep(0.01)
    try:
        dist.all_reduce(small, group=group)
        say(case, "not refused")
    except mpicomm.MpicommError as error:
        say(case, world.rank, error)
    dist.barrier()
say("the world is usable")
"""
PARTS = ["small", "asynchronous", "coalesced", "sparse", "large"]
REFUSED = r"^{} {} group \S+ cannot be used any more: all_reduce #\d.* was interrupted by KeyboardInterrupt"


def test_an_interrupt_between_two_parts_ends_the_group() -> None:
    outcome = run_ranks(2, ["-c", SCRIPT, *PARTS])
    for case in PARTS:
        for rank in range(2):
            assert re.search(REFUSED.format(case, rank), outcome.stdout, re.MULTILINE), f"{case}\n{outcome}"
    assert outcome.stdout.count("the world is usable") == 2, outcome


@pytest.mark.each_mpi
def test_an_interrupt_while_shared_memory_is_opened_ends_the_job_at_its_timeout() -> None:
    """Rank 1 blocks in MPI, where nothing can interrupt it, until its timeout; rank 0 waits for it in a barrier."""
    outcome = run_ranks(2, ["-c", SCRIPT, "opening"])
    assert outcome.stdout == "", outcome
    assert outcome.status != 0, outcome
    assert "rank 1 of 2 on " in outcome.stderr, outcome
    assert re.search(r"timed out after \d+(\.\d+)? s in .*; aborting the job", outcome.stderr), outcome
    assert re.search(r"^  rank 0 +in barrier", outcome.stderr, re.MULTILINE), outcome
    assert "SIGSEGV" not in outcome.stderr, outcome
    assert "Segmentation" not in outcome.stderr, outcome
