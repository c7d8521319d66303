"""A tensor that gets other memory between two steps of its operation: an error, instead of a result in two memories."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import mpicomm
from mpicomm.backend.execution.worker_thread import WakeTimer
from mpicomm.backend.transfer import slots

COUNT = 2**20
slots._gather_cores_per_rank = lambda comm: 1.0  # all asynchronous calls begin at once
rank = mpicomm.bootstrap("mpi", abort_on_error=False).rank
group = dist.new_group()
dist.all_reduce(torch.ones(1), group=group)
group._executor.algorithms.slots._state.soon_ns = 10**8 if rank == 0 else -1
wake, WakeTimer.set = WakeTimer.set, lambda timer, nanoseconds: None  # nobody but wait() continues a call
for _ in range(100):  # until rank 1 has left its call in time
    mine, received = torch.ones(COUNT), [torch.zeros(COUNT) for _ in range(2)]
    if sys.argv[1] == "all_reduce":
        work, changed = dist.all_reduce(mine, group=group, async_op=True), mine
    else:
        work, changed = dist.all_gather(received, mine, group=group, async_op=True), received[-1]
    is_under_way = torch.tensor([not work.is_completed()])
    dist.broadcast(is_under_way, 0)
    if is_under_way.item():
        break
    work.wait()
if rank == 0:
    changed.data = torch.full((COUNT,), 7.0)
try:
    work.wait()
    text = "completed"
except RuntimeError as error:
    text = "changed before it completed" if "changed before it completed" in str(error) else repr(error)
WakeTimer.set = wake
print(f"{rank}: {text}, {bool((changed == 7).all())}", flush=True)
"""


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_other_memory_when_a_part_of_the_result_is_written(operation: str) -> None:
    outcome = run_ranks(2, ["-c", PROGRAM, operation])
    assert sorted(outcome.stdout.splitlines()) == [
        "0: changed before it completed, True",
        "1: changed before it completed, False",
    ], outcome
