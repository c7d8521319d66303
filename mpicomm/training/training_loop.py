"""The loops of one call of `Trainer.fit`: over the epochs, and over the steps of an epoch.

They evaluate, log, save and stop between the steps. The training step, the evaluation, checkpoints and stops, the data
and reports are in other modules.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch.distributed as dist

from mpicomm.training import (
    evaluation,
    optimizers,
    parallel,
    randomness,
    rank_sync,
    reporting,
    resumable_run,
    step_profile,
)
from mpicomm.training.assembly import Assembly
from mpicomm.training.callbacks import Callback
from mpicomm.training.data import DataSource, Step
from mpicomm.training.recovering_calls import RecoveringCalls
from mpicomm.training.reporting import Reporter
from mpicomm.training.resumable_run import FitCall, LoopOptions, ResumableRun
from mpicomm.training.state import Position, evaluation_metrics
from mpicomm.training.step_metrics import LOSS
from mpicomm.training.step_profile import StepProfiler


@dataclasses.dataclass
class TrainingLoop:
    """The loops of a call of `fit` in one world; it holds the wrapped model of this world."""

    fit_call: FitCall
    options: LoopOptions
    parts: Assembly
    train: DataSource
    test: DataSource | None
    run: ResumableRun
    reporter: Reporter
    profiler: StepProfiler | None
    calls: RecoveringCalls | None
    """If training continues after ranks have failed."""

    continues: bool
    """Whether the run continues from the state in memory, in another world or another call of `fit`."""

    def __post_init__(self) -> None:
        self._limits, self._requests, self._call = self.fit_call.limits, self.fit_call.requests, self.fit_call.call
        self._last_step = Step([])

    @property
    def position(self) -> Position:
        """The position in the run."""
        return self.parts.position

    # -- the loop over the epochs ------------------------------------------------------------------------------------

    def run_all_epochs(self) -> None:
        """Train and evaluate until the end of the run (collective)."""
        # 1. report the start
        self._begin()
        self._call(Callback.on_fit_start)
        # 2. complete the evaluation that the interrupted run had not completed
        if self.test is not None and not self.position.is_evaluated:
            self._evaluate_epoch()
            self._complete_epoch()
        # 3. train and evaluate by turns
        while not self._limits.is_complete(self.position) and not self.run.vote_between_epochs():
            if not self._train_epoch():
                break
            self._end_epoch()
            if self.test is not None:
                self._evaluate_epoch()
            self._complete_epoch()
        # 4. save and report the complete run
        self.run.report_early_end(self.reporter)
        self.run.save(self.reporter, wait=True)
        if self.calls is not None:
            self.calls.refresh_replicas()
        self.reporter.end(self.position)
        self._call(Callback.on_fit_end)
        dist.barrier()  # so that no rank prints anything before the summary table

    def _begin(self) -> None:
        """Report where the run starts; after a recovery, save the checkpoint that the failure may have prevented."""
        position, recovery = self.position, None if self.calls is None else self.calls.recovery
        if recovery is None or not self.continues:
            is_complete = self._limits.is_complete(position) and position.is_evaluated
            self.reporter.begin(position, self.options.loader, is_complete=is_complete)
        if recovery is not None:
            self.reporter.begin_after(recovery)
            if self._is_save_due():
                self.run.save(self.reporter)

    def _end_epoch(self) -> None:
        """End the training of an epoch, which is complete without an evaluation if the run has none."""
        self._log()
        parallel.share_buffers(self.parts.wrapped.inner)
        self._step_scheduler("epoch")
        self.position.end_epoch(is_evaluated=self.test is None)
        self.reporter.epoch(self.position)

    def _evaluate_epoch(self) -> None:
        """Evaluate after an epoch; its last step may have been evaluated already, which counts once."""
        position, names = self.position, evaluation_metrics(dict.fromkeys(("loss", *self.fit_call.metrics), 0.0), 0)
        is_new = position.evaluated_step != position.step or position.evaluated_metrics.keys() != names.keys()
        metrics = self._evaluate() if is_new else position.evaluated_metrics
        position.add_evaluation(metrics)
        self.reporter.evaluation(position)
        if is_new:
            self._call(Callback.on_eval_end, metrics)

    def _complete_epoch(self) -> None:
        """Step ReduceLROnPlateau and save, after the metrics of the last epoch are complete."""
        if self.options.schedule == optimizers.ON_METRIC:
            self.parts.scheduler.step(self.position.history[-1][self.fit_call.monitored])
        self._call(Callback.on_epoch_end)
        if self._requests.is_save_requested or self.options.save_every is None:
            self._save()

    # -- the loop over the steps of an epoch -------------------------------------------------------------------------

    def _train_epoch(self) -> bool:
        """Train the rest of an epoch; return whether it is complete, or the run ends within it."""
        self.parts.wrapped.model.train()
        position, limits, train = self.position, self._limits, self.train
        if not position.steps_of_epoch:
            self._call(Callback.on_epoch_start)
        self._seed("epoch", position.epoch)
        steps = train.steps(position.epoch, position.consumed, position.steps_of_epoch)
        position.data = rank_sync.begin_epoch(train, position.data if position.steps_of_epoch else ())
        self._evaluate_if_due()  # the evaluation that the interrupted run had not completed
        timer, device = self.reporter.timer, self.parts.world.device
        aligned = rank_sync.aligned_steps(
            train, steps, lambda _: rank_sync.padding(train, self._last_step, device), timer
        )
        remaining = limits.remaining(aligned, position)
        while True:
            timer.start()
            self._seed("step", position.step)
            step = next(remaining, None)
            timer.add("data")
            if step is None:
                return True
            self._take_step(step, step.total)
            self._after_step()
            if limits.has_all_steps(position) or self.run.is_ending:
                is_complete = limits.is_epoch_complete(position, train.total())
                # The length of an iterable-style dataset can be an estimate.
                return is_complete and (train.is_counted or next(remaining, None) is None)

    def _take_step(self, step: Step, count: int) -> None:
        """Run one optimizer step on the mean loss of `count` samples of all ranks (collective)."""
        # 1. accumulate the gradients
        timer = self.reporter.timer
        is_finite = self.parts.step.accumulate(step, count, timer)
        # 2. start the vote of the ranks, then update the parameters or skip the step on all ranks
        metrics, recovers = self.parts.metrics, self.parts.options.recovers
        if recovers:
            # If a rank fails, the others must have completed the step, and can then send its state, or must not have
            # begun to change theirs. All that differs between ranks is therefore shared before the update.
            parallel.share_buffers(self.parts.wrapped.inner)
        self.run.start_vote(is_finite=is_finite, numbers=metrics.take() if recovers else ())
        is_taken = not self.parts.options.skips or not self.run.votes()[0].nonfinite
        samples = {} if is_taken else rank_sync.gather_nonfinite_samples(step, is_finite)
        # After the other operations: a failure of a rank in one of them repeats the step, which must count once.
        losses = metrics.add_reduced(self.run.votes()[1]) if recovers else (0.0, 0)
        if is_taken:
            self._last_step = step
            if self.parts.step.update():
                self._step_scheduler("step")
        else:
            self.parts.step.discard()
            self.reporter.write("skipped", self.position, rank_samples=samples)
        timer.add("compute")
        # 3. count the step
        position = self.position
        position.advance(count, losses)
        self.reporter.step(position, count)
        self._call(Callback.on_step_end)

    def _after_step(self) -> None:
        self._count_step()
        is_stopping = self.run.complete_vote()
        step, options = self.position.step, self.options
        if step % options.log_every == 0:
            self._log()
        if options.check_every is not None and step % options.check_every == 0:
            rank_sync.check_parameters(self.parts.wrapped, step)
        self._evaluate_if_due()
        if self._requests.is_save_requested or options.is_step_saved(step):
            self._save()
        if self.calls is not None:
            self.calls.refresh_replicas(only_if_due=True)
        if is_stopping:
            self.run.stop(self.reporter)
        if self.profiler is not None:
            self.profiler.count(step)

    # -- evaluations -------------------------------------------------------------------------------------------------

    def _evaluate_if_due(self) -> None:
        """Evaluate within the epoch, if `eval_every` steps are complete."""
        if self._limits.is_evaluation_due(self.position):
            # As a checkpoint does, so that a resumed run evaluates the same model.
            parallel.share_buffers(self.parts.wrapped.inner)
            metrics = self._evaluate()
            self.position.evaluated_step, self.position.evaluated_metrics = self.position.step, metrics
            self.reporter.step_evaluation(self.position, metrics)
            self._call(Callback.on_eval_end, metrics)

    def _evaluate(self) -> dict[str, float]:
        """Evaluate, and return the metrics; a stop request saves and raises `Preempted` (collective)."""
        assert self.test is not None  # `RunLimits` refuses `eval_every` without it
        around = (self.reporter.excluded(), randomness.preserved(self.parts.world.device), self.fit_call.evaluating())
        with around[0], around[1], around[2]:
            self._seed("evaluation", self.position.step)
            outcome = evaluation.evaluate(
                self.parts.step, self.test, self.fit_call.metrics, self._count_step_and_vote, self._limits.limit_batches
            )
        if outcome is None:
            self.run.stop(self.reporter)
        return evaluation_metrics(*outcome)

    def _count_step_and_vote(self) -> bool:
        """Count a step of an evaluation, and return whether any rank requests a stop (collective)."""
        self._count_step()
        if not self.run.can_stop:
            return False
        self.run.start_vote()
        return self.run.complete_vote()

    # -- parts of the loops ------------------------------------------------------------------------------------------

    def _seed(self, point: str, number: int) -> None:
        """Seed the generators for a point of the run, if this point may be repeated, or run by a spare."""
        if self.calls is not None:
            self.calls.seed_at(point, number)

    def _count_step(self) -> None:
        """Note that this rank has completed a step of training or of an evaluation."""
        if self.calls is not None:
            self.calls.count_step()
            self.reporter.end_recovery(self.position)

    def _step_scheduler(self, when: str) -> None:
        if self.parts.scheduler is not None and self.options.schedule == when:
            self.parts.scheduler.step()

    def _log(self) -> None:
        metrics = self.parts.metrics
        if self.calls is None:
            self.position.add_losses(*metrics.add_reduced(rank_sync.sum_over_ranks(metrics.take())))
        means = metrics.take_means()
        self.reporter.log(self.position, means.pop(LOSS, None), self.parts.optimizer, means)

    def _save(self) -> None:
        self._requests.is_save_requested = False
        self.run.save(self.reporter)

    def _is_save_due(self) -> bool:
        """Return whether a checkpoint of this position would have been saved without the failure."""
        position = self.position
        if position.name in self.parts.callbacks.kept_checkpoints():
            return True
        if self.options.save_every is None:
            return position.epoch > 0 and not position.consumed and position.is_evaluated
        return position.step > 0 and self.options.is_step_saved(position.step)


@contextlib.contextmanager
def opened(
    fit_call: FitCall,
    options: LoopOptions,
    parts: Assembly,
    train: DataSource,
    test: DataSource | None,
    calls: RecoveringCalls | None,
) -> Iterator[TrainingLoop]:
    """Open the checkpoints, the reporter and the profiler of a run, and resume it or seed a new one (collective)."""
    world, position = parts.world, parts.position
    fit_call.requests.is_save_requested = False
    fit_call.call(Callback.on_setup)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(resumable_run.opened(fit_call, options, parts, train))
        continues = calls is not None and calls.has_begun
        if continues:
            run.continue_from_memory()
        elif not run.restore():
            if calls is not None:
                calls.check_state()
            if not position.step:
                randomness.seed_all(options.loader.seed, world.rank)
        if calls is not None:
            calls.begin()
            calls.refresh_replicas()
        reporter = stack.enter_context(
            reporting.opened(world, run.directory, options.report, fit_call.limits.epochs, train.total(), position.step)
        )
        profiler = stack.enter_context(step_profile.opened(options.profile, run.directory, world, position.step))
        yield TrainingLoop(fit_call, options, parts, train, test, run, reporter, profiler, calls, continues)
