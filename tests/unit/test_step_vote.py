"""The vote of the ranks in a step that an error interrupts."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

from mpicomm.errors import TrainingError, raised_on_all_ranks
from mpicomm.training.resumable_run import StepVote


class FakeComm:
    """A communicator whose operations never complete on their own."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def Dup(self) -> FakeComm:  # noqa: N802
        return self

    def Iallreduce(self, _own: Any, sums: Any) -> FakeComm:  # noqa: N802
        self.sums = weakref.ref(sums)
        return self

    def Wait(self) -> None:  # noqa: N802
        self.calls.append("Wait")

    def Free(self) -> None:  # noqa: N802
        self.calls.append("Free")


def interrupted(error: Exception) -> FakeComm:
    """Return the communicator of a vote after an error between its start and its result."""
    comm: Any = FakeComm()
    with contextlib.suppress(type(error)), StepVote(comm, recovers=False) as vote:
        vote.start([1.0, 0.0])
        raise error
    return comm


def test_an_error_of_all_ranks_completes_the_vote() -> None:
    assert interrupted(raised_on_all_ranks(TrainingError("different"))).calls == ["Wait", "Free"]


def test_an_error_of_one_rank_keeps_the_memory_that_mpi_writes_to() -> None:
    comm = interrupted(LookupError("on this rank"))
    gc.collect()
    assert comm.calls == []
    assert comm.sums() is not None
