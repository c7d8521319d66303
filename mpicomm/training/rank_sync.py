"""What the ranks tell each other about a step (all of it collective)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from mpicomm.collective_ops import collectives, group_argument
from mpicomm.errors import TrainingError, raised_on_all_ranks
from mpicomm.training.data import Step
from mpicomm.training.parallel import DDPModel, FSDPModel
from mpicomm.training.preemption import is_of_all_ranks
from mpicomm.watchdog import hang_report

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Prequest

_OF_EQUAL_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def reduced(values: Sequence[float], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[float]:
    """Return what all ranks' values are together, in float64."""
    found = torch.tensor(values, dtype=torch.float64, device=group_argument.resolve(None, "the trainer").control)
    dist.all_reduce(found, op)
    return found.tolist()


def total(count: int) -> int:
    """Return the sum over all ranks."""
    return int(reduced([count])[0])


def most(count: int) -> int:
    """Return the most that any rank has."""
    return int(reduced([count], dist.ReduceOp.MAX)[0])


def everybody(is_so: bool) -> bool:
    """Tell whether something is so on all ranks."""
    return total(not is_so) == 0


def first_failure(act: Callable[[], object], *kinds: type[Exception]) -> tuple[int, str] | None:
    """Do something that may fail, and return the first rank on which it failed, and why; None if on no rank.

    Args:
        kinds: The exceptions that are failures; others are raised.
    """
    failure = None
    try:
        act()
    except kinds as error:
        failure = str(error) or type(error).__name__
    failures = collectives.all_gather_object(failure)
    return next(((rank, each) for rank, each in enumerate(failures) if each is not None), None)


class StopVote:
    """Asks all ranks whether one wishes to leave or has failed to write, while they do something else (collective).

    Under MPI it is a non-blocking all-reduce of two numbers, on a communicator of its own: an asynchronous operation of
    the group would wake its thread, for more time than this takes. Where MPI has persistent collectives (MPI 4), it is
    planned once for all steps.
    """

    def __init__(self, comm: Intracomm | None) -> None:
        """Make ready.

        Args:
            comm: A communicator of all ranks, of which a copy is taken; None without MPI.
        """
        self._comm = None if comm is None else comm.Dup()
        self._mine, self._everybodys = np.zeros(2, np.int64), np.zeros(2, np.int64)
        self._planned = None if self._comm is None else _planned(self._comm, self._mine, self._everybodys)
        self._pending: Any = None

    def open(self, stop_request: bool, has_failed: bool) -> None:
        """Begin to ask."""
        self._mine[0], self._mine[1] = stop_request, has_failed
        if self._planned is not None:
            self._planned.Start()
            self._pending = self._planned
        elif self._comm is not None:
            self._pending = self._comm.Iallreduce(self._mine, self._everybodys)
        else:
            self._pending = collectives.all_reduce(self._mine, async_op=True)

    def close(self) -> tuple[bool, bool]:
        """Tell whether a rank wishes to leave, and whether one has failed."""
        pending, self._pending = self._pending, None
        if self._comm is None:
            self._everybodys = pending.wait()
        else:
            pending.Wait()
        stop_request, has_failed = self._everybodys.tolist()
        return stop_request > 0, has_failed > 0

    def __enter__(self) -> StopVote:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._comm is not None and is_of_all_ranks(error):
            if self._planned is not None:
                self._planned.Free()
            self._comm.Free()


def _planned(comm: Intracomm, mine: np.ndarray, everybodys: np.ndarray) -> Prequest | None:
    try:
        return comm.Allreduce_init(mine, everybodys)
    except NotImplementedError:  # mpi4py was built for an older MPI
        return None


def reasons(why: str | None) -> str:
    """Return why ranks wish to leave."""
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(collectives.all_gather_object(why)):
        if each is not None:
            ranks.setdefault(each, []).append(rank)
    return ", ".join(f"{each} on {hang_report.called(those)}" for each, those in ranks.items())


def samples(step: Step, is_finite: bool) -> dict[str, Sequence[int]]:
    """Return the samples of a step that has no finite loss, by rank, where they are known."""
    mine = None if is_finite else [index for batch in step.batches for index in batch.indices or ()]
    found = collectives.all_gather_object(mine)
    return {str(rank): each for rank, each in enumerate(found) if each is not None}


def check_parameters(wrapped: DDPModel | FSDPModel, step: int) -> None:
    """Compare the parameters of all ranks, by the sums of their bits.

    Raises:
        TrainingError: On every rank, if they differ; it names the ranks and the first parameter that does.
    """
    if isinstance(wrapped, FSDPModel):
        return  # each rank has other parts
    names = [name for name, _ in wrapped.inner.named_parameters()]
    mine = torch.stack([_digest(each) for each in wrapped.inner.parameters()]).to(
        group_argument.resolve(None, "the trainer").control
    )
    extremes = torch.cat([mine, -mine])
    dist.all_reduce(extremes, dist.ReduceOp.MIN)
    least, greatest = extremes.chunk(2)
    if torch.equal(least, -greatest):
        return
    everybodys = torch.stack(collectives.all_gather(mine))
    usual = everybodys.mode(dim=0).values
    others = [rank for rank, row in enumerate(everybodys) if not torch.equal(row, usual)]
    first = names[int((everybodys != usual).any(dim=0).nonzero()[0])]
    raise raised_on_all_ranks(
        TrainingError(
            f"after step {step} the parameters differ: {hang_report.called(others)} from the others, "
            f"first in {first}.\n"
            f"Does a rank change them by itself, or train on without synchronizing? Go on from the last checkpoint "
            f"before."
        )
    )


def _digest(parameter: torch.Tensor) -> torch.Tensor:
    content = parameter.detach().contiguous()
    if content.is_complex():
        content = torch.view_as_real(content)
    return content.view(_OF_EQUAL_SIZE[content.element_size()]).sum(dtype=torch.int64)
