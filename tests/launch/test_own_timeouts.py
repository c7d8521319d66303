"""A call has a longer timeout than its group: the watchdog waits for the call's timeout, and the job continues."""

from __future__ import annotations

from tests.launching import run_ranks

SIZE = 2

# Rank 1 calls each operation after the group's timeout, but long before the operation's timeout.
SCRIPT = """
import datetime, sys, time
import torch
import torch.distributed as dist
import mpicomm
from mpicomm import torch_internals

def all_reduce(group, is_async):
    options = torch_internals.AllreduceOptions()
    options.asyncOp = is_async
    options.timeout = datetime.timedelta(seconds=30)
    group.allreduce([torch.ones(4)], options).wait()

CALLS = {
    "barrier": lambda group: mpicomm.barrier(group, timeout=30),
    "all_reduce": lambda group: all_reduce(group, False),
    "async all_reduce": lambda group: all_reduce(group, True),
}
world = mpicomm.bootstrap(timeout=30)
for name, call in CALLS.items():
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.5))
    dist.all_reduce(torch.ones(1), group=group)  # the next one may be a plain call
    if world.rank == 1:
        time.sleep(2)
    call(group)
    sys.stdout.write(f"rank {world.rank} goes on after {name}\\n")
    dist.barrier()
"""


def test_a_call_has_more_time_than_its_group() -> None:
    outcome = run_ranks(SIZE, SCRIPT)
    assert outcome.status == 0, outcome
    assert outcome.stdout.count(" goes on after ") == 3 * SIZE, outcome
