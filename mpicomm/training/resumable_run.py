"""Checkpoints, resumption and the stop vote of a training run."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from mpicomm.training import checkpoint, parallel, rank_sync, state
from mpicomm.training.checkpoint import Checkpoints
from mpicomm.training.data import DataSource
from mpicomm.training.preemption import Preempted, StopRequest
from mpicomm.training.rank_sync import StopVote
from mpicomm.training.reporting import Reporter
from mpicomm.training.run_limits import RunLimits
from mpicomm.training.state import Parts


class ResumableRun:
    """A run that saves checkpoints and stops early on request. Without checkpoints, only `limits` can end it early."""

    def __init__(
        self,
        parts: Parts,
        checkpoints: Checkpoints | None,
        stop_request: StopRequest,
        limits: RunLimits,
        on_checkpoint: Callable[[Path], None],
        evaluating: Callable[[], contextlib.AbstractContextManager[object]],
    ) -> None:
        self.checkpoints, self._evaluating = checkpoints, evaluating
        self.stop_request, self._limits, self._on_checkpoint = stop_request, limits, on_checkpoint
        self.vote: StopVote | None = None  # set where there are checkpoints, or ranks can request the end of the run
        self.is_ending = False
        """Whether the last vote has ended the run."""

        self.inexact: str | None = None
        """Why a run that resumes within an epoch may differ, and the remedy, until it is reported."""

        self._parts = parts
        self._saved: tuple[str | None, bool] = None, False  # the name, and whether it has the weights of evaluations
        self._unreported: Path | None = None  # the newest checkpoint, until `on_checkpoint` is called

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
        self._saved = self._parts.position.name, True  # it need not be written again
        self._unreported = self.checkpoints.newest
        return True

    def continue_from_memory(self) -> None:
        """Continue from the state in memory, which is at least as new as the newest checkpoint."""
        if self.checkpoints is not None and self.checkpoints.newest is not None:
            self._saved, self._unreported = (self.checkpoints.newest.name, True), self.checkpoints.newest

    @property
    def own_vote(self) -> tuple[bool, bool, bool]:
        """Whether this rank requests a stop, has failed to write a checkpoint, and requests the end of the run."""
        if self.checkpoints is None:
            return False, False, self._limits.requests_end
        return self.stop_request.why is not None, self.checkpoints.has_failed, self._limits.requests_end

    def start_vote(self) -> None:
        """Start a vote of the ranks on whether to stop."""
        if self.vote is not None:
            self.vote.open(*self.own_vote)

    def decide_vote(self, *counts: int) -> None:
        """Set the result of a vote that was part of another reduction."""
        if self.vote is not None:
            self.vote.decide(*counts)

    def is_stopping(self) -> bool:
        """Complete the vote, and return whether any rank requests a stop (collective).

        Raises:
            CheckpointError: On all ranks, if the save in progress has failed.
        """
        if self.vote is None:
            return False
        is_requested, has_failed, self.is_ending = self.vote.close()
        if has_failed and self.checkpoints is not None:
            self.checkpoints.wait()
        return is_requested

    def ends_between_epochs(self) -> bool:
        """Return whether any rank requests the end of the run (collective if ranks can request it)."""
        if self._limits.is_voted and not self.is_ending:
            self.is_ending = rank_sync.total(self._limits.requests_end) > 0
        return self.is_ending

    def save(self, reporter: Reporter, *, wait: bool = False) -> None:
        """Write a checkpoint, unless one of this position exists (collective).

        A checkpoint that callbacks keep has the weights that they have measured, which can be those of evaluations.

        Raises:
            CheckpointError: On every rank, if it, or the previous one, cannot be written.
            TrainingError: On every rank, if the ranks keep different checkpoints.
        """
        if self.checkpoints is None:
            return
        position, callbacks = self._parts.position, self._parts.callbacks
        kept = callbacks.kept_checkpoints()
        if callbacks.keeping:
            remedy = "Return the same names on every rank: decide by figures that all ranks have."
            rank_sync.check_equal({"kept_checkpoints": tuple(sorted(kept))}, "callbacks", remedy)
        is_measured = position.name in kept and callbacks.keeps_evaluated_weights
        if self._saved[0] != position.name or is_measured > self._saved[1]:
            self._complete()
            self._parts.losses.check()  # raises if a loss is not finite: such a state must not be saved
            parallel.share_buffers(self._parts.wrapped.inner)  # any rank may write the entries that all ranks have
            self._saved = position.name, is_measured
            if position.consumed and self.inexact is not None:
                self._warn(self.inexact)
            reporter.write("checkpoint", position)
            self.checkpoints.kept = kept
            content = state.collect(self._parts, self._evaluating if is_measured else None)
            self.checkpoints.save(position.name, position.step, content, wait=wait)
            self._unreported = self.checkpoints.directory / position.name
        if wait:
            self._complete()

    def _warn(self, why: str) -> None:
        self.inexact = None
        if self._parts.world.rank == 0:
            warnings.warn(
                f"a run that resumes from a checkpoint within an epoch may take other samples or random numbers: {why}"
                f", or save between epochs only (save_every=None).",
                stacklevel=2,
            )

    def _complete(self) -> None:
        """Wait for the save in progress, if any, and report its checkpoint."""
        assert self.checkpoints is not None
        self.checkpoints.wait()
        if self._unreported is not None:
            path, self._unreported = self._unreported, None
            self._on_checkpoint(path)

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

    def report_early_end(self, reporter: Reporter) -> None:
        """Report why the run ends before its last epoch, if ranks have requested it (collective)."""
        position = self._parts.position
        if self.is_ending:
            why = rank_sync.reasons(self._limits.why)
            reporter.write("ended", position, why=why)
            reporter.print(f"{why}: ended at step {position.step}")


@contextlib.contextmanager
def opened(
    directory: str | os.PathLike[str] | None,
    keep: int,
    stop_margin: float | None,
    parts: Parts,
    stop_request: StopRequest,
    limits: RunLimits,
    on_checkpoint: Callable[[Path], None],
    evaluating: Callable[[], contextlib.AbstractContextManager[object]],
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
        limits: The limits of the run, and this rank's request to end it.
        on_checkpoint: Called with each complete checkpoint.
        evaluating: Returns the context of the callbacks for an evaluation.
        recovers: Whether training continues after a rank has failed. The vote then uses the process group, whose
            operations raise an error that names the rank.
    """
    world, checkpoints = parts.world, None
    with contextlib.ExitStack() as stack:
        if directory is not None:
            checkpoints = stack.enter_context(checkpoint.opened(directory, keep, world.device))
            stack.enter_context(stop_request.handling_signals(stop_margin, polls_scheduler=world.rank == 0))
        run = ResumableRun(parts, checkpoints, stop_request, limits, on_checkpoint, evaluating)
        if checkpoints is not None or limits.is_voted:
            run.vote = stack.enter_context(StopVote(None if recovers else world.comm))
        yield run
