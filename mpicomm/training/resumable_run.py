"""Checkpoints, resumption and the stop vote of a training run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from mpicomm.training import checkpoint, parallel, rank_sync, state
from mpicomm.training.checkpoint import Checkpoints
from mpicomm.training.data import DataSource
from mpicomm.training.preemption import Preempted, StopRequest
from mpicomm.training.rank_sync import StopVote
from mpicomm.training.reporting import Reporter
from mpicomm.training.state import Parts


class ResumableRun:
    """A run that saves checkpoints and stops early on request. Without checkpoints it does neither."""

    def __init__(self, parts: Parts, checkpoints: Checkpoints | None, stop_request: StopRequest) -> None:
        self.checkpoints = checkpoints
        self.stop_request = stop_request
        self.vote: StopVote  # set where there are checkpoints
        self._parts = parts
        self._saved: str | None = None

    @property
    def directory(self) -> Path | None:
        """The directory of the checkpoints, if any."""
        return None if self.checkpoints is None else self.checkpoints.directory

    def restore(self, train: DataSource) -> bool:
        """Restore the newest checkpoint, and return whether there is one (collective).

        Raises:
            CheckpointError: On every rank, if the checkpoint does not fit this run.
        """
        if self.checkpoints is None or self.checkpoints.newest is None:
            return False
        state.restore(self.checkpoints, self._parts, train)
        self._saved = self._parts.position.name
        return True

    def continue_from_memory(self) -> None:
        """Continue from the state in memory, which is at least as new as the newest checkpoint."""
        if self.checkpoints is not None and self.checkpoints.newest is not None:
            self._saved = self.checkpoints.newest.name

    @property
    def own_vote(self) -> tuple[bool, bool]:
        """Whether this rank requests a stop, and whether it has failed to write a checkpoint."""
        if self.checkpoints is None:
            return False, False
        return self.stop_request.why is not None, self.checkpoints.has_failed

    def start_vote(self) -> None:
        """Start a vote of the ranks on whether to stop."""
        if self.checkpoints is not None:
            self.vote.open(*self.own_vote)

    def decide_vote(self, stop_requests: int, failures: int) -> None:
        """Set the result of a vote that was part of another reduction."""
        if self.checkpoints is not None:
            self.vote.decide(stop_requests, failures)

    def is_stopping(self) -> bool:
        """Complete the vote, and return whether any rank requests a stop (collective).

        Raises:
            CheckpointError: On all ranks, if the save in progress has failed.
        """
        if self.checkpoints is None:
            return False
        is_requested, has_failed = self.vote.close()
        if has_failed:
            self.checkpoints.wait()
        return is_requested

    def save(self, reporter: Reporter, *, wait: bool = False) -> None:
        """Write a checkpoint, unless one of this position exists (collective)."""
        if self.checkpoints is None:
            return
        position = self._parts.position
        if self._saved != position.name:
            self._parts.losses.check()  # raises if a loss is not finite: such a state must not be saved
            parallel.share_buffers(self._parts.wrapped.inner)  # any rank may write the entries that all ranks have
            self._saved = position.name
            reporter.write("checkpoint", position)
            self.checkpoints.save(position.name, position.step, state.collect(self._parts), wait=wait)
        elif wait:
            self.checkpoints.wait()

    def stop(self, reporter: Reporter) -> NoReturn:
        """Save a checkpoint, and raise `Preempted` (collective)."""
        position = self._parts.position
        why = rank_sync.reasons(self.stop_request.why)
        self.save(reporter, wait=True)
        reporter.write("preempted", position, why=why)
        reporter.print(
            f"{why}: stopped at step {position.step} after saving a checkpoint; start the run again to resume"
        )
        raise Preempted(why)


@contextlib.contextmanager
def opened(
    directory: str | os.PathLike[str] | None,
    keep: int,
    stop_margin: float | None,
    parts: Parts,
    stop_request: StopRequest,
    *,
    recovers: bool = False,
) -> Iterator[ResumableRun]:
    """Open the checkpoints in a directory, and react to signals and the end of the allocation in a block (collective).

    Args:
        directory: The directory; None for a run without checkpoints.
        keep: The number of checkpoints to keep.
        stop_margin: Seconds before the end of the allocation at which to stop; None disables this.
        parts: The objects whose state a checkpoint contains.
        stop_request: The stop request of this rank.
        recovers: Whether training continues after a rank has failed. The vote then uses the process group, whose
            operations raise an error that names the rank.
    """
    if directory is None:
        yield ResumableRun(parts, None, stop_request)
        return
    world = parts.world
    with checkpoint.opened(directory, keep, world.device) as checkpoints:
        run = ResumableRun(parts, checkpoints, stop_request)
        handling_signals = stop_request.handling_signals(stop_margin, polls_scheduler=world.rank == 0)
        with handling_signals, StopVote(None if recovers else world.comm) as run.vote:
            yield run
