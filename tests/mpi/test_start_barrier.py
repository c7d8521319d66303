"""The barrier of the start of a job, if a rank arrives after the others have given up."""

from __future__ import annotations

import pytest

import mpicomm
from mpicomm import missing_ranks, mpi
from mpicomm.errors import RendezvousError
from mpicomm.missing_ranks import MissingNotice, wait_for_all_ranks
from tests.time_limits import scaled


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_has_given_up_is_missing_in_the_next_attempt(
    world: mpicomm.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing_ranks, "_GRACE", 0.1)
    notice = MissingNotice(scaled(60), lambda _: None)
    assert world.comm is not None
    comm = world.comm.Split(0 if world.rank < 2 else mpi.api().UNDEFINED)
    if world.rank == 1:
        with pytest.raises(RendezvousError, match="waiting for rank 0"):
            wait_for_all_ranks(comm, "bootstrap()", 0.1, notice)
    world.comm.Barrier()  # of MPI, which has the messages before it
    if world.rank == 0:
        with pytest.raises(RendezvousError, match="1 of 2 ranks did not arrive: rank 1"):
            wait_for_all_ranks(comm, "bootstrap()", 0.1, notice)
    world.comm.Barrier()  # of MPI, which has the messages before it
    if world.rank < 2:
        wait_for_all_ranks(comm, "bootstrap()", scaled(60), notice)
        comm.Free()
