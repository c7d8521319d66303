"""Timeouts of operations: an exception that names the missing ranks, or a table of all ranks and the end of the job."""

from __future__ import annotations

import json
import re

import pytest

from tests.launching import run_ranks
from tests.time_limits import scaled

SIZE = 3

# For each case in turn, rank 0 calls an operation that the other ranks do not call in time.
SCRIPT = """
import datetime, json, os, sys, threading, time
import torch
import torch.distributed as dist
import mpicomm
from mpicomm.recorder import flight_recorder
from tests.time_limits import wait_until

def say(kind, text=""):
    sys.stdout.write(json.dumps([case, world.rank, kind, text]) + "\\n")
    sys.stdout.flush()

def attempt(call):
    try:
        call()
    except (TimeoutError, mpicomm.MpicommError) as error:
        say(type(error).__name__, str(error))

def is_unusable():
    try:
        group._executor._state.check_open()
    except mpicomm.MpicommError:
        return True

def announce_the_barrier():
    wait_until(flight_recorder.running, "this rank is in the barrier")
    store.add(case, 1)

CALLS = {
    "barrier": lambda: mpicomm.barrier(group, timeout=0.5),
    "barrier-debug": lambda: mpicomm.barrier(group, timeout=0.5),
    "raise": lambda: dist.all_reduce(tensor, group=group),
    "raise-own": lambda: group.allreduce([tensor], timeout=datetime.timedelta(seconds=0.5)).wait(),
    "async": lambda: dist.all_reduce(tensor, group=group, async_op=True).wait(datetime.timedelta(seconds=0.5)),
    "raise-async": lambda: dist.all_reduce(tensor, group=group, async_op=True).wait(),
    "end-async": lambda: dist.all_reduce(tensor, group=group, async_op=True).wait(),
    "end-own": lambda: group.allreduce([tensor], timeout=datetime.timedelta(seconds=3)).wait(),
}
world = mpicomm.bootstrap()
store = dist.distributed_c10d._get_default_store()
for case in sys.argv[1:]:
    # A group reads these variables when it is made.
    os.environ["MPICOMM_ON_TIMEOUT"] = "raise" if "raise" in case else "abort"
    os.environ["MPICOMM_DEBUG"] = "1" if "debug" in case else "0"
    group = dist.new_group(list(range(world.size)))
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    group.set_timeout(datetime.timedelta(seconds=1))
    if world.rank == 0:
        wait_until(lambda: store.add(case, 0) == world.size - 1, "the other ranks are in the barrier")
        attempt(CALLS[case])
        attempt(CALLS[case])
        if case == "async":  # the operation stays in MPI, beyond the timeout of its group, and must not end the job
            time.sleep(5)
        dist.barrier()
    else:
        threading.Thread(target=announce_the_barrier).start()
        dist.barrier()
        wait_until(is_unusable, "the group is refused")
        attempt(CALLS[case])
    say("end")
sys.exit(3)
"""
# Cases that leave an operation in MPI are last: a thread of rank 0 stays in it.
RAISES = ["barrier", "barrier-debug", "raise", "raise-own", "async", "raise-async"]


@pytest.mark.each_mpi
def test_an_exception_names_the_missing_ranks() -> None:
    outcome = run_ranks(SIZE, ["-c", SCRIPT, *RAISES])
    assert outcome.status != 0, outcome
    lines = [json.loads(line) for line in outcome.stdout.splitlines()]
    for barrier, case in enumerate(RAISES, 1):  # each case calls one barrier in the group of all ranks
        entries = [(rank, kind, text) for name, rank, kind, text in lines if name == case]
        errors = [entry for entry in entries if entry[1] != "end"]
        by_rank_0 = [entry for entry in errors if entry[0] == 0]
        assert len(by_rank_0) == 2, f"{case}: rank 0 gets an exception from each of its two calls\n{outcome}"
        _, kind, text = by_rank_0[0]
        first, _, table = text.partition("\n")
        seconds = "1" if case in ("raise", "raise-async") else "0.5"
        assert kind == "TimeoutError", outcome
        assert " #2, " in first, outcome
        assert first.endswith(f" timed out after {seconds} s: 2 of 3 ranks did not reach it: ranks 1, 2."), outcome
        assert re.search(rf"^ +ranks 1, 2 +in barrier #{barrier}, at <string>:\d+", table, re.MULTILINE), outcome
        errors.remove(by_rank_0[0])
        assert sorted(rank for rank, _, _ in errors) == list(range(SIZE)), f"{case}: a rank uses the group\n{outcome}"
        for rank, kind, text in errors:
            assert kind == "MpicommError", f"{case}, rank {rank}\n{outcome}"
            assert text.startswith("group "), f"{case}, rank {rank}\n{outcome}"
            assert "cannot be used any more" in text.splitlines()[0], f"{case}, rank {rank}\n{outcome}"
        assert [kind for _, kind, _ in entries].count("end") == SIZE, f"{case}: a rank does not go on\n{outcome}"


@pytest.mark.parametrize(
    ("case", "seconds"), [pytest.param("end-async", 1, marks=pytest.mark.each_mpi), ("end-own", 3)]
)
def test_elsewhere_the_job_ends_with_a_table(case: str, seconds: int) -> None:
    outcome = run_ranks(SIZE, ["-c", SCRIPT, case])
    assert outcome.status != 0, outcome
    assert outcome.stdout == "", f"no call returns, and none raises an exception\n{outcome}"
    pattern = rf"^\[mpicomm\].* timed out after {seconds} s in .*; aborting the job"
    assert len(re.findall(pattern, outcome.stderr, re.MULTILINE)) == 1, outcome
    assert f"rank 0 of {SIZE} on " in outcome.stderr, outcome
    rank_0 = r"all_reduce #2, float32\[4\], in the group of ranks 0-2, at <string>:\d+ \(<lambda>\)"
    for row in (rf"rank 0 +in {rank_0}", r"ranks 1, 2 +in barrier #1, at <string>:\d+"):
        waited = re.findall(rf"\n  {row}, for (\d+) s", outcome.stderr)
        assert waited, f"no row {row}\n{outcome}"
        assert max(map(int, waited)) < scaled(30), outcome  # the group of all ranks has a timeout of 1800 s
