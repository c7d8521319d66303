"""Difficult ends of jobs: the first cause must be reported, healthy jobs must continue, and no rank may hang."""

from __future__ import annotations

import re

import pytest

from tests.launching import Outcome, run_ranks

IMPORTS = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
import mpicomm
from mpicomm.recorder import flight_recorder
from mpicomm.watchdog import local_processes
from tests.time_limits import wait_until
"""

FINALLY = """
mpicomm.bootstrap()
try:
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("the first cause")
    dist.all_reduce(torch.ones(1))
finally:
    mpicomm.shutdown()
"""

# Rank 0, which runs the store and the coordinator, is stopped when rank 1 fails.
STOPPED = """
world = mpicomm.bootstrap()
pids = world.comm.allgather(os.getpid())
if world.rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
wait_until(lambda: local_processes.is_stopped(pids[0]), "rank 0 is stopped")
if world.rank == 1:
    raise ValueError("the first cause")
dist.all_reduce(torch.ones(1))
"""

NEW_GROUP = """
world = mpicomm.bootstrap()
if world.rank == 1:
    sys.exit(3)
dist.new_group(list(range(world.size)))
"""


@pytest.mark.parametrize(
    "code",
    [pytest.param(FINALLY, id="finally"), pytest.param(STOPPED, id="stopped", marks=pytest.mark.each_mpi)],
)
def test_the_first_cause_is_reported(code: str) -> None:
    outcome = run_ranks(3, IMPORTS + code)
    assert outcome.status != 0, outcome
    assert outcome.stderr.count("ValueError: the first cause") == 1, outcome
    assert causes(outcome) == ["[mpicomm] rank 1 of 3 on HOST failed; aborting the job:"], outcome


def test_a_rank_that_is_missing_from_a_new_group_is_named() -> None:
    outcome = run_ranks(3, IMPORTS + NEW_GROUP)
    assert outcome.status != 0, outcome
    assert causes(outcome) == [
        "[mpicomm] rank 1 of 3 on HOST has exited, but other ranks wait for it; aborting the job"
    ]
    assert re.search(r"ranks 0, 2 +in new_group #0, in the group of ranks 0-2, at <string>:\d+", outcome.stderr), (
        outcome
    )


# Rank 2 cannot connect: the job runs without the out-of-band channel.
NO_CHANNEL = """
from mpicomm.watchdog import channel
if "2" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
    def refuse(*_arguments):
        raise OSError("no route to host")
    channel.Channel.connect = refuse
world = mpicomm.bootstrap()
dist.barrier()
time.sleep(0.2 * world.rank)
sys.stdout.write(f"done {world.rank}\\n")
"""

# After the end of the program, its threads continue; the first operation starts only 2.5 s later.
THREADS = """
from mpicomm.watchdog import rank_reports
rank_reports.WAIT_LIMIT = 1.0
world = mpicomm.bootstrap()
def train():
    time.sleep(2.5 + world.rank)
    dist.all_reduce(torch.ones(1))
    sys.stdout.write(f"done {world.rank}\\n")
threading.Thread(target=train).start()
"""


# Each group waits 1 s for a message that never arrives; together, they wait longer than the 5 s limit of one group.
UNFINISHED = """
import warnings
from mpicomm.backend.execution import pending_messages
from mpicomm.watchdog import rank_reports
pending_messages._LAST_MESSAGES_SECONDS, rank_reports._TAKE_DOWN_SECONDS = 1.0, 5.0
warnings.simplefilter("ignore")
world = mpicomm.bootstrap()
works = [dist.irecv(torch.ones(1), (world.rank + 1) % 3, group=dist.new_group()) for _ in range(8)]
start = time.monotonic()
mpicomm.shutdown()
assert time.monotonic() - start > 8
sys.stdout.write(f"done {world.rank}\\n")
"""


@pytest.mark.parametrize("code", [NO_CHANNEL, THREADS, UNFINISHED], ids=["no channel", "threads", "unfinished"])
def test_a_healthy_job_continues(code: str) -> None:
    outcome = run_ranks(3, IMPORTS + code)
    assert outcome.status == 0, outcome
    assert sorted(outcome.stdout.split("\n")[:-1]) == ["done 0", "done 1", "done 2"], outcome
    assert causes(outcome) == [], outcome


# The suspension takes 20 s, longer than the timeout of 18 s. Afterwards rank 0 sleeps for 3 s, so that rank 1 still
# waits when its watchdog, which looks once a second, runs again.
SUSPENDED = """
from datetime import timedelta
world = mpicomm.bootstrap()
group = dist.new_group(timeout=timedelta(seconds=18))
pids = world.comm.allgather(os.getpid())
dist.barrier()
if world.rank == 0:
    victims = ' '.join(map(str, pids))
    os.system(f'(sleep 0.5; kill -STOP {victims}; sleep 20; kill -CONT {victims}) &')
    last = now = time.monotonic()
    while now - last < 10:
        last = now
        time.sleep(0.1)
        now = time.monotonic()
    print("suspended", flush=True)
    time.sleep(3)
