"""Deadlines that pass: an exception that names who has not come, or else a table and the end of the job."""

from __future__ import annotations

import re

import pytest

from tests.launching import run_ranks

SIZE = 3

# Rank 0 comes to an operation, the others do something else for a while.
SCRIPT = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
import mpicomm

def say(text):
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()

def attempt(call):
    try:
        call()
    except (TimeoutError, mpicomm.MpicommError) as error:
        say(f"rank {world.rank} {type(error).__name__}: {error}")

world = mpicomm.bootstrap(timeout=20)
group = dist.new_group(list(range(world.size)), timeout=datetime.timedelta(seconds=1))
tensor = torch.ones(4)
dist.all_reduce(tensor, group=group)
if world.rank == 0:
    attempt(lambda: CALL)
    attempt(lambda: CALL)
    time.sleep(0.5)
    dist.barrier()
else:
    dist.barrier()
    attempt(lambda: CALL)
say(f"rank {world.rank} ends")
sys.exit(3)
"""
CALLS = {
    "barrier": "mpicomm.barrier(group, timeout=0.5)",
    "async": "dist.all_reduce(tensor, group=group, async_op=True).wait(datetime.timedelta(seconds=0.5))",
    "raise": "dist.all_reduce(tensor, group=group)",
    "raise-async": "dist.all_reduce(tensor, group=group, async_op=True).wait()",
    "raise-own": "group.allreduce([tensor], timeout=datetime.timedelta(seconds=0.5)).wait()",
}


@pytest.mark.parametrize(
    ("how", "debug"), [*((how, "0") for how in CALLS), ("barrier", "1")], ids=[*CALLS, "barrier-debug"]
)
def test_an_exception_names_who_has_not_come(how: str, debug: str) -> None:
    env = {"MPICOMM_TIMEOUT": "raise" if "raise" in how else "abort", "MPICOMM_DEBUG": debug}
    outcome = run_ranks(SIZE, SCRIPT.replace("CALL", CALLS[how]), env=env)
    first, *others = [line for line in outcome.stdout.splitlines() if re.match(r"rank \d [MT]", line)]
    seconds = "1" if how in ("raise", "raise-async") else "0.5"
    assert first.startswith("rank 0 TimeoutError: "), outcome
    assert " #2, " in first, outcome
    assert first.endswith(f": 2 of 3 ranks did not come within the timeout of {seconds} s: ranks 1, 2."), outcome
    assert re.search(r"\n +ranks 1, 2 +in barrier #1, at <string>:\d+", outcome.stdout), outcome
    assert len(others) == SIZE, f"nobody can use the group any more\n{outcome}"
    assert all("MpicommError: group" in line and "cannot be used any more" in line for line in others), outcome
    assert outcome.stdout.count(" ends\n") == SIZE, outcome
    assert outcome.status != 0, outcome


ENDS = {
    "sync": ("dist.all_reduce(tensor, group=group)", "all_reduce #2, float32[4]", 1),
    "async": ("dist.all_reduce(tensor, group=group, async_op=True).wait()", "all_reduce #2, float32[4]", 1),
    "own": ("group.allreduce([tensor], timeout=datetime.timedelta(seconds=3)).wait()", "all_reduce #2, float32[4]", 3),
    "recv": ("dist.recv(tensor, 1, group=group)", "recv from rank 1, float32[4]", 1),
}


@pytest.mark.parametrize("how", list(ENDS))
def test_elsewhere_the_job_ends_with_a_table(how: str) -> None:
    call, shown, seconds = ENDS[how]
    outcome = run_ranks(SIZE, SCRIPT.replace("CALL", call))
    assert outcome.status != 0, outcome
    assert " ends\n" not in outcome.stdout, outcome
    told = rf"^\[mpicomm\].* for the timeout of {seconds} s; the job ends"
    assert len(re.findall(told, outcome.stderr, re.MULTILINE)) == 1, outcome
    assert f"rank 0 of {SIZE} on " in outcome.stderr, outcome
    waited = f"for [{seconds}-{seconds + 1}] s"
    row = rf"\n  rank 0 +in {re.escape(shown)}, in the group of ranks 0-2, at <string>:\d+ \(<lambda>\), {waited}"
    assert re.search(row, outcome.stderr), outcome
    assert re.search(rf"\n  ranks 1, 2 +in barrier #1, at <string>:\d+, {waited}", outcome.stderr), outcome
    assert outcome.seconds < 30, outcome
