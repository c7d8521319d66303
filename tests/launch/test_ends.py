"""Ends that could go wrong: the first cause must be told, the healthy must go on, and nobody may hang."""

from __future__ import annotations

import re

import pytest

from tests.launching import Outcome, run_ranks

IMPORTS = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
import mpicomm
"""

FINALLY = """
mpicomm.bootstrap(timeout=20)
try:
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("the first cause")
    dist.all_reduce(torch.ones(1))
finally:
    mpicomm.shutdown()
"""

# Rank 0, which has the store and the judge, is stopped when rank 1 fails.
STOPPED = """
world = mpicomm.bootstrap(timeout=20)
dist.barrier()
if world.rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.5)
if world.rank == 1:
    raise ValueError("the first cause")
dist.all_reduce(torch.ones(1))
"""

NEW_GROUP = """
world = mpicomm.bootstrap(timeout=60)
if world.rank == 1:
    sys.exit(3)
dist.new_group(list(range(world.size)))
"""


@pytest.mark.parametrize("code", [FINALLY, STOPPED], ids=["finally", "stopped"])
def test_the_first_cause_is_told(code: str) -> None:
    outcome = run_ranks(3, IMPORTS + code)
    assert outcome.status != 0, outcome
    assert outcome.stderr.count("ValueError: the first cause") == 1, outcome
    assert causes(outcome) == ["[mpicomm] rank 1 of 3 on HOST failed and ends the job:"], outcome
    assert outcome.seconds < 20, outcome


def test_a_rank_that_does_not_come_to_a_new_group_is_named() -> None:
    outcome = run_ranks(3, IMPORTS + NEW_GROUP)
    assert outcome.status != 0, outcome
    assert causes(outcome) == ["[mpicomm] rank 1 of 3 on HOST has left, but others wait for it; the job cannot go on."]
    assert re.search(r"ranks 0, 2 +in new_group #0, in the group of ranks 0-2, at <string>:\d+", outcome.stderr), (
        outcome
    )


# Rank 2 cannot connect: the job runs without the channel.
NO_CHANNEL = """
from mpicomm.faults import channel
if "2" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
    def refuse(*_arguments):
        raise OSError("no route to host")
    channel.Channel.connect = refuse
world = mpicomm.bootstrap()
dist.barrier()
time.sleep(0.2 * world.rank)
sys.stdout.write(f"done {world.rank}\\n")
"""

# The program's end is not the end of what its threads do, the first of which calls no operation for a while.
THREADS = """
from mpicomm.faults import watchdog
watchdog.PATIENCE = 1.0
world = mpicomm.bootstrap()
def train():
    time.sleep(2.5 + world.rank)
    dist.all_reduce(torch.ones(1))
    sys.stdout.write(f"done {world.rank}\\n")
threading.Thread(target=train).start()
"""


@pytest.mark.parametrize("code", [NO_CHANNEL, THREADS], ids=["no channel", "threads"])
def test_a_healthy_job_goes_on(code: str) -> None:
    outcome = run_ranks(3, IMPORTS + code)
    assert outcome.status == 0, outcome
    assert sorted(outcome.stdout.split("\n")[:-1]) == ["done 0", "done 1", "done 2"], outcome
    assert causes(outcome) == [], outcome


def test_a_job_that_was_suspended_goes_on() -> None:
    """Its clocks ran on, its ranks did not."""
    code = (
        "world = mpicomm.bootstrap(timeout=8)\n"
        "dist.barrier()\n"
        "sys.stdout.write(f'pid {os.getpid()}\\n'); sys.stdout.flush()\n"
        "pids = torch.tensor([os.getpid()])\n"
        "everyone = [torch.empty_like(pids) for _ in range(world.size)]\n"
        "dist.all_gather(everyone, pids)\n"
        "if world.rank == 0:\n"
        "    victims = ' '.join(str(int(each)) for each in everyone)\n"
        "    os.system(f'(sleep 0.5; kill -STOP {victims}; sleep 10; kill -CONT {victims}) &')\n"
        "    time.sleep(2)\n"
        "dist.all_reduce(pids)\n"
    )
    outcome = run_ranks(2, IMPORTS + code)
    assert outcome.status == 0, outcome
    assert causes(outcome) == [], outcome


def causes(outcome: Outcome) -> list[str]:
    """Return the lines that name the cause of the end."""
    lines = re.findall(r"\[mpicomm\] .*", outcome.stderr)  # Open MPI's own words may end in the middle of a line
    return [re.sub(r" on \S+", " on HOST", line) for line in lines if "stands still" not in line]
