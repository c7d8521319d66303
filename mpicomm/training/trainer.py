"""The trainer: plain loops. Data, checkpoints, leaving in time and what people see have rooms of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpicomm import arguments, runtime
from mpicomm.arguments import FLAG, PATH, POSITIVE, TEXT
from mpicomm.errors import MpicommError
from mpicomm.training import (
    batches,
    checkpoint,
    model_file,
    optimizers,
    parallel,
    randomness,
    rank_sync,
    reporting,
    state,
)
from mpicomm.training.batches import LossFunction
from mpicomm.training.checkpoint import Checkpoints
from mpicomm.training.data import Batch, DataRank, DataSource, LoaderOptions, Step, make_source
from mpicomm.training.metrics import Averages, Losses, Metric, check_metrics
from mpicomm.training.precision import Precision
from mpicomm.training.preemption import Preempted, StopRequest
from mpicomm.training.rank_sync import StopVote
from mpicomm.training.state import History, Position

_NOTHING = Step([])
_SYNCHRONIZED = contextlib.nullcontext()
_EXPECTED = {
    "weights": PATH.or_none(),
    "target_key": TEXT,
    "batch_size": POSITIVE,
    "grad_accum_steps": POSITIVE,
    "max_grad_norm": arguments.number("a positive number", lambda value: value > 0).or_none(),
    "sync_batchnorm": FLAG,
    "find_unused_parameters": FLAG,
    "compile_model": FLAG,
    "deterministic": FLAG,
    "checkpoint_dir": PATH.or_none(),
    "save_every": POSITIVE.or_none(),
    "keep_checkpoints": POSITIVE,
    "log_every": POSITIVE,
    "seed": arguments.integer(),
    "num_workers": arguments.integer(0),
    "on_nonfinite": arguments.one_of("stop", "skip"),
    "check_every": POSITIVE.or_none(),
    "stop_margin": arguments.number("seconds from 0", lambda value: value >= 0).or_none(),
}
"""The arguments of `Trainer` that depend on no other; the others are checked where they are used."""


class Trainer:
    """Trains a model on all ranks of the job, and loses nothing: a run that ends early goes on where it was.

    Use it on all ranks alike, after `mpicomm.bootstrap()`. Every method is collective.

        trainer = mpicomm.Trainer(model, optimizer, loss_fn, checkpoint_dir="runs/digits")
        history = trainer.fit(train_data, epochs=10, eval_data=test_data)

    With the same number of ranks on CPUs, a run that was ended at any moment and started again has the same parameters
    and figures, to the last bit, as one that never was.

    The outermost level of a batch says how the model is called, whatever is below it:

        (x, target)                loss_fn(model(x), target)
        (a, b, target)             loss_fn(model(a, b), target)
        ((a, b), target)           loss_fn(model((a, b)), target)
        {"a": a, "labels": target} loss_fn(model(a=a), target), where target_key names the target ("labels")

    Without `loss_fn` the model takes the whole batch, `model(*batch)` or `model(**batch)`, and returns its loss. Lists
    are like tuples. Tensors are moved to the device from any nesting of tuples, lists, mappings and dataclasses, and
    so are objects with a method `to`; the rest, such as strings, is passed as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction | None = None,
        *,
        weights: str | os.PathLike[str] | None = None,
        target_key: str = "labels",
        scheduler: Any = None,
        schedule: str | None = None,
        monitor: str | None = None,
        precision: str = "float32",
        batch_size: int = 32,
        grad_accum_steps: int = 1,
        max_grad_norm: float | None = None,
        strategy: str = "ddp",
        grad_compression: str | None = None,
        sync_batchnorm: bool = False,
        find_unused_parameters: bool = False,
        compile_model: bool = False,
        deterministic: bool = False,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        save_every: int | None = None,
        keep_checkpoints: int = 3,
        log_every: int = 50,
        seed: int = 0,
        num_workers: int = 0,
        on_nonfinite: str = "stop",
        check_every: int | None = None,
        stop_margin: float | None = 120.0,
        progress: str = "auto",
        logger: Callable[[dict[str, Any]], None] | str | None = None,
        rank_logs: bool = False,
    ) -> None:
        """Spread the model over the ranks (collective).

        Args:
            model: The same on all ranks; rank 0's parameters count.
            optimizer: Of the model's parameters. Its step() must not need a closure, as that of LBFGS does.
            loss_fn: From the model's outputs and the targets to the mean loss of a batch, a tensor of shape []. None if
                the model takes the whole batch and returns its loss, or an output with a `loss` or an item "loss", as
                models of Hugging Face do.
            weights: A file with a state_dict, from `export` or torch.save, to start from; a checkpoint in
                checkpoint_dir takes precedence.
            target_key: Where batches are mappings, the key of the targets; the rest are keyword arguments of the model.
            scheduler: Of the learning rate, with `step()` and a state.
            schedule: When it steps: after each "step" of the optimizer (the default), or each "epoch".
                ReduceLROnPlateau steps after each epoch, and its evaluation.
            monitor: The figure of an epoch that ReduceLROnPlateau follows: "loss", "eval_loss" or a metric. By default
                "eval_loss", or "loss" where there is no eval_data.
            precision: "float32", "bfloat16" or "float16" (with scaled gradients).
            batch_size: Samples per rank that go through the model at once; a DataLoader's own counts instead.
            grad_accum_steps: Batches per step. A step takes `batch_size` x `grad_accum_steps` x ranks samples.
            max_grad_norm: What the norm of all gradients is cut down to.
            strategy: "ddp", the whole model on each rank, or "fsdp", a part of each parameter on each (FSDP2).
            grad_compression: How DDP sends gradients: "bf16", "fp16" or "powersgd".
            sync_batchnorm: Normalize over the batches of all ranks.
            find_unused_parameters: Some parameters take no part in some steps (DDP).
            compile_model: Use torch.compile: for the whole model, or with "fsdp" for each of its repeated layers.
            deterministic: Use repeatable algorithms on GPUs too: `torch.use_deterministic_algorithms`, no choice of
                convolutions by trial, CUBLAS_WORKSPACE_CONFIG=:4096:8. Make the trainer before GPUs are used, then.
            checkpoint_dir: A directory of this run's own that all hosts share. None for no checkpoints.
            save_every: Steps between checkpoints; after each epoch if left out. The end of a run is always saved.
            keep_checkpoints: How many checkpoints to keep.
            log_every: Steps between entries of the metrics file; each takes one more all-reduce of two numbers.
            seed: Of the order of samples and of all random numbers.
            num_workers: Processes per rank that load data.
            on_nonfinite: "stop" ends the run at a loss that is not finite, with its samples; "skip" leaves such steps
                out, for one more all-reduce of a number in each step.
            check_every: Steps between comparisons of all ranks' parameters (DDP).
            stop_margin: Seconds before the end of the allocation (Slurm, PBS) at which to save and exit, or half of the
                remaining time at the start if that is less; None to ignore the end.
            progress: "bar", "lines" or "none"; "auto" is a bar on terminals, and lines elsewhere.
            logger: Called on rank 0 with each entry of the metrics file; or "tensorboard".
            rank_logs: Write what each rank prints to rank_000.log and so on, in checkpoint_dir.

        Raises:
            ValueError: If an argument is out of range, or does not fit another one.
            TypeError: If an argument is of a wrong type, or the optimizer or the scheduler cannot be used.
            CheckpointError: On every rank, if the weights cannot be read, or do not fit the model.
            MpicommError: If there is no job.
        """
        self.world = runtime.current_world()
        if not dist.is_initialized():
            raise MpicommError("there is no process group.\nCall mpicomm.bootstrap() with a back end.")
        parallel.check_arguments(strategy, grad_compression)
        optimizers.check_optimizer(model, optimizer)
        batches.check_loss_function(loss_fn)
        self._schedule = optimizers.schedule_of(scheduler, optimizer, schedule, monitor)
        reporting.check_arguments(progress, logger, rank_logs=rank_logs, checkpoint_dir=checkpoint_dir)
        given = locals()
        for name, expected in _EXPECTED.items():
            expected.check(given[name], name)
        device = self.world.device
        self.precision = Precision(precision, device, casts=strategy == "ddp")
        self.optimizer, self.scheduler, self.loss_fn = optimizer, scheduler, loss_fn
        self.position = Position()
        self._monitor, self._target_key, self._max_grad_norm = monitor, target_key, max_grad_norm
        self._options = LoaderOptions(batch_size, grad_accum_steps, num_workers, device.type == "cuda", seed)
        self._place = DataRank(self.world.rank, self.world.size)
        self._checkpoint_dir, self._save_every, self._keep_checkpoints = checkpoint_dir, save_every, keep_checkpoints
        self._skips, self._check_every, self._stop_margin = on_nonfinite == "skip", check_every, stop_margin
        self._log_every, self._progress, self._logger, self._rank_logs = log_every, progress, logger, rank_logs
        if deterministic:
            randomness.make_repeatable()
        if weights is not None:
            model_file.load(model, weights)
        self.wrapped = parallel.wrap(
            model,
            optimizer,
            device,
            strategy=strategy,
            grad_compression=grad_compression,
            low=self.precision.dtype,
            sync_batchnorm=sync_batchnorm,
            find_unused_parameters=find_unused_parameters,
            is_compiled=compile_model,
        )
        self._losses = Losses(device, stops=not self._skips)
        self._stop_request = StopRequest()
        self._checkpoints: Checkpoints | None = None
        self._reporter = reporting.silent(self.world)
        self._saved: str | None = None
        self._is_warm = self._is_checked = False
        self._monitored = "loss"
        self._last_step = _NOTHING
        self._stop_vote: StopVote

    # -- the loops ---------------------------------------------------------------------------------------------------

    def fit(
        self,
        train_data: Any,
        epochs: int,
        eval_data: Any = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> History:
        """Train, from where the run in `checkpoint_dir` has come to, or from the start (collective).

        Args:
            train_data: A dataset, which the ranks share: each sample is taken once in an epoch, in an order that
                depends on the seed alone. Or a DataLoader, with the same sharing if its sampler is torch's own, and
                taken as it is otherwise. Or a dataset without indices, read by every rank. Its batches have any
                structure that `Trainer` describes.
            epochs: How often to go through the data, in all.
            eval_data: The same; gone through after each epoch.
            metrics: By name, functions of a batch's outputs and targets that return a number for each sample, or their
                mean. Without `loss_fn`, their second argument is the whole batch.

        Returns:
            For each epoch its figures: `epoch`, `step`, `loss`, `samples`, and of the evaluation `eval_loss`,
            `eval_samples` and the metrics. Means are over all samples of all ranks.

        Raises:
            Preempted: A SystemExit with status 85: a signal (SIGTERM, SIGUSR1, SIGUSR2) came to some rank, or the time
                is up. There is a checkpoint.
            CheckpointError: If checkpoints cannot be written or read, or belong to another model.
            TrainingError: If a loss is not finite, or the ranks' parameters differ.
        """
        POSITIVE.check(epochs, "epochs", "fit")
        check_metrics(metrics, "fit")
        if self._schedule == optimizers.ON_METRIC:
            self._monitored = optimizers.monitored(self._monitor, metrics or {}, is_evaluated=eval_data is not None)
        with contextlib.ExitStack() as stack:
            train = _opened(stack, make_source(train_data, self._options, self._place))
            test = (
                _opened(stack, make_source(eval_data, self._for_evaluation, self._place))
                if eval_data is not None
                else None
            )
            self._open(stack, train, epochs)
            while True:
                if test is not None and not self.position.is_evaluated:
                    self._evaluate_epoch(test, metrics or {})
                    self._complete_epoch()
                if self.position.epoch >= epochs:
                    break
                self._train_epoch(train)
                self._end_epoch(is_evaluated=test is None)
            self._save(wait=True)
            self._reporter.end(self.position)
            dist.barrier()  # what is printed after this comes after the table
        return self.position.history

    def evaluate(self, data: Any, metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
        """Return the mean loss and metrics over all samples, each counted once, and their number (collective).

        Args:
            data: As in `fit`.
            metrics: As in `fit`.
        """
        check_metrics(metrics, "evaluate")
        with contextlib.ExitStack() as stack:
            test = _opened(stack, make_source(data, self._for_evaluation, self._place))
            means, count = self._evaluate(test, metrics or {})
        return {**means, "samples": count}

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the model's state_dict to a file for use without the Trainer (collective).

        It has the whole parameters on the CPU, by the names of the model itself, for
        `model.load_state_dict(torch.load(path, weights_only=True))` in one process, or `Trainer(..., weights=path)`.

        Args:
            path: The file, which rank 0 writes. An existing one is replaced, once the new one is complete.

        Raises:
            CheckpointError: On every rank, if it cannot be written.
        """
        model_file.export(self.wrapped.inner, path)

    def _train_epoch(self, train: DataSource) -> None:
        self.wrapped.model.train()
        clock = self._reporter.clock
        position = self.position
        steps = train.steps(position.epoch, position.consumed, position.steps_of_epoch)
        while True:
            clock.start()
            step = next(steps, _NOTHING)
            clock.add("data")
            count = step.total
            if count is None:
                count = 0 if train.is_counted else rank_sync.total(step.count)
                clock.add("communication")
            if not count:
                return
            if not train.is_counted:
                step = (step if step.batches else self._stand_in(train)).of_length(rank_sync.most(len(step.batches)))
            self._warm_up(step.batches[0])
            self._take_step(step, count)
            position.advance(count)
            self._reporter.step(position, count)
            self._after_step()

    def _take_step(self, step: Step, count: int) -> None:
        """Take one step of the optimizer, by the mean loss of `count` samples of all ranks."""
        clock = self._reporter.clock
        is_finite = True
        self.wrapped.begin_step()
        buffers = [buffer.clone() for buffer in self.wrapped.inner.buffers()] if self._skips else []
        for number, batch in enumerate(step.batches, start=1):
            is_last = number == len(step.batches)
            with _SYNCHRONIZED if is_last else self.wrapped.unsynchronized():
                loss = self._loss_of(batch, self.wrapped.model)
                is_finite = self._losses.add(self.position.step, batch, loss) and is_finite
                # The gradients of all ranks are averaged, whatever their share of the samples.
                weight = batch.count * self._place.size / count
                self.precision.backward(loss if weight == 1 else loss * weight)
            clock.add_backward(is_synchronized=is_last)
        if not self._last_step.batches:  # the first step
            self.wrapped.check_backward()
        self._open_ballot()
        if not self._skips or rank_sync.everybody(is_finite):
            self._last_step = step
            self._update()
        else:
            self._put_back(buffers)
            self._reporter.note("skipped", self.position, rank_samples=rank_sync.samples(step, is_finite))
        self.optimizer.zero_grad(set_to_none=True)
        clock.add("compute")

    def _update(self) -> None:
        is_taken = self.precision.step(self.optimizer, self.wrapped.model, self._max_grad_norm)
        if is_taken and self.scheduler is not None and self._schedule == "step":
            self.scheduler.step()

    def _loss_of(self, batch: Batch, model: nn.Module) -> torch.Tensor:
        return self._forward(batch, model)[0]

    def _forward(self, batch: Batch, model: nn.Module) -> tuple[torch.Tensor, Any, Any]:
        """Return the mean loss of a batch, the model's outputs and the targets."""
        call = batches.call_of(batches.moved(batch.content, self.world.device), self._expected_key)
        if not self._is_checked:
            batches.check_call(self.wrapped.inner, call)
            self._is_checked = True
        with self.precision.arithmetic():
            outputs = model(*call.args, **call.kwargs)
            loss = batches.loss_in(outputs) if self.loss_fn is None else self.loss_fn(outputs, call.targets)
        return batches.check_loss(loss, is_of_model=self.loss_fn is None), outputs, call.targets

    @property
    def _expected_key(self) -> str | None:
        return None if self.loss_fn is None else self._target_key

    def _after_step(self) -> None:
        is_leaving = self._is_time_to_leave()
        position = self.position
        if position.step % self._log_every == 0:
            self._log()
        if self._check_every is not None and position.step % self._check_every == 0:
            rank_sync.check_parameters(self.wrapped, position.step)
        if self._save_every is not None and position.step % self._save_every == 0:
            self._save()
        if is_leaving:
            self._leave()

    def _end_epoch(self, *, is_evaluated: bool) -> None:
        self._log()
        parallel.share_buffers(self.wrapped.inner)
        if self.scheduler is not None and self._schedule == "epoch":
            self.scheduler.step()
        self.position.end_epoch(is_evaluated=is_evaluated)
        self._reporter.epoch(self.position)
        if is_evaluated:
            self._complete_epoch()

    def _complete_epoch(self) -> None:
        """Do what needs all figures of the last epoch."""
        if self._schedule == optimizers.ON_METRIC:
            self.scheduler.step(self.position.history[-1][self._monitored])
        if self._save_every is None:
            self._save()

    def _evaluate_epoch(self, test: DataSource, metrics: Mapping[str, Metric]) -> None:
        states = randomness.states(self.world.device)
        with self._reporter.aside():
            means, count = self._evaluate(test, metrics, lambda: randomness.restore(states, self.world.device))
        randomness.restore(states, self.world.device)
        self.position.add_evaluation(
            {f"eval_{name}" if name == "loss" else name: v for name, v in means.items()}, count
        )
        self._reporter.evaluation(self.position)

    @torch.no_grad()
    def _evaluate(
        self, test: DataSource, metrics: Mapping[str, Metric], before_leaving: Callable[[], None] | None = None
    ) -> tuple[dict[str, float], int]:
        averages = Averages(metrics, self.world.device)
        with self.wrapped.evaluating() as model:
            for step in self._steps_of_evaluation(test):
                for batch in step.batches:
                    loss, outputs, targets = self._forward(batch, model)
                    if batch.count:
                        averages.add(loss, outputs, targets, batch.count)
                if before_leaving is not None:
                    self._open_ballot()
                    if self._is_time_to_leave():
                        before_leaving()
                        self._leave()
        return averages.take()

    def _steps_of_evaluation(self, test: DataSource) -> Iterator[Step]:
        """Return equally many steps of equally many batches on all ranks (collective)."""
        steps = test.steps(0, 0, 0)
        last = _NOTHING
        while True:
            step = next(steps, _NOTHING)
            if not (step.total if test.is_counted else rank_sync.total(step.count)):
                return
            if not test.is_counted:
                number = rank_sync.most(len(step.batches))
                step = (step if step.batches else last.stand_in()).of_length(number)
                self._check_has_data(step)
            last = step
            yield step

    # -- between two steps -------------------------------------------------------------------------------------------

    def _open_ballot(self) -> None:
        if self._checkpoints is not None:  # without, nobody leaves before the end
            self._stop_vote.open(self._stop_request.why is not None, self._checkpoints.has_failed)

    def _is_time_to_leave(self) -> bool:
        """Tell whether a rank wishes to leave.

        Raises:
            CheckpointError: On all ranks, if a checkpoint could not be written.
        """
        if self._checkpoints is None:
            return False
        stop_request, has_failed = self._stop_vote.close()
        if has_failed:
            self._checkpoints.wait()
        return stop_request

    def _leave(self) -> None:
        why = rank_sync.reasons(self._stop_request.why)
        self._save(wait=True)
        self._reporter.note("preempted", self.position, why=why)
        self._reporter.say(f"{why}: leaving at step {self.position.step} with a checkpoint; start again to go on")
        raise Preempted(why)

    def _stand_in(self, train: DataSource) -> Step:
        """Return what this rank goes through a step with that others have samples for, and it has none.

        Raises:
            ValueError: If it never has any.
        """
        if self._last_step.batches:
            return self._last_step.stand_in()
        states = randomness.states(self.world.device)
        first = train.first()  # this process has begun in the middle of the epoch
        randomness.restore(states, self.world.device)
        if not first.batches:
            raise self._no_data()
        return first.stand_in()

    def _check_has_data(self, step: Step) -> None:
        """Refuse an evaluation that would stand still.

        Raises:
            ValueError: If the model is in parts, which all ranks call equally often, and this rank has no sample to.
        """
        if not step.batches and isinstance(self.wrapped, parallel.FSDPModel):
            raise self._no_data()

    def _no_data(self) -> ValueError:
        return ValueError(f"rank {self._place.rank} has no data, and others have.\nGive every rank some.")

    def _put_back(self, buffers: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, before in zip(self.wrapped.inner.buffers(), buffers, strict=True):
                buffer.copy_(before)

    def _warm_up(self, batch: Batch) -> None:
        """Go once through the model before the first step, and undo what that does."""
        if self._is_warm:
            return
        self._is_warm = True
        states = randomness.states(self.world.device)
        buffers = [buffer.clone() for buffer in self.wrapped.inner.buffers()]
        self.wrapped.warm_up(lambda model: self._loss_of(batch, model))
        self._put_back(buffers)
        randomness.restore(states, self.world.device)
        self._reporter.clock.start()

    def _log(self) -> None:
        total, count = self._losses.take()
        self.position.add_losses(total, count)
        self._reporter.log(self.position, total / count if count else None, self.optimizer)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _open(self, stack: contextlib.ExitStack, train: DataSource, epochs: int) -> None:
        """Get ready to train: from the newest checkpoint, or from the start."""
        if self._checkpoint_dir is not None:
            self._checkpoints = stack.enter_context(
                checkpoint.opened(self._checkpoint_dir, self._keep_checkpoints, self.world.device)
            )
            stack.callback(setattr, self, "_checkpoints", None)
            stack.enter_context(self._stop_request.listening(self._stop_margin, asks=self.world.rank == 0))
            self._stop_vote = stack.enter_context(StopVote(self.world.comm))
        if self._checkpoints is not None and self._checkpoints.newest is not None:
            state.restore(self._checkpoints, self._parts(), train)
            self._saved = self.position.name
        elif not self.position.step:
            randomness.seed_all(self._options.seed, self.world.rank)
        directory = self._checkpoints.directory if self._checkpoints is not None else None
        self._reporter = stack.enter_context(
            reporting.opened(
                self.world, directory, self._progress, self._logger, self._rank_logs, epochs, train.total()
            )
        )
        is_complete = self.position.epoch >= epochs and self.position.is_evaluated
        self._reporter.begin(self.position, self._options, is_complete=is_complete)

    def _parts(self) -> state.Parts:
        return state.Parts(
            self.wrapped, self.optimizer, self.scheduler, self.precision.scaler, self.position, self._losses, self.world
        )

    def _save(self, *, wait: bool = False) -> None:
        """Write a checkpoint, unless there is one of this very moment."""
        if self._checkpoints is None:
            return
        if self._saved != self.position.name:
            self._losses.look()  # what is not finite must not be kept
            parallel.share_buffers(self.wrapped.inner)  # any rank may write what all have
            self._saved = self.position.name
            self._reporter.note("checkpoint", self.position)
            content = state.collect(self._parts())
            self._checkpoints.save(self.position.name, self.position.step, content, wait=wait)
        elif wait:
            self._checkpoints.wait()

    @property
    def _for_evaluation(self) -> LoaderOptions:
        options = self._options
        return LoaderOptions(
            options.batch_size, 1, options.num_workers, options.pin_memory, options.seed, shuffle=False
        )


def _opened(stack: contextlib.ExitStack, opened: DataSource) -> DataSource:
    stack.callback(opened.close)
    return opened
