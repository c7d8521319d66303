"""`torch.distributed.shrink_group` for groups over MPI: a group, or the whole world, continues without some ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from mpicomm import mpi
from tests.launching import run_command, run_ranks

pytestmark = pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="torch 2.9 and older have no shrink_group")

START = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import mpicomm
from mpicomm.watchdog import agent
from tests.time_limits import scaled, wait_until

SHRINK_ABORT = dist.distributed_c10d.SHRINK_ABORT

def say(text):
    sys.stdout.write(f"{text}\\n")
    sys.stdout.flush()

def error_of(call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except Exception as error:
        return error

def use(group, size):
    tensor = torch.full((3,), 1.0 + dist.get_rank(group))
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [size * (size + 1) / 2] * 3, tensor
    if dist.get_rank(group) > 0:
        dist.send(torch.ones(1), group=group, group_dst=0)
    for _ in range(size - 1) if dist.get_rank(group) == 0 else ():
        dist.recv(torch.zeros(1), group=group)  # from any rank

def check_world(old, size, previous):
    world = mpicomm.current_world()
    assert mpicomm.bootstrap() is world is not old
    assert (world.rank, world.size, world.previous_rank) == (previous.index(old.rank), size, old.rank), world
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, size)
    assert os.environ["WORLD_SIZE"] == str(size)
    use(dist.group.WORLD, size)
    assert mpicomm.all_reduce(1) == size
    use(dist.new_group(list(range(size))), size)
    return world
"""

# With 4 ranks: a group without rank 1, the world without rank 0, which notices it, then without the last rank.
WITHOUT_FAILURE = """
agent.EXCLUDED_SECONDS = 1.0
world = mpicomm.bootstrap(min_ranks=2)
own = dist.new_group([0])
part = dist.new_group([0, 1, 2])
if world.rank in (0, 2):
    waiting = dist.irecv(torch.zeros(1), 1, group=part)
    assert "messages of group 2 are in flight" in str(error_of(dist.shrink_group, [1], part))
    assert "pg_options are not supported" in str(error_of(dist.shrink_group, [1], part, pg_options=object()))
dist.barrier()
if world.rank == 1:
    for rank in (0, 2):
        dist.send(torch.ones(1), rank, group=part)
elif world.rank != 3:
    waiting.wait()
    dist.send(torch.ones(1), 1, group=part)
    shrunk = dist.shrink_group([1], part)
    assert dist.get_process_group_ranks(shrunk) == [0, 2]
    use(shrunk, 2)
use(dist.group.WORLD, 4)
if world.rank == 1:
    for _ in range(2):
        dist.recv(torch.ones(1), group=part)  # sent before
    say(f"part: {wait_until(lambda: error_of(part.check_open), 'the end of the group')}")
    dist.destroy_process_group(part)
assert "fewer than min_ranks=2" in str(error_of(dist.shrink_group, [rank for rank in range(4) if rank != world.rank]))
dist.barrier()
if world.rank == 0:
    while agent.current()._excluded_at == float("inf"):
        time.sleep(0.01)
    for _ in range(3):
        dist.recv(torch.ones(1))  # sent before
    say(f"world: {wait_until(lambda: error_of(dist.group.WORLD.check_open), 'the exclusion')}")
    assert "Exit from this process." in str(error_of(dist.shrink_group, [1]))
    use(own, 1)
    sys.exit(0)
dist.send(torch.ones(1), 0)
assert dist.shrink_group([0]) is dist.group.WORLD
second = check_world(world, 3, [1, 2, 3])
if second.rank == 2:
    sys.exit(0)
dist.shrink_group([2])
third = check_world(second, 2, [0, 1])
assert third.recoveries == 2
say(f"rank {world.rank} ends as rank {third.rank}")
"""


@pytest.mark.each_mpi
def test_ranks_that_have_not_failed_are_excluded() -> None:
    outcome = run_ranks(4, START + WITHOUT_FAILURE)
    assert outcome.status == 0, outcome
    shrunk = "part: group 2 cannot be used any more: ranks have continued without rank 1 (shrink_group).\n"
    assert f"{shrunk}Use the default group, or create a new one" in outcome.stdout, outcome
    excluded = "world: group 0 cannot be used any more: the other ranks have excluded rank 0 with shrink_group().\n"
    assert f"{excluded}Exit from this process." in outcome.stdout, outcome
    for rank in (1, 2):
        assert f"rank {rank} ends as rank {rank - 1}\n" in outcome.stdout, outcome


# Rank 3 is excluded while it waits for a message, and then rank 2 is killed.
AFTER_A_FAILURE = """
world = mpicomm.bootstrap(on_failure="recover")
dist.barrier()
if world.rank == 3:
    say(f"rank 3: {error_of(dist.recv, torch.ones(1), 0)}")
    sys.exit(0)
waiting = dist.irecv(torch.ones(1), 3)
dist.shrink_group([3], shrink_flags=SHRINK_ABORT)
say(f"rank {world.rank}: {error_of(waiting.wait)}")
second = check_world(world, 3, [0, 1, 2])
if world.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if world.rank == 0:  # the other one learns of the failure in the call
    assert isinstance(error_of(dist.recv, torch.ones(1), 2), mpicomm.RankFailedError)
    say(f"rank 0: {error_of(dist.shrink_group, [1])}")
dist.shrink_group([2])
check_world(second, 2, [0, 1])
say(f"rank {world.rank} continues")
"""


@pytest.mark.skipif("Open MPI" not in mpi.library().vendor, reason="needs ULFM")
def test_failed_ranks_are_excluded(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(START + AFTER_A_FAILURE)
    outcome = run_command([sys.executable, "-m", "mpicomm", "run", "--fault-tolerant", "-n", "4", str(script)])
    assert outcome.status == 0, outcome
    assert outcome.stderr.count("continuing with") == 1, outcome
    ended = "rank 3: group 0 cannot be used any more: the other ranks have excluded rank 3 with shrink_group().\n"
    assert ended in outcome.stdout, outcome
    alive = "only failed ranks can be excluded, but rank 1 has not failed.\nExclude [2] first, on all other ranks."
    assert f"rank 0: shrink_group: after the failure of rank 2, {alive}" in outcome.stdout, outcome
    for rank in range(2):
        error = next(line for line in outcome.stdout.splitlines() if line.startswith(f"rank {rank}: "))
        assert "shrink_group() has" in error, outcome  # ended the group, or excluded rank 3
        assert f"rank {rank} continues\n" in outcome.stdout, outcome


EXCLUDED_TOO_EARLY = """
agent.EXCLUDED_SECONDS = 0.5
world = mpicomm.bootstrap()
dist.barrier()
if world.rank == 1:
    dist.recv(torch.ones(1), 0)
dist.shrink_group([1])
time.sleep(60)
"""


@pytest.mark.each_mpi
def test_an_excluded_rank_that_waits_for_the_others_ends_the_job() -> None:
    outcome = run_ranks(2, START + EXCLUDED_TOO_EARLY)
    assert outcome.status != 0, outcome
    assert "rank 1 of 2 on" in outcome.stderr, outcome
    assert "excluded with shrink_group(), waits for them in recv from rank 0, float32[1]" in outcome.stderr, outcome
