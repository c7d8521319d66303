"""The trainer: the training and evaluation loops. Data, checkpoints, preemption and reporting are in other modules."""

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
    "stop_margin": arguments.number("a non-negative number of seconds", lambda value: value >= 0).or_none(),
}
"""The arguments of `Trainer` that do not depend on other arguments; the others are checked where they are used."""


class Trainer:
    """Trains a model with data parallelism on all ranks of the job, and resumes interrupted runs from checkpoints.

    Create it on all ranks with the same arguments, after `mpicomm.bootstrap()`. Every method is collective.

    Example::

        trainer = mpicomm.Trainer(model, optimizer, loss_fn, checkpoint_dir="runs/digits")
        history = trainer.fit(train_data, epochs=10, eval_data=test_data)

    On CPUs and with the same number of ranks, a run that was interrupted at any moment and started again ends with
    parameters and metrics that are bit-identical to those of an uninterrupted run.

    The outermost level of a batch determines the call of the model::

        (x, target)                loss_fn(model(x), target)
        (a, b, target)             loss_fn(model(a, b), target)
        ((a, b), target)           loss_fn(model((a, b)), target)
        {"a": a, "labels": target} loss_fn(model(a=a), target), where target_key is the key of the target ("labels")

    Without `loss_fn` the model takes the whole batch, `model(*batch)` or `model(**batch)`, and returns its loss. Lists
    are treated as tuples. The trainer moves tensors and objects with a `to` method to the device, in any nesting of
    tuples, lists, mappings and dataclasses. It passes other values, such as strings, unchanged.
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
        """Replicate or shard the model on the ranks (collective).

        Args:
            model: The model, with the same modules on all ranks. The parameters of rank 0 are broadcast.
            optimizer: An optimizer of the model's parameters. Optimizers whose step() requires a closure, such as
                LBFGS, are not supported.
            loss_fn: A function of the model's outputs and the targets that returns the mean loss of a batch, a tensor
                of shape []. None if the model takes the whole batch and returns its loss, or an output with an
                attribute `loss` or an item "loss", as models of Hugging Face do.
            weights: A file with a state_dict, from `export` or torch.save, from which to start. A checkpoint in
                checkpoint_dir takes precedence.
            target_key: The key of the targets in batches that are mappings. The other items are keyword arguments of
                the model.
            scheduler: A learning-rate scheduler with `step()`, `state_dict()` and `load_state_dict()`.
            schedule: When to step the scheduler: after each "step" of the optimizer (the default), or each "epoch".
                ReduceLROnPlateau steps after each epoch and its evaluation.
            monitor: The metric of an epoch that ReduceLROnPlateau monitors: "loss", "eval_loss" or a name in
                `metrics`. The default is "eval_loss", or "loss" without eval_data.
            precision: "float32", "bfloat16" or "float16" (with loss scaling).
            batch_size: Samples per rank in one forward and backward pass. The batch size of a DataLoader takes
                precedence.
            grad_accum_steps: Batches per optimizer step (gradient accumulation). A step takes `batch_size` x
                `grad_accum_steps` x ranks samples.
            max_grad_norm: Clip the norm of all gradients to this value.
            strategy: "ddp" replicates the model on each rank; "fsdp" shards each parameter over the ranks (FSDP2).
            grad_compression: Compression of the gradients that DDP sends: "bf16", "fp16" or "powersgd".
            sync_batchnorm: Use torch.nn.SyncBatchNorm, which normalizes over the batches of all ranks. Requires GPUs.
            find_unused_parameters: Set it if some steps do not use all parameters (DDP).
            compile_model: Use torch.compile on the whole model, or with "fsdp" on each of its repeated layers.
            deterministic: Use deterministic algorithms also on GPUs: `torch.use_deterministic_algorithms`, no
                benchmarking of convolutions, CUBLAS_WORKSPACE_CONFIG=:4096:8. Create the trainer before the program
                uses the GPU in this case.
            checkpoint_dir: A directory for this run only, on a file system that all hosts share. None disables
                checkpoints.
            save_every: Steps between checkpoints; None saves after each epoch. The end of a run is always saved.
            keep_checkpoints: The number of checkpoints to keep.
            log_every: Steps between entries of the metrics file. Each entry costs one all-reduce of two numbers.
            seed: The seed of the order of samples and of all random number generators.
            num_workers: Data-loading worker processes per rank.
            on_nonfinite: "stop" ends the run at a loss that is not finite, with an error that names its samples;
                "skip" skips such steps, at the cost of one all-reduce of one number in each step.
            check_every: Steps between comparisons of the parameters of all ranks (DDP). None disables them.
            stop_margin: Seconds before the end of the allocation (Slurm, PBS) at which to save and exit, or half of the
                remaining time at the start if that is less. None ignores the end of the allocation.
            progress: "bar", "lines" or "none"; "auto" is a bar on terminals and lines elsewhere.
            logger: A function that is called on rank 0 with each entry of the metrics file (a dict), or "tensorboard".
            rank_logs: Copy the output of each rank to rank_000.log, rank_001.log and so on in checkpoint_dir.

        Raises:
            ValueError: If an argument is out of range, or does not fit another one.
            TypeError: If an argument is of a wrong type, or the optimizer or the scheduler is not supported.
            ImportError: If logger is "tensorboard" and TensorBoard is not installed.
            CheckpointError: On every rank, if the weights cannot be read or do not fit the model.
            MpicommError: If `mpicomm.bootstrap()` has not initialized a process group.
        """
        # 1. check the arguments
        self.world = runtime.current_world()
        if not dist.is_initialized():
            raise MpicommError(
                "Trainer requires a process group, and torch.distributed is not initialized.\n"
                "Call mpicomm.bootstrap() with a backend first."
            )
        parallel.check_arguments(strategy, grad_compression)
        optimizers.check_optimizer(model, optimizer)
        batches.check_loss_function(loss_fn)
        self._schedule = optimizers.schedule_of(scheduler, optimizer, schedule, monitor)
        reporting.check_arguments(progress, logger, rank_logs=rank_logs, checkpoint_dir=checkpoint_dir)
        given = locals()
        for name, expected in _EXPECTED.items():
            expected.check(given[name], name)
        # 2. store the options
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
        # 3. load the weights, and replicate or shard the model
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
        # 4. initialize the state of the loops
        self._losses = Losses(device, stops=not self._skips)
        self._stop_request = StopRequest()
        self._checkpoints: Checkpoints | None = None
        self._reporter = reporting.silent(self.world)
        self._saved: str | None = None
        self._is_warm = self._is_checked = False
        self._monitored = "loss"
        self._last_step = _NOTHING
        self._stop_vote: StopVote

    # -- training and evaluation -------------------------------------------------------------------------------------

    def fit(
        self,
        train_data: Any,
        epochs: int,
        eval_data: Any = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> History:
        """Train, starting at the newest checkpoint in `checkpoint_dir` if there is one (collective).

        Args:
            train_data: The training data; all ranks pass the same kind. One of:

                - a map-style dataset, which the ranks share: an epoch takes each sample once, in an order that depends
                  only on the seed and the epoch;
                - an iterable-style dataset, which the ranks share and each rank reads completely;
                - a DataLoader, which the ranks share likewise if its dataset is map-style and its sampler is one of
                  torch's own; otherwise each rank uses its DataLoader unchanged.

                Batches have any structure that `Trainer` describes.
            epochs: The number of epochs of the whole run, including those before a resume.
            eval_data: Data of the same kinds, evaluated after each epoch.
            metrics: Functions by name. Each takes a batch's outputs and targets and returns one number per sample, or
                their mean. Without `loss_fn` the second argument is the whole batch.

        Returns:
            One dict per epoch: `epoch`, `step`, `loss`, `samples`, and with eval_data also `eval_loss`,
            `eval_samples` and the metrics. Means are over all samples of all ranks.

        Raises:
            Preempted: A SystemExit with status 85, on every rank: a rank received SIGTERM, SIGUSR1 or SIGUSR2, or the
                end of the allocation is near. The run has saved a checkpoint.
            CheckpointError: On every rank, if checkpoints cannot be written or read, or belong to another model.
            TrainingError: If a loss is not finite, or the parameters of the ranks differ.
            TypeError: If the data or a batch have an unsupported type or structure.
            ValueError: If epochs is not positive, a dataset is empty, or a metric has a wrong shape.
        """
        # 1. check the arguments
        POSITIVE.check(epochs, "epochs", "fit")
        check_metrics(metrics, "fit")
        if self._schedule == optimizers.ON_METRIC:
            self._monitored = optimizers.monitored(self._monitor, metrics or {}, is_evaluated=eval_data is not None)
        with contextlib.ExitStack() as stack:
            # 2. open the data and the checkpoints, and resume
            train = _opened(stack, make_source(train_data, self._options, self._place))
            test = (
                _opened(stack, make_source(eval_data, self._for_evaluation, self._place))
                if eval_data is not None
                else None
            )
            self._open(stack, train, epochs)
            # 3. train and evaluate by turns, starting with an evaluation that the interrupted run had not completed
            while True:
                if test is not None and not self.position.is_evaluated:
                    self._evaluate_epoch(test, metrics or {})
                    self._complete_epoch()
                if self.position.epoch >= epochs:
                    break
                self._train_epoch(train)
                self._end_epoch(is_evaluated=test is None)
            # 4. save and report the complete run
            self._save(wait=True)
            self._reporter.end(self.position)
            dist.barrier()  # so that no rank prints anything before the summary table
        return self.position.history

    def evaluate(self, data: Any, metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
        """Return the mean loss and metrics over all samples of all ranks, each counted once (collective).

        Args:
            data: As in `fit`.
            metrics: As in `fit`.

        Returns:
            The means by name, `loss` and the metrics, and `samples`, the number of samples.

        Raises:
            TypeError: If the data or a batch have an unsupported type or structure.
            ValueError: If a dataset is empty, or a metric has a wrong shape.
        """
        check_metrics(metrics, "evaluate")
        with contextlib.ExitStack() as stack:
            test = _opened(stack, make_source(data, self._for_evaluation, self._place))
            means, count = self._evaluate(test, metrics or {})
        return {**means, "samples": count}

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the model's state_dict to a file, for use with or without Trainer (collective).

        The file contains the full, unsharded parameters on the CPU under the names of the model itself. Load it with
        `model.load_state_dict(torch.load(path, weights_only=True))` in one process, or `Trainer(..., weights=path)`.

        Args:
            path: The file, which rank 0 writes. An existing file is replaced when the new one is complete.

        Raises:
            CheckpointError: On every rank, if rank 0 cannot write the file.
            TypeError: If path is not a path.
        """
        model_file.export(self.wrapped.inner, path)

    def _train_epoch(self, train: DataSource) -> None:
        self.wrapped.model.train()
        clock = self._reporter.clock
        position = self.position
        steps = train.steps(position.epoch, position.consumed, position.steps_of_epoch)
        while True:
            # 1. load the step, and agree on its number of samples; it is 0 when no rank has any left
            clock.start()
            step = next(steps, _NOTHING)
            clock.add("data")
            count = step.total
            if count is None:
                count = 0 if train.is_counted else rank_sync.total(step.count)
                clock.add("communication")
            if not count:
                return
            # 2. pad it to the same number of batches on all ranks
            if not train.is_counted:
                step = (step if step.batches else self._stand_in(train)).of_length(rank_sync.most(len(step.batches)))
            # 3. train
            self._warm_up(step.batches[0])
            self._take_step(step, count)
            position.advance(count)
            self._reporter.step(position, count)
            self._after_step()

    def _take_step(self, step: Step, count: int) -> None:
        """Run one optimizer step on the mean loss of `count` samples of all ranks (collective)."""
        # 1. accumulate the gradients of the batches; the last backward pass averages them over the ranks
        clock = self._reporter.clock
        is_finite = True
        self.wrapped.begin_step()
        buffers = [buffer.clone() for buffer in self.wrapped.inner.buffers()] if self._skips else []
        for number, batch in enumerate(step.batches, start=1):
            is_last = number == len(step.batches)
            with _SYNCHRONIZED if is_last else self.wrapped.unsynchronized():
                loss = self._loss_of(batch, self.wrapped.model)
                is_finite = self._losses.add(self.position.step, batch, loss) and is_finite
                # DDP and FSDP average over the ranks with equal weights, so scale by this rank's share of the samples.
                weight = batch.count * self._place.size / count
                self.precision.backward(loss if weight == 1 else loss * weight)
            clock.add_backward(is_synchronized=is_last)
        if not self._last_step.batches:  # the first step
            self.wrapped.check_backward()
        # 2. start the stop vote, then update the parameters or skip the step on all ranks
        self._open_stop_vote()
        if not self._skips or rank_sync.all_true(is_finite):
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
        """Step ReduceLROnPlateau and save, after the metrics of the last epoch are complete."""
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
                    self._open_stop_vote()
                    if self._is_time_to_leave():
                        before_leaving()
                        self._leave()
        return averages.take()

    def _steps_of_evaluation(self, test: DataSource) -> Iterator[Step]:
        """Return the same number of steps, each with the same number of batches, on all ranks (collective)."""
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

    def _open_stop_vote(self) -> None:
        if self._checkpoints is not None:  # without checkpoints a run never stops early
            self._stop_vote.open(self._stop_request.why is not None, self._checkpoints.has_failed)

    def _is_time_to_leave(self) -> bool:
        """Return whether any rank requests a stop (collective).

        Raises:
            CheckpointError: On all ranks, if the save in progress has failed.
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
        self._reporter.say(
            f"{why}: stopped at step {self.position.step} after saving a checkpoint; start the run again to resume"
        )
        raise Preempted(why)

    def _stand_in(self, train: DataSource) -> Step:
        """Return a padding step for a rank without samples in a step in which other ranks have some.

        Raises:
            ValueError: If this rank has no data at all.
        """
        if self._last_step.batches:
            return self._last_step.stand_in()
        states = randomness.states(self.world.device)
        first = train.first()  # this process resumed within the epoch and has not loaded a batch yet
        randomness.restore(states, self.world.device)
        if not first.batches:
            raise self._no_data()
        return first.stand_in()

    def _check_has_data(self, step: Step) -> None:
        """Raise an error instead of a hang in an evaluation with FSDP.

        Raises:
            ValueError: If the model is sharded and this rank has no batch. All ranks must call a sharded model the
                same number of times.
        """
        if not step.batches and isinstance(self.wrapped, parallel.FSDPModel):
            raise self._no_data()

    def _no_data(self) -> ValueError:
        return ValueError(
            f"expected data on every rank, got none on rank {self._place.rank}.\n"
            f"Pass at least one batch of data on every rank."
        )

    def _put_back(self, buffers: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, before in zip(self.wrapped.inner.buffers(), buffers, strict=True):
                buffer.copy_(before)

    def _warm_up(self, batch: Batch) -> None:
        """Run the model once before the first step, and restore its buffers and the generators (collective)."""
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
        """Prepare training from the newest checkpoint, or from the start (collective)."""
        # 1. open the checkpoints and the stop vote
        if self._checkpoint_dir is not None:
            self._checkpoints = stack.enter_context(
                checkpoint.opened(self._checkpoint_dir, self._keep_checkpoints, self.world.device)
            )
            stack.callback(setattr, self, "_checkpoints", None)
            stack.enter_context(self._stop_request.listening(self._stop_margin, asks=self.world.rank == 0))
            self._stop_vote = stack.enter_context(StopVote(self.world.comm))
        # 2. resume, or seed a new run
        if self._checkpoints is not None and self._checkpoints.newest is not None:
            state.restore(self._checkpoints, self._parts(), train)
            self._saved = self.position.name
        elif not self.position.step:
            randomness.seed_all(self._options.seed, self.world.rank)
        # 3. open the reporter
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
        """Write a checkpoint, unless one of this position exists (collective)."""
        if self._checkpoints is None:
            return
        if self._saved != self.position.name:
            self._losses.look()  # raises if a loss is not finite: such a state must not be saved
            parallel.share_buffers(self.wrapped.inner)  # any rank may write the entries that all ranks have
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