dist.all_reduce(torch.ones(1), group=group)
"""

# While rank 1 waits in all of these operations, the clocks of both ranks jump by more than the timeout, as after a
# suspension.
SUSPENDED_IN_WAITS = """
from datetime import timedelta
limit = timedelta(seconds=300)
suspended, clock = 0.0, time.monotonic
time.monotonic = flight_recorder.monotonic = lambda: clock() + suspended
world = mpicomm.bootstrap()
def message(group):
    if world.rank == 1:
        dist.irecv(torch.ones(1), 0, group=group).wait(limit)
    else:
        dist.send(torch.ones(1), 1, group=group)
WAITS = {
    "in parts": lambda group: dist.all_reduce(torch.ones(1), group=group, async_op=True).wait(limit),
    "by handle": lambda group: mpicomm.all_reduce(torch.ones(1), group=group, async_op=True).wait(limit),
    "message": message,
    "raising": lambda group: dist.all_reduce(torch.ones(1), group=group),
    "monitored": lambda group: group.monitored_barrier(limit),
    "barrier": dist.barrier,
}
def run(name, group):
    try:
        WAITS[name](group)
        print("through", name, flush=True)
    except Exception as error:
        print(name, type(error).__name__, error, flush=True)
waits = []
for name in WAITS:
    os.environ["MPICOMM_ON_TIMEOUT"] = "raise" if name == "raising" else "abort"
    group = dist.new_group(timeout=limit)
    group._plain = group._plain_messages = None  # the extension module reads the clock of the kernel, which stays
    waits.append(threading.Thread(target=run, args=(name, group)))
dist.group.WORLD._plain = None
dist.barrier()
if world.rank == 1:
    for wait in waits:
        wait.start()
    wait_until(lambda: len(flight_recorder.running()) == len(WAITS), "rank 1 waits in every operation")
world.comm.Barrier()
suspended = 1000.0
time.sleep(2)
if world.rank == 0:
    for wait in waits:
        wait.start()
for wait in waits:
    wait.join()
"""


def test_a_job_that_was_suspended_continues() -> None:
    """During a suspension the clocks continue, but the ranks do not."""
    outcome = run_ranks(2, IMPORTS + SUSPENDED)
    assert outcome.status == 0, outcome
    assert "suspended" in outcome.stdout, outcome
    assert causes(outcome) == [], outcome


def test_timeouts_do_not_count_a_suspension() -> None:
    outcome = run_ranks(2, IMPORTS + SUSPENDED_IN_WAITS)
    assert outcome.status == 0, outcome
    ways = ["in parts", "by handle", "message", "raising", "monitored", "barrier"]
    assert sorted(outcome.stdout.splitlines()) == sorted(f"through {way}" for way in ways * 2), outcome
    assert causes(outcome) == [], outcome


def causes(outcome: Outcome) -> list[str]:
    """Return the lines that report the cause of the job's end."""
    lines = re.findall(r"\[mpicomm\] .*", outcome.stderr)  # Open MPI's own output may end without a newline
    return [re.sub(r" on \S+", " on HOST", line) for line in lines if "possible hang" not in line]
