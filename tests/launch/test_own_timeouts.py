"""A call has a longer timeout than its group: the watchdog waits for the call's timeout, and the job continues."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

SIZE = 2

# Rank 1 calls an operation after the group's timeout, but long before the operation's timeout.
SCRIPT = """
import datetime, sys, time
import torch
import torch.distributed as dist
import mpicomm
from mpicomm import torch_internals

def all_reduce():
    options = torch_internals.AllreduceOptions()
    options.asyncOp = IS_ASYNC
    options.timeout = datetime.timedelta(seconds=30)
    group.allreduce([torch.ones(4)], options).wait()

def barrier():
    mpicomm.barrier(group, timeout=30)

world = mpicomm.bootstrap(timeout=30)
group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.5))
if world.rank == 1:
    time.sleep(2)
CALL()
sys.stdout.write(f"rank {world.rank} goes on\\n")
dist.barrier()
"""
CALLS = {
    "barrier": ("barrier", False),
    "all_reduce": ("all_reduce", False),
    "async all_reduce": ("all_reduce", True),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_has_more_time_than_its_group(call: str) -> None:
    name, is_async = CALLS[call]
    outcome = run_ranks(SIZE, SCRIPT.replace("CALL", name).replace("IS_ASYNC", str(is_async)))
    assert outcome.status == 0, outcome
    assert outcome.stdout.count(" goes on\n") == SIZE, outcome
