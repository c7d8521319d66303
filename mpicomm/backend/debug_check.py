"""The check that `MPICOMM_DEBUG=1` enables: the ranks compare their calls before each collective operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpicomm import agreement
from mpicomm.errors import MismatchError, raised_on_all_ranks
from mpicomm.watchdog import flight_recorder, hang_report

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class DebugCheck:
    """Compares the collective calls of the ranks of one group."""

    def __init__(self, comm: Intracomm, ranks: list[int]) -> None:
        self._comm = comm
        self._ranks = ranks

    def check(self, call: str, operation: flight_recorder.Operation) -> None:
        """Compare this rank's call with the calls of the other ranks (collective).

        If all calls match, the ranks exchange only a digest: one all-reduce yields its minimum and maximum.

        Args:
            call: Readable text that must be equal on all ranks.

        Raises:
            MismatchError: On every rank if the calls differ; the message lists each call with its ranks.
        """
        signature = f"#{operation.sequence} {call}"
        digest = agreement.digest(signature.encode())
        if not agreement.all_equal(agreement.minimum(self._comm, agreement.extremes(digest))):
            raise raised_on_all_ranks(MismatchError(self._explain(self._comm.allgather((signature, operation.where)))))

    def _explain(self, calls: list[tuple[str, str]]) -> str:
        ranks = agreement.ranks_by_value(calls, self._ranks)
        rows = [
            f"  {hang_report.called(members)}: {signature}, at {where}"
            for (signature, where), members in sorted(ranks.items(), key=lambda item: -len(item[1]))
        ]
        return (
            "ranks call different collectives on one group, or one collective with different arguments:\n"
            + "\n".join(rows)
            + "\n#N counts the group's collectives.\nMake all ranks call the same operations in the same order."
        )
