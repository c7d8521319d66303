"""A group that one rank aborts is of no use to any other, and the job goes on without it."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

SIZE = 3
SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
import mpicomm

def attempt(wait):
    try:
        wait()
    except mpicomm.MpicommError as error:
        sys.stdout.write(f"waiting: {error}\\n")

world = mpicomm.bootstrap(timeout=20)
group = dist.new_group(list(range(world.size)))
tensor = torch.ones(4)
dist.all_reduce(tensor, group=group)
if world.rank == 0:
    IN_FLIGHT
    start = time.monotonic()
    group.abort()
    group.abort()
    attempt(WAIT)
    assert time.monotonic() - start < 5
dist.barrier()
deadline = time.monotonic() + 10
while time.monotonic() < deadline:
    time.sleep(0.1)
    try:
        group.send([tensor], world.rank) if world.rank == 0 else group._engine.executor._check_open()
    except mpicomm.MpicommError as error:
        sys.stdout.write(f"rank {world.rank}: {error}\\n")
        break
else:
    sys.exit(f"rank {world.rank} was not told")
dist.destroy_process_group(group)
dist.all_reduce(tensor)
sys.stdout.write(f"rank {world.rank} ends with {tensor[0].item():g}\\n")
"""
MESSAGE = "work = dist.irecv(torch.ones(1), 1, group=group); future = work.get_future()"
COLLECTIVE = "work = dist.all_reduce(tensor.clone(), group=group, async_op=True)"
IN_FLIGHT = {
    "nothing": ("pass", "lambda: None"),
    "a message": (MESSAGE, "work.wait"),
    "a message's future": (MESSAGE, "future.wait"),
    "a collective": (COLLECTIVE, "work.wait"),
    "queued collectives": (f"{COLLECTIVE}; {COLLECTIVE}", "work.get_future().wait"),
}


@pytest.mark.parametrize("what", IN_FLIGHT)
def test_an_aborted_group(what: str) -> None:
    call, wait = IN_FLIGHT[what]
    outcome = run_ranks(SIZE, SCRIPT.replace("IN_FLIGHT", call).replace("WAIT", wait))
    assert "rank 0: group 1 cannot be used any more: it was aborted" in outcome.stdout, outcome
    for rank in range(1, SIZE):
        told = f"rank {rank}: group 1 cannot be used any more: it was aborted on rank 0"
        assert told in outcome.stdout, outcome
    assert outcome.stdout.count(f"ends with {SIZE**2}\n") == SIZE, outcome
    if what == "nothing":
        assert outcome.status == 0, outcome
    else:
        assert "waiting: " in outcome.stdout, outcome
