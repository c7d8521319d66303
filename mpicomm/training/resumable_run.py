"""A call of `fit` that can be interrupted: its checkpoints, the vote of the ranks in each step, and its limits."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from mpicomm import arguments
from mpicomm.arguments import POSITIVE
from mpicomm.collective_ops import collectives
from mpicomm.training import checkpoint, parallel, rank_sync, state
from mpicomm.training.assembly import Assembly
from mpicomm.training.callbacks import Callback
from mpicomm.training.checkpoint import Checkpoints
from mpicomm.training.data import DataSource, LoaderOptions
from mpicomm.training.evaluation import Metric
from mpicomm.training.preemption import Preempted, StopRequest, is_of_all_ranks
from mpicomm.training.reporting import Reporter, ReportOptions
from mpicomm.training.save_interval import SaveInterval
from mpicomm.training.state import Position
from mpicomm.training.step_profile import ProfileOptions

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

T = TypeVar("T")

_unfinished: list[StepVote] = []  # MPI still writes to the memory of these after an error, if fit is called again
_REPORTED_CHANGE = 1.25  # the factor by which an interval differs from the one in the last line about it
_SECONDS = arguments.number("a positive number of seconds", lambda value: value > 0).or_none()


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """Arguments of `Trainer` that concern the loops."""

    loader: LoaderOptions
    checkpoint_dir: str | os.PathLike[str] | None
    save_every: int | str | None
    node_mtbf_hours: float | None
    """The mean time between failures of a node, if `save_every` is "auto"."""

    keep_checkpoints: int
    stop_margin: float | None
    log_every: int
    check_every: int | None
    schedule: str
    report: ReportOptions
    profile: ProfileOptions

    def is_step_saved(self, step: int) -> bool:
        """Return whether `save_every` is a number of steps of which this step is a multiple."""
        return self.save_every is not None and not isinstance(self.save_every, str) and step % self.save_every == 0


@dataclasses.dataclass(frozen=True)
class FitCall:
    """A call of `fit`. If ranks fail, its loops are opened again in the next world, with the same object."""

    limits: RunLimits
    requests: RunRequests
    stop_request: StopRequest
    metrics: Mapping[str, Metric]
    monitored: str
    """The metric that ReduceLROnPlateau monitors."""

    call: Callable[..., None]
    """Calls a hook of the callbacks, a method of `Callback`, with the trainer and further arguments."""

    evaluating: Callable[[], contextlib.AbstractContextManager[None]]
    """Returns the context of the callbacks for an evaluation."""


class Votes(NamedTuple):
    """The votes of a rank, each True or False; as the result of a vote, the number of ranks with True."""

    stop: float = 0
    """It requests a stop."""

    failed_save: float = 0
    """It has failed to write a checkpoint."""

    end: float = 0
    """It requests the end of the run."""

    nonfinite: float = 0
    """Its loss is not finite."""

    save: float = 0
    """It requests a checkpoint, because the interval of `save_every="auto"` has passed."""


class StepVote:
    """The sum of the votes of all ranks in a step (collective).

    With MPI it is a non-blocking all-reduce on a private communicator, which overlaps with the optimizer step: an
    asynchronous operation of the process group would wake the worker thread, which takes longer than the operation.
    Where training continues after failures, it is a blocking operation of the process group, which raises an error that
    names the failed rank.
    """

    def __init__(self, comm: Intracomm | None, *, recovers: bool) -> None:
        """Prepare the votes.

        Args:
            comm: A communicator of all ranks, which is duplicated; None without MPI.
            recovers: Whether training continues after a rank has failed.
        """
        self._comm = None if comm is None or recovers else comm.Dup()
        self._recovers = recovers
        self._own = self._sums = np.zeros(0)
        self._pending: Any = None

    def start(self, numbers: Sequence[float]) -> None:
        """Start the sum of these numbers, of which all ranks have equally many."""
        self._own = np.array(numbers, np.float64)
        if self._recovers:
            self._sums = np.array(rank_sync.sum_over_ranks(numbers))
        elif self._comm is not None:
            self._sums = np.empty_like(self._own)
            self._pending = self._comm.Iallreduce(self._own, self._sums)
        else:
            self._pending = collectives.all_reduce(self._own, async_op=True)

    def result(self) -> list[float]:
        """Wait for the sums of all ranks."""
        pending, self._pending = self._pending, None
        if pending is not None and self._comm is not None:
            pending.Wait()
        elif pending is not None:
            self._sums = pending.wait()
        return self._sums.tolist()

    def __enter__(self) -> StepVote:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._comm is None:
            return
        if is_of_all_ranks(error):
            self.result()
            self._comm.Free()
        elif self._pending is not None:
            _unfinished.append(self)


class ResumableRun:
    """A run that saves checkpoints and stops early on request.

    Without checkpoints, only the limits and requests of this call of `fit` can end it early.
    """

    def __init__(
        self,
        fit_call: FitCall,
        parts: Assembly,
        train: DataSource,
        checkpoints: Checkpoints | None,
        vote: StepVote | None,
        interval: SaveInterval | None,
    ) -> None:
        """Prepare the run.

        Args:
            fit_call: The call of `fit`.
            parts: The objects whose state a checkpoint contains.
            train: The training data.
            checkpoints: The checkpoints of the run, if it has any.
            vote: The vote of the ranks in each step; None if they neither stop, end nor skip on request.
            interval: The interval of `save_every="auto"`, on rank 0.
        """
        self.checkpoints = checkpoints
        self.is_ending = False
        """Whether the last vote has ended the run."""

        self._fit_call, self._parts, self._train, self._vote = fit_call, parts, train, vote
        self._interval = interval
        self._reported_seconds = 0.0  # the interval in the last line about it
        self._inexact_reason = train.inexact_reason  # until it is reported
        self._saved: tuple[str | None, bool] = None, False  # the name, and whether it has the weights of evaluations
        self._unreported: Path | None = None  # the newest checkpoint, until `on_checkpoint` is called

    @property
    def directory(self) -> Path | None:
        """The directory of the checkpoints, if any."""
        return None if self.checkpoints is None else self.checkpoints.directory

    @property
    def can_stop(self) -> bool:
        """Whether a rank can stop or end the run."""
        return self.checkpoints is not None or self._fit_call.limits.is_voted

    def restore(self) -> bool:
        """Restore the newest checkpoint, and return whether there is one (collective).

        Raises:
            CheckpointError: On every rank, if the checkpoint does not fit this run.
        """
        if self.checkpoints is None or self.checkpoints.newest is None:
            return False
        state.restore(self.checkpoints, self._parts, self._train)
        self._saved = self._parts.position.name, True  # it need not be written again
        self._unreported = self.checkpoints.newest
        return True

    def continue_from_memory(self) -> None:
        """Continue from the state in memory, which is at least as new as the newest checkpoint."""
        if self.checkpoints is not None and self.checkpoints.newest is not None:
            self._saved, self._unreported = (self.checkpoints.newest.name, True), self.checkpoints.newest

    def start_vote(self, *, is_finite: bool = True, numbers: Sequence[float] = ()) -> None:
        """Start a vote of the ranks, and the sum of further numbers of all ranks."""
        if self._vote is not None:
            is_stopping, has_failed, is_save_due, requests = False, False, False, self._fit_call.requests
            if self.checkpoints is not None:
                is_stopping, has_failed = self._fit_call.stop_request.why is not None, self.checkpoints.has_failed
                # A save that waits for the previous one would delay training.
                is_save_due = self._interval is not None and self._interval.is_due and not self.checkpoints.is_saving
            requests.check_max_time()
            own = Votes(is_stopping, has_failed, requests.end_reason is not None, not is_finite, is_save_due)
            self._vote.start([*own, *numbers])

    def votes(self) -> tuple[Votes, list[float]]:
        """Wait for the vote, and return its result and the sums of the further numbers (collective)."""
        if self._vote is None:
            return Votes(), []
        sums, count = self._vote.result(), len(Votes._fields)
        return Votes(*sums[:count]), sums[count:]

    def complete_vote(self) -> bool:
        """Wait for the vote, note its requests, and return whether any rank requests a stop (collective).

        Raises:
            CheckpointError: On all ranks, if the save in progress has failed.
        """
        votes, _ = self.votes()
        self.is_ending = votes.end > 0
        if votes.save:
            self._fit_call.requests.is_save_requested = True
        if votes.failed_save and self.checkpoints is not None:
            self.checkpoints.wait()
        return votes.stop > 0

    def vote_between_epochs(self) -> bool:
        """Vote, and return whether any rank requests the end of the run (collective if ranks can request it)."""
        if self._fit_call.limits.is_voted and not self.is_ending:
            self.start_vote()
            self.is_ending = self.votes()[0].end > 0
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
            remedy = "Return the same names on every rank: decide by metrics that all ranks have."
            rank_sync.check_equal({"kept_checkpoints": tuple(sorted(kept))}, "callbacks", remedy)
        is_measured = position.name in kept and callbacks.keeps_evaluated_weights
        if self._saved[0] != position.name or is_measured > self._saved[1]:
            begun = time.monotonic()  # on_checkpoint of the previous save delays training, too
            self._complete()
            self._parts.metrics.check()  # raises if a loss is not finite: such a state must not be saved
            parallel.share_buffers(self._parts.wrapped.inner)  # any rank may write the entries that all ranks have
            self._saved = position.name, is_measured
            if position.consumed and self._inexact_reason is not None:
                self._warn(self._inexact_reason)
            reporter.write("checkpoint", position)
            content = state.collect(self._parts, self._fit_call.evaluating if is_measured else None)
            self.checkpoints.save(position.name, position.step, content, kept=kept, wait=wait)
            if self._interval is not None and not wait:  # a save that training waits for ends the run
                self._interval.choose(time.monotonic() - begun)
                self._report_interval(self._interval, reporter)
            self._unreported = self.checkpoints.directory / position.name
        if wait:
            self._complete()

    def _report_interval(self, interval: SaveInterval, reporter: Reporter) -> None:
        """Write the interval to the metrics file, and to the terminal at first and after a change that matters."""
        line, before = "", self._reported_seconds
        if not before / _REPORTED_CHANGE < interval.seconds < before * _REPORTED_CHANGE:
            self._reported_seconds = interval.seconds
            line = (
                f"a checkpoint every {interval.seconds:.3g} s: a save delays training by {interval.save_seconds:.3g} "
                f"s, the mean time between failures is {interval.mtbf_seconds / 3600:.3g} h"
            )
        reporter.write(
            "save_interval",
            self._parts.position,
            line,
            interval_s=interval.seconds,
            save_s=interval.save_seconds,
            mtbf_s=interval.mtbf_seconds,
        )

    def _warn(self, why: str) -> None:
        self._inexact_reason = None
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
            self._fit_call.call(Callback.on_checkpoint, path)

    def stop(self, reporter: Reporter) -> NoReturn:
        """Save a checkpoint, and raise `Preempted` (collective)."""
        position = self._parts.position
        why = rank_sync.gather_stop_reasons(self._fit_call.stop_request.why)
        self.save(reporter, wait=True)
        line = f"{why}: stopped at step {position.step} after saving a checkpoint; start the run again to resume"
        reporter.write("preempted", position, line, why=why)
        raise Preempted(why)

    def report_early_end(self, reporter: Reporter) -> None:
        """Report why the run ends before its last epoch, if ranks have requested it (collective)."""
        position = self._parts.position
        if self.is_ending:
            why = rank_sync.gather_stop_reasons(self._fit_call.requests.end_reason)
            reporter.write("ended", position, f"{why}: ended at step {position.step}", why=why)


@contextlib.contextmanager
def opened(fit_call: FitCall, options: LoopOptions, parts: Assembly, train: DataSource) -> Iterator[ResumableRun]:
    """Open the checkpoints of a run, and react to signals and the end of the allocation in a block (collective).

    Args:
        fit_call: The call of `fit`.
        options: The arguments of the trainer.
        parts: The objects whose state a checkpoint contains.
        train: The training data.
    """
    world, checkpoints, vote, interval = parts.world, None, None, None
    with contextlib.ExitStack() as stack:
        if options.checkpoint_dir is not None:
            directory, keep = options.checkpoint_dir, options.keep_checkpoints
            checkpoints = stack.enter_context(checkpoint.opened(directory, keep, world.device))
            handling = fit_call.stop_request.handling_signals(options.stop_margin, polls_scheduler=world.rank == 0)
            stack.enter_context(handling)
            if options.node_mtbf_hours is not None and world.rank == 0:
                interval = SaveInterval(options.node_mtbf_hours, world.num_nodes)
        skips, recovers = parts.options.skips, parts.options.recovers
        if checkpoints is not None or fit_call.limits.is_voted or skips or recovers:
            vote = stack.enter_context(StepVote(world.comm, recovers=recovers))
        yield ResumableRun(fit_call, parts, train, checkpoints, vote, interval)


# -- limits ------------------------------------------------------------------------------------------------------------


class RunRequests:
    """The requests of this rank within one call of `fit`: of its callbacks, and of max_time."""

    def __init__(self, max_time: float | None = None) -> None:
        self.end_reason: str | None = None
        """Why this rank requests the end of the run, if it does."""

        self.is_save_requested = False
        """Whether a callback has requested a checkpoint."""

        self._max_time = max_time
        self._end_at = math.inf if max_time is None else time.monotonic() + max_time

    def check_max_time(self) -> None:
        """Request the end of the run if `max_time` seconds have passed."""
        if self.end_reason is None and time.monotonic() >= self._end_at:
            self.end_reason = f"max_time of {self._max_time:g} s"


@dataclasses.dataclass(frozen=True)
class RunLimits:
    """The limits of one call of `fit`.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument is out of range, or nothing limits the run.
    """

    epochs: int | None = None
    max_steps: int | None = None
    max_time: float | None = None
    eval_every: int | None = None
    limit_batches: int | None = None
    grad_accum_steps: int = 1
    has_callbacks: bool = False
    is_evaluated: bool = True
    """Whether the run has eval_data."""

    def __post_init__(self) -> None:
        for name in ("epochs", "max_steps", "eval_every", "limit_batches"):
            POSITIVE.or_none().check(getattr(self, name), name, "fit")
        _SECONDS.check(self.max_time, "max_time", "fit")
        if self.epochs is None and self.max_steps is None and self.max_time is None:
            raise ValueError(
                "fit: expected a limit of the run, got epochs=None, max_steps=None and max_time=None.\n"
                "Pass epochs, max_steps or max_time."
            )
        if self.eval_every is not None and not self.is_evaluated:
            raise ValueError(
                f"fit: eval_every={self.eval_every} requires eval_data, got eval_data=None.\n"
                f"Pass eval_data, or omit eval_every."
            )

    @property
    def agreed(self) -> dict[str, object]:
        """The limits that must be equal on all ranks, by name."""
        names = ("epochs", "max_steps", "eval_every", "limit_batches", "grad_accum_steps")
        values = {name: getattr(self, name) for name in names}
        return {
            **values,
            "whether there is eval_data": self.is_evaluated,
            "whether there is max_time": self.max_time is not None,
            "whether there are callbacks": self.has_callbacks,
        }

    @property
    def is_voted(self) -> bool:
        """Whether the end can depend on a rank, so that the ranks have to agree on it."""
        return self.max_time is not None or self.has_callbacks

    def is_complete(self, position: Position) -> bool:
        """Return whether the run has all of its epochs or steps."""
        return position.epoch >= (math.inf if self.epochs is None else self.epochs) or self.has_all_steps(position)

    def has_all_steps(self, position: Position) -> bool:
        """Return whether the run has `max_steps` steps."""
        return self.max_steps is not None and position.step >= self.max_steps

    def is_evaluation_due(self, position: Position) -> bool:
        """Return whether an evaluation within the epoch follows this step."""
        every = self.eval_every
        return every is not None and position.step % every == 0 and position.evaluated_step < position.step

    def is_epoch_complete(self, position: Position, total: int | None) -> bool:
        """Return whether the last step has completed the epoch, as far as this is known before its data end.

        Args:
            position: The position in the run.
            total: The number of samples in an epoch, if known.
        """
        limit = self._steps
        return position.consumed == total or (limit is not None and position.steps_of_epoch >= limit)

    def remaining(self, steps: Iterator[T], position: Position) -> Iterator[T]:
        """Limit the remaining steps of an epoch to those of `limit_batches`; loads no step beyond the limit."""
        return steps if self._steps is None else itertools.islice(steps, max(0, self._steps - position.steps_of_epoch))

    @property
    def _steps(self) -> int | None:
        return None if self.limit_batches is None else -(-self.limit_batches // self.grad_accum_steps)
