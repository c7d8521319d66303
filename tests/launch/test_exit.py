"""A successful job ends with status 0 and without output on stderr."""

from __future__ import annotations

import pytest

from tests.launching import run_alone, run_ranks

SEVERAL_JOBS = """
import os
import torch
import torch.distributed as dist
from mpicomm import mpi

mpi.api()  # with Intel MPI mpi4py sets FI_PROVIDER_PATH
os.environ["MASTER_ADDR"] = "localhost"
MOVED = ("PMIX_NAMESPACE", "PMI_FD", "_MPICOMM_RANK_PROCESS")  # the connection to the launcher, hidden from children
def variables():
    return {name: value for name, value in os.environ.items() if name not in MOVED}
before = variables()
world = mpicomm.bootstrap()
assert mpicomm.bootstrap() is world
try:
    mpicomm.bootstrap("gloo", timeout=1)
except ValueError as error:
    assert str(error).startswith("bootstrap() was called before with backend='auto', got backend='gloo'."), error
else:
    raise AssertionError("a second call with another backend has returned")
assert (os.environ["RANK"], os.environ["MASTER_ADDR"]) == (str(world.rank), world.master_addr)
assert world.master_addr != "localhost"
mpicomm.shutdown()
mpicomm.shutdown()
assert not dist.is_initialized()
assert variables() == before
total = torch.tensor(float(world.rank))
with mpicomm.bootstrap() as again:
    assert again is not world
    assert (again.rank, again.size, again.hosts) == (world.rank, world.size, world.hosts)
    assert again.comm.allreduce(again.rank) == again.size * (again.size - 1) // 2
    dist.all_reduce(total)
assert total == world.size * (world.size - 1) / 2
assert not dist.is_initialized()
third = mpicomm.bootstrap()
dist.destroy_process_group()
"""

BUSY = """
import threading, time
import torch
import torch.distributed as dist
world = mpicomm.bootstrap()
work = dist.all_reduce(torch.ones(1000), async_op=True)
group = dist.new_group(list(range(world.size)))
dist.all_reduce(torch.ones(1000), group=group, async_op=True).wait()
work.wait()
threading.Thread(target=time.sleep, args=(0.5,)).start()
"""


@pytest.mark.each_mpi
@pytest.mark.parametrize("code", [SEVERAL_JOBS, BUSY], ids=["several", "busy"])
def test_a_good_run_is_quiet(code: str) -> None:
    outcome = run_ranks(2, f"import mpicomm\n{code}")
    assert outcome.status == 0, outcome
    assert outcome.stderr == "", outcome
    assert outcome.stdout == "", outcome


def test_a_world_of_one_takes_the_same_path() -> None:
    outcome = run_alone(f"import mpicomm\n{SEVERAL_JOBS}")
    assert outcome.status == 0, outcome
    assert outcome.stderr == "", outcome


FAILS = """
from mpicomm.backend import groups
def fail():
    raise RuntimeError("this communicator is unusable")
groups.drain = fail
mpicomm.bootstrap()
print("the program has finished", flush=True)
"""


def test_an_error_of_shutdown_at_exit_is_printed() -> None:
    outcome = run_alone("import mpicomm\n" + FAILS)
    assert (outcome.status, outcome.stdout) == (0, "the program has finished\n"), outcome
    first, *_, last = outcome.stderr.splitlines()
    assert first.startswith("[mpicomm] rank 0 of 1 on "), outcome
    assert first.endswith(": shutdown() failed at exit"), outcome
    assert last == "RuntimeError: this communicator is unusable", outcome
