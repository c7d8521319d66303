"""After one rank aborts a group, no rank can use the group, and the job continues without it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpicomm import mpi
from tests.launching import run_command, run_ranks

SIZE = 3
SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
import mpicomm
from tests.time_limits import scaled, wait_until

def say(text):
    sys.stdout.write(f"{case}: rank {world.rank}: {text}\\n")

def refusal():
    try:
        group.send([tensor], world.rank) if world.rank == 0 else group._executor._state.check_open()
    except mpicomm.MpicommError as error:
        return error

def message():
    return dist.irecv(torch.ones(1), 1, group=group).wait

def future_of_a_message():
    global work  # lives on, as the variable of a program does
    work = dist.irecv(torch.ones(1), 1, group=group)
    return work.get_future().wait

def collective():
    return dist.all_reduce(tensor.clone(), group=group, async_op=True).wait

def queued_collectives():
    global work
    dist.all_reduce(tensor.clone(), group=group, async_op=True)
    work = dist.all_reduce(tensor.clone(), group=group, async_op=True)
    return work.get_future().wait

world = mpicomm.bootstrap()
for case in sys.argv[1:]:
    group = dist.new_group(list(range(world.size)))
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    if world.rank == 0:
        wait = globals()[case]()
        start = time.monotonic()
        group.abort()
        group.abort()
        try:
            wait()
        except mpicomm.MpicommError as error:
            say(f"waiting: {error}")
        assert time.monotonic() - start < scaled(30), f"{case}: abort() waits for the operation"
    dist.barrier()
    say(wait_until(refusal, "the group is refused"))
    dist.destroy_process_group(group)
    dist.all_reduce(tensor)
    say(f"ends with {tensor[0].item():g}")
"""
# All run in one job, each with its own group. Cases that leave a collective operation in MPI are last: a thread of
# rank 0 stays in it.
IN_FLIGHT = ["message", "future_of_a_message", "collective", "queued_collectives"]


@pytest.mark.each_mpi
def test_a_group_that_is_aborted_with_something_in_flight() -> None:
    outcome = run_ranks(SIZE, ["-c", SCRIPT, *IN_FLIGHT])
    for number, case in enumerate(IN_FLIGHT, 1):
        message = f"group {number} cannot be used any more: it was aborted"
        assert f"{case}: rank 0: waiting: " in outcome.stdout, outcome
        assert f"{case}: rank 0: {message}" in outcome.stdout, outcome
        for rank in range(1, SIZE):
            assert f"{case}: rank {rank}: {message} on rank 0" in outcome.stdout, outcome
        for rank in range(SIZE):
            assert f"{case}: rank {rank}: ends with {SIZE**2}\n" in outcome.stdout, outcome


# The first operation of a group does not use shared memory: rank 1 waits in MPI, as rank 2 does for its message.
BLOCKED = """
import sys, time
import torch
import torch.distributed as dist
import mpicomm

world = mpicomm.bootstrap()
group = dist.new_group(list(range(world.size)))
dist.barrier()
try:
    if world.rank == 0:
        time.sleep(0.5)
        group.abort()
    elif world.rank == 1:
        dist.all_reduce(torch.ones(4), group=group)
    else:
        dist.recv(torch.ones(4), 0, group=group)
except mpicomm.MpicommError as error:
    sys.stdout.write(f"rank {world.rank}: {error}\\n")
dist.barrier()
"""


@pytest.mark.skipif("Open MPI" not in mpi.library().vendor, reason="needs ULFM")
def test_calls_of_other_ranks_end_if_mpi_continues_after_failures(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BLOCKED)
    outcome = run_command([sys.executable, "-m", "mpicomm", "run", "--fault-tolerant", "-n", "3", str(script)])
    assert outcome.status == 0, outcome
    for rank in (1, 2):
        assert f"rank {rank}: group 1 cannot be used any more: it was aborted on rank 0.\n" in outcome.stdout, outcome
