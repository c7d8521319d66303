"""An MPI with thread level MPI_THREAD_SERIALIZED: operations that need no other thread run, all others are refused."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

PROGRAM = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI
import sys, torch, torch.distributed as dist, mpicomm
world = mpicomm.bootstrap("mpi")
assert MPI.Query_thread() == MPI.THREAD_SERIALIZED
tensor = torch.ones(4)
dist.all_reduce(tensor)
other, got = 1 - world.rank, torch.empty(200_000)
works = [dist.irecv(got, other), dist.isend(torch.full((200_000,), float(world.rank)), other)]
for work in works:
    work.wait()
assert got.eq(other).all() and tensor.eq(2).all()
try:
    dist.all_reduce(tensor, async_op=True)
except mpicomm.MpicommError as error:
    sys.stdout.write(f"{error}\\n")
dist.all_reduce(tensor)
assert tensor.eq(4).all()
"""


@pytest.mark.each_mpi
def test_an_mpi_that_serves_one_thread_at_a_time() -> None:
    outcome = run_ranks(2, PROGRAM)
    assert outcome.status == 0, outcome
    assert outcome.stdout.count("Use async_op=False, or let mpicomm.bootstrap() initialise MPI.\n") == 2, outcome
