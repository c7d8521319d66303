"""The trainer: its arguments, its properties and its collective calls. The loops of `fit` are in `training_loop`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from mpicomm import arguments, metrics_file
from mpicomm.arguments import FLAG, PATH, POSITIVE, TEXT, Expected
from mpicomm.errors import MpicommError
from mpicomm.job import session
from mpicomm.training import (
    batches,
    evaluation,
    foreign_arguments,
    model_file,
    optimizers,
    parallel,
    randomness,
    rank_sync,
    state,
    training_loop,
)
from mpicomm.training.assembly import Assembly
from mpicomm.training.callbacks import Callback, CallbackList
from mpicomm.training.data import DataRank, DataSource, LoaderOptions
from mpicomm.training.data_argument import SHARD, make_source
from mpicomm.training.loggers import LoggerArgument
from mpicomm.training.parallel import DDPModel, FSDPModel
from mpicomm.training.preemption import StopRequest
from mpicomm.training.recovering_calls import RecoveringCalls
from mpicomm.training.reporting import Reporter, ReportOptions
from mpicomm.training.resumable_run import FitCall, LoopOptions, RunLimits, RunRequests
from mpicomm.training.shard_replicas import ShardReplicas
from mpicomm.training.state import History, Position
from mpicomm.training.step_profile import ProfileOptions
from mpicomm.training.training_step import Precision, StepOptions
from mpicomm.watchdog import rank_failures

T = TypeVar("T")
ShardedData = tuple[Any, bool | None]
"""Data, and whether the ranks share them (`shard`)."""

_EXPECTED = {
    "loss_fn": batches.LOSS_FUNCTION,
    "training_step": batches.OWN_STEP,
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
    "save_every": Expected(
        "an integer, 'auto' or None",
        lambda value: value is None or value == "auto" or POSITIVE.is_kind(value),
        "a positive integer, 'auto' or None",
        lambda value: value is None or value == "auto" or POSITIVE.is_within(value),
    ),
    "node_mtbf_hours": arguments.number("a positive number of hours", lambda value: 0 < value < math.inf).or_none(),
    "keep_checkpoints": POSITIVE,
    "log_every": POSITIVE,
    "seed": arguments.integer(),
    "num_workers": arguments.integer(0),
    "on_nonfinite": arguments.one_of("stop", "skip"),
    "check_every": POSITIVE.or_none(),
    "stop_margin": arguments.number("a non-negative number of seconds", lambda value: value >= 0).or_none(),
    "on_failure": arguments.one_of("abort", "recover"),
    "replicate_shards": FLAG,
    "replicate_every": POSITIVE,
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

    @foreign_arguments.suggest_arguments("Trainer")
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: batches.LossFunction | None = None,
        *,
        training_step: batches.OwnStep | None = None,
        callbacks: Iterable[Callback] | None = None,
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
        save_every: int | str | None = None,
        node_mtbf_hours: float | None = None,
        keep_checkpoints: int = 3,
        log_every: int = 50,
        seed: int = 0,
        num_workers: int = 0,
        on_nonfinite: str = "stop",
        check_every: int | None = None,
        stop_margin: float | None = 120.0,
        progress: str = "auto",
        logger: LoggerArgument = None,
        rank_logs: bool = False,
        profile: range | None = None,
        profile_ranks: Sequence[int] = (0,),
        on_failure: str = "abort",
        replicate_shards: bool = False,
        replicate_every: int = 10,
    ) -> None:
        """Replicate or shard the model on the ranks (collective).

        Args:
            model: The model, with the same modules on all ranks. The parameters of rank 0 are broadcast.
            optimizer: An optimizer of the model's parameters. Optimizers whose step() requires a closure, such as
                LBFGS, are not supported.
            loss_fn: A function of the model's outputs and the targets that returns the mean loss of a batch, a tensor
                of shape []. None if the model takes the whole batch and returns its loss, or an output with an
                attribute `loss` or an item "loss", as models of Hugging Face do.
            training_step: A function of the wrapped model and a batch on the device, in place of the rules above. It
                calls the model and returns the mean loss of the batch, or a mapping of it ("loss") and further means
                of the batch, which step entries of the metrics file then contain. The trainer runs the backward pass
                and the optimizer. Evaluations use it too, unless there is a loss_fn; metrics then take what it returned
                and the batch.
            callbacks: Instances of `Callback`, called in this order.
            weights: A file with a state_dict, from `export` or torch.save, from which to start. A checkpoint in
                checkpoint_dir takes precedence.
            target_key: The key of the targets in batches that are mappings. The other items are keyword arguments of
                the model.
            scheduler: A learning-rate scheduler with `step()`, `state_dict()` and `load_state_dict()`.
            schedule: When to step the scheduler: after each "step" of the optimizer (the default), or each "epoch".
                ReduceLROnPlateau steps after each epoch and its evaluation.
            monitor: The metric of an epoch that ReduceLROnPlateau monitors: "loss", "eval_loss" or a name in
                `metrics`. The default is "eval_loss", or "loss" without eval_data.
            precision: "float32", "bfloat16" or "bf16", or "float16" or "fp16" (with loss scaling).
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
            save_every: Steps between checkpoints; None saves after each epoch. "auto" saves after the first step, and
                then in the interval that loses the least time to saves and failures, by Young and Daly: from the
                seconds by which the last saves delayed training, and node_mtbf_hours. The end of a run is always saved.
            node_mtbf_hours: The mean time between failures of one node in hours, for save_every="auto". That of the job
                is this divided by the number of nodes.
            keep_checkpoints: The number of checkpoints to keep.
            log_every: Steps between entries of the metrics file, `metrics.jsonl` in checkpoint_dir. Each entry costs
                one all-reduce of three numbers, and of two for each name of `log`.
            seed: The seed of the order of samples and of all random number generators.
            num_workers: Data-loading worker processes per rank.
            on_nonfinite: "stop" ends the run at a loss that is not finite, with an error that names its samples;
                "skip" skips such steps: the update of the parameters then waits for an all-reduce of five numbers.
            check_every: Steps between comparisons of the parameters of all ranks (DDP). None disables them.
            stop_margin: Seconds before the end of the allocation (Slurm, PBS, LSF, Flux) at which to save and exit, or
                half of the remaining time at the start if that is less. None ignores the end of the allocation.
                Without checkpoint_dir it has no effect.
            progress: "bar", "lines" or "none"; "auto" is a bar on terminals and lines elsewhere.
            logger: A function that is called on rank 0 with each entry of the metrics file (a dict), "tensorboard",
                "csv" (`metrics.csv` in checkpoint_dir), "wandb" (Weights & Biases), "mlflow", or a list of these.
            rank_logs: Copy the output of each rank to rank_000.log, rank_001.log and so on in checkpoint_dir.
            profile: Steps to profile with torch.profiler, such as range(10, 13) for the steps 10, 11 and 12 of the run.
                A trace for Perfetto (ui.perfetto.dev) is written to the folder `profile` in checkpoint_dir.
            profile_ranks: The ranks that profile these steps, each into a file of its own.
            on_failure: "abort" ends the job when a rank fails. "recover" continues from the newest complete step, on
                the remaining ranks and the spares of the job; it requires `mpicomm.bootstrap(on_failure="recover")`.
                With "fsdp" it continues from the copies of `replicate_shards`, or from the newest checkpoint.
            replicate_shards: With "fsdp" and on_failure="recover", keep a copy of each rank's shard on that rank and on
                the next one. Each rank needs host memory for two copies of its parameters and its optimizer state, and
                for four during a refresh.
            replicate_every: Steps between refreshes of these copies.

        Raises:
            ValueError: If an argument is out of range, or does not fit another one.
            TypeError: If an argument is of a wrong type, or the optimizer or the scheduler is not supported.
            ImportError: If the package of a logger is not installed.
            CheckpointError: On every rank, if the weights cannot be read or do not fit the model.
            MpicommError: If `mpicomm.bootstrap()` has not initialized a process group, or on_failure is "recover" and
                `bootstrap` was called without it.
        """
        passed = locals()  # first of all, while the arguments are the only local variables
        # 1. check the arguments
        world = session.current_world()
        if not dist.is_initialized():
            raise MpicommError(
                "Trainer requires a process group, and torch.distributed is not initialized.\n"
                "Call mpicomm.bootstrap() with a backend first."
            )
        parallelism = parallel.ParallelOptions(
            strategy, grad_compression, sync_batchnorm, find_unused_parameters, compile_model
        )
        optimizers.check_optimizer(model, optimizer)
        schedule = optimizers.schedule_of(scheduler, optimizer, schedule, monitor)
        self._callbacks = CallbackList(callbacks)
        report_options = ReportOptions(progress, logger, rank_logs, checkpoint_dir)
        profile_options = ProfileOptions(profile, profile_ranks, checkpoint_dir)
        for name, expected in _EXPECTED.items():
            expected.check(passed[name], name)
        if on_failure == "recover" and rank_failures.current() is None:
            raise MpicommError(
                'Trainer(on_failure="recover") requires a job that continues after a failure.\n'
                'Call mpicomm.bootstrap(on_failure="recover"), and start the job with mpicomm run --fault-tolerant.'
            )
        if replicate_shards and (strategy, on_failure) != ("fsdp", "recover"):
            raise ValueError(
                f"replicate_shards=True requires strategy='fsdp' and on_failure='recover', got strategy={strategy!r} "
                f"and on_failure={on_failure!r}.\n"
                f"Omit replicate_shards: with 'ddp' every rank has the whole model."
            )
        _check_interval(save_every, node_mtbf_hours)
        # 2. store the options of the loops
        skips, recovers = on_nonfinite == "skip", on_failure == "recover"
        loader = LoaderOptions(batch_size, grad_accum_steps, num_workers, world.device.type != "cpu", seed)
        self._options = LoopOptions(
            loader=loader,
            checkpoint_dir=checkpoint_dir,
            save_every=save_every,
            node_mtbf_hours=node_mtbf_hours,
            keep_checkpoints=keep_checkpoints,
            stop_margin=stop_margin,
            log_every=log_every,
            check_every=check_every,
            schedule=schedule,
            report=report_options,
            profile=profile_options,
        )
        self._monitor = monitor
        self.metric_names: tuple[str, ...] = ()
        """The names of the metrics of the epochs and evaluations of the present or last call of `fit`."""

        self._requests = RunRequests()  # of the present or last call of `fit`, like the reporter
        self._reporter: Reporter
        self._stop_request = StopRequest()
        # 3. load the weights, and replicate or shard the model
        if deterministic:
            randomness.make_repeatable()
        if weights is not None and recovers:
            model_file.load(model, weights, lambda failure: [failure])  # a spare loads them alone
        elif weights is not None:
            model_file.load(model, weights)
        step_options = StepOptions(target_key, max_grad_norm, precision, skips, recovers, training_step)
        self._parts = Assembly(model, optimizer, scheduler, loss_fn, parallelism, step_options, self._callbacks)
        replicas = ShardReplicas(replicate_every) if replicate_shards else None
        self._recovering_calls = RecoveringCalls(self._parts, replicas, seed) if recovers else None
        if self._recovering_calls is None:
            self._parts.assemble(world)
        else:
            self._recovering_calls.enter_world()

    @property
    def world(self) -> session.World:
        """The world in which the trainer runs; another one after each recovery."""
        return self._parts.world

    @property
    def wrapped(self) -> DDPModel | FSDPModel:
        """The model as DDP or FSDP wraps it."""
        return self._parts.wrapped

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self._parts.optimizer

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler, or None."""
        return self._parts.scheduler

    @property
    def precision(self) -> Precision:
        """The precision in which the model computes."""
        return self._parts.precision

    @property
    def position(self) -> Position:
        """The position in the run."""
        return self._parts.position

    @property
    def is_step_taken(self) -> bool:
        """Whether the last step has changed the parameters; not if its loss or float16 gradients were not finite."""
        return self._parts.step.is_taken

    @property
    def checkpoint_dir(self) -> Path | None:
        """The directory of the checkpoints, or None."""
        directory = self._options.checkpoint_dir
        return None if directory is None else Path(directory).absolute()

    @property
    def recovers(self) -> bool:
        """Whether training continues after ranks have failed (`on_failure="recover"`)."""
        return self._parts.options.recovers

    @property
    def loss_fn(self) -> batches.LossFunction | None:
        """The loss function; None if the model returns its loss."""
        return self._parts.step.loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: batches.LossFunction | None) -> None:
        self._parts.step.loss_fn = loss_fn

    @foreign_arguments.suggest_arguments("fit")
    def fit(
        self,
        train_data: Any,
        epochs: int | None = None,
        eval_data: Any = None,
        metrics: Mapping[str, evaluation.Metric] | None = None,
        *,
        shard: bool | None = None,
        eval_shard: bool | None = None,
        max_steps: int | None = None,
        max_time: float | None = None,
        eval_every: int | None = None,
        limit_batches: int | None = None,
    ) -> History:
        """Train, starting at the newest checkpoint in `checkpoint_dir` if there is one (collective).

        Args:
            train_data: The training data; all ranks pass the same kind. One of:

                - a map-style dataset, which the ranks share: an epoch takes each sample once, in an order that depends
                  only on the seed and the epoch;
                - an iterable-style dataset, which the ranks share and each rank reads completely;
                - a DataLoader, which the ranks share likewise if its dataset is map-style and its order sequential or
                  shuffled; otherwise each rank uses its DataLoader unchanged.

                Batches have any structure that `Trainer` describes.
            epochs: The number of epochs of the whole run, including those before a resume. None if another argument
                limits the run.
            eval_data: Data of the same kinds, evaluated after each epoch.
            metrics: Functions by name. Each takes a batch's outputs and targets and returns one number per sample, or
                their mean. Without `loss_fn` the second argument is the whole batch.
            shard: False: each rank passes its own share of train_data, of any length, which is used unchanged. True:
                every rank passes the same data, which the ranks share, also in the order of a sampler of your own.
                None: as train_data describes; an iterable-style dataset whose first sample differs between the ranks is
                an error.
            eval_shard: The same for eval_data.
            max_steps: End the run after this number of optimizer steps, including those before a resume, also within an
                epoch. A later call continues there.
            max_time: End the run after this number of seconds of this call, in the step in which the first rank reaches
                it. A later call continues there.
            eval_every: Evaluate also after every `eval_every`-th step.
            limit_batches: Take at most this number of batches of each rank in each epoch (rounded up to whole optimizer
                steps) and in each evaluation: a dry run. Use a separate checkpoint_dir.

        Returns:
            One dict per complete epoch: `epoch`, `step`, `loss`, `samples`, and with eval_data also `eval_loss`,
            `eval_samples` and the metrics. Means are over all samples of all ranks.

        Raises:
            Preempted: A SystemExit with status 85, on every rank: a rank received SIGTERM, SIGUSR1 or SIGUSR2 (under
                Flux also SIGALRM), or the end of the allocation is near. The run has saved a checkpoint. Without
                checkpoint_dir, it is not raised.
            CheckpointError: On every rank, if checkpoints cannot be written or read, or belong to another model, or a
                file of the metrics cannot be written or is of another program.
            TrainingError: On a rank whose loss is not finite, or on every rank if the parameters, the data or the
                limits of the ranks differ, or the run continues within an epoch with other data than before.
            TypeError: If the data or a batch have an unsupported type or structure, or `metrics` is not a mapping of
                names.
            ValueError: If nothing limits the run, a limit is not positive, a dataset is empty, a metric is not callable
                or has a wrong shape or the name of a field of the trainer, or `monitor` is not a metric of an epoch.
        """
        # 1. check the arguments
        accum, schedule = self._options.loader.grad_accum_steps, self._options.schedule
        is_evaluated, has_callbacks = eval_data is not None, bool(self._callbacks)
        limits = RunLimits(epochs, max_steps, max_time, eval_every, limit_batches, accum, has_callbacks, is_evaluated)
        evaluation.METRICS.check(metrics, "metrics", "fit")
        metrics_file.check_names(metrics or (), "fit: metrics", state.EVALUATION_FIELDS)
        SHARD.check(shard, "shard", "fit")
        SHARD.check(eval_shard, "eval_shard", "fit")
        metrics, monitored = metrics or {}, "loss"
        self.metric_names = optimizers.metric_names(metrics, is_evaluated=is_evaluated)
        if schedule == optimizers.ON_METRIC:
            monitored = optimizers.monitored(self._monitor, metrics, is_evaluated=is_evaluated)
        # 2. train
        self._requests = RunRequests(max_time)
        self._stop_request.reset()
        fit_call = FitCall(
            limits=limits,
            requests=self._requests,
            stop_request=self._stop_request,
            metrics=metrics,
            monitored=monitored,
            call=functools.partial(self._callbacks.call, self),
            evaluating=functools.partial(self._callbacks.evaluating, self),
        )
        with self._callbacks.reporting_exceptions(self):
            return self._run_call(functools.partial(self._fit, fit_call, (train_data, shard), (eval_data, eval_shard)))

    def stop(self, why: str) -> None:
        """End the run after the current step, or between two epochs, on all ranks; for callbacks, on one or more ranks.

        `fit` saves a checkpoint and returns. When the program is started again, the run continues.

        Args:
            why: The reason, for the output and the metrics file.
        """
        TEXT.check(why, "why", "stop")
        self._requests.end_reason = self._requests.end_reason or why

    def save_checkpoint(self) -> None:
        """Save a checkpoint after this step, or after this epoch and its evaluation; for callbacks, on all ranks."""
        self._requests.is_save_requested = True

    def write_metrics(self, event: str, **values: Any) -> None:
        """Write an entry to the metrics file and the logger; for callbacks. On ranks other than 0 it does nothing.

        Args:
            event: The name of the entry, other than those of the trainer.
            **values: Its content, which must be suitable for JSON.

        Raises:
            ValueError: If the trainer writes entries of this name, or each entry has a field of the name of a value.
        """
        TEXT.check(event, "event", "write_metrics")
        metrics_file.check_event(event, "write_metrics")
        metrics_file.check_names(values, "write_metrics")
        self._reporter.write(event, self.position, **values)

    @foreign_arguments.suggest_arguments("evaluate")
    def evaluate(
        self, data: Any, metrics: Mapping[str, evaluation.Metric] | None = None, *, shard: bool | None = None
    ) -> dict[str, float]:
        """Return the mean loss and metrics over all samples of all ranks, each counted once (collective).

        Args:
            data: As in `fit`.
            metrics: As in `fit`.
            shard: As in `fit`.

        Returns:
            The means by name, `loss` and the metrics, and `samples`, the number of samples.

        Raises:
            TypeError: If the data or a batch have an unsupported type or structure, or `metrics` is not a mapping of
                names.
            ValueError: If a dataset is empty, or a metric is not callable or has a wrong shape.
            TrainingError: On every rank, if the data of the ranks differ.
        """
        evaluation.METRICS.check(metrics, "metrics", "evaluate")
        SHARD.check(shard, "shard", "evaluate")
        return self._run_call(functools.partial(self._evaluate, data, metrics or {}, shard))

    @foreign_arguments.suggest_arguments("predict")
    def predict(
        self, data: Any, *, has_targets: bool = True, all_ranks: bool = False, shard: bool | None = None
    ) -> Any:
        """Return the model's outputs for every sample, in the order of the data, each sample once (collective).

        The order is that of the dataset, also for a DataLoader that shuffles, whose drop_last is ignored. A DataLoader
        that each rank uses unchanged (see `fit`) has no common order: the samples of rank 0 are first, then those of
        rank 1, and so on.

        Args:
            data: As in `fit`.
            has_targets: Whether the batches have targets, as in `fit`, which are not passed to the model. With False
                the model gets the whole batch. Batches of a single tensor, and mappings without `target_key`, need no
                targets in either case.
            all_ranks: Whether every rank gets the outputs, instead of rank 0 only. With on_failure="recover" each rank
                needs memory for all of them in any case, because another rank can become rank 0.
            shard: As in `fit`.

        Returns:
            A tensor on the CPU, with one row for each sample, or a container of such tensors, as the model returns
            them, without a loss in them; None on the other ranks than rank 0, unless all_ranks is set.

        Raises:
            TypeError: If the data or the outputs have an unsupported type or structure.
            ValueError: If a dataset is empty, an output does not have one row for each sample, or the shapes of the
                rows differ.
            TrainingError: On every rank, if the data are empty, or the data of the ranks or the structures of their
                outputs differ.
        """
        FLAG.check(has_targets, "has_targets", "predict")
        FLAG.check(all_ranks, "all_ranks", "predict")
        SHARD.check(shard, "shard", "predict")
        # Another rank may become rank 0 after a failure, and then returns the result recorded by its own call.
        records_all = all_ranks or self._recovering_calls is not None
        options = {"has_targets": has_targets, "all_ranks": records_all}
        outputs = self._run_call(functools.partial(self._predict, data, shard, **options))
        return outputs if all_ranks or self.world.rank == 0 else None

    def log(self, **values: float | torch.Tensor) -> None:
        """Add values to the next entry of the metrics file; call it in a training step, such as in the loss function.

        It does not communicate. The entry has the mean of the values over all ranks and over the steps since the last
        entry, weighted by the number of samples in their batches. Ranks may log different names. A value during an
        evaluation is ignored: use `metrics`.

        Args:
            **values: Numbers, or tensors of one element.

        Raises:
            TypeError: If a value is neither a number nor a tensor.
            ValueError: If a tensor has more than one element, or the entry has another field of that name.
        """
        self._parts.metrics.log(values)

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
        self._run_call(functools.partial(self._export, path))

    def _run_call(self, call: Callable[[], T]) -> T:
        """Return the result of a collective call, which is run again if ranks fail and `on_failure` is "recover"."""
        return call() if self._recovering_calls is None else self._recovering_calls.run(call)

    @contextlib.contextmanager
    def _opened_data(
        self,
        data: Any,
        options: LoaderOptions,
        shard: bool | None,
        *names: str,
        may_drop: bool = True,
        arguments: Mapping[str, object] | None = None,
    ) -> Iterator[DataSource]:
        """Open data; `names` are those of the call and its arguments, for errors (collective).

        Args:
            arguments: Further arguments of the call by name, which must be equal on all ranks.
        """
        rank = DataRank(self.world.rank, self.world.size)
        make = functools.partial(make_source, data, options, rank, shard=shard, may_drop=may_drop)
        with contextlib.closing(rank_sync.agreed_source(make, arguments or {}, *names)) as source:
            if self._recovering_calls is not None:
                self._recovering_calls.check_source(source)
            yield source

    @contextlib.contextmanager
    def _opened_data_outside_fit(
        self, data: Any, shard: bool | None, call: str, **keywords: Any
    ) -> Iterator[DataSource]:
        """Open the data of `evaluate` or `predict`, and enter the contexts of the callbacks.

        Args:
            **keywords: The keyword arguments of `_opened_data`.
        """
        if self._recovering_calls is not None:
            self._recovering_calls.check_state()
        with self._opened_data(data, self._evaluation_options, shard, call, "data", **keywords) as source:
            if self._recovering_calls is not None:
                self._recovering_calls.seed_at("evaluation", self.position.step)
            with self._callbacks.evaluating(self):
                yield source

    @property
    def _evaluation_options(self) -> LoaderOptions:
        return dataclasses.replace(self._options.loader, grad_accum_steps=1, shuffle=False)

    def _fit(self, fit_call: FitCall, train_data: ShardedData, eval_data: ShardedData) -> History:
        agreed = {
            **fit_call.limits.agreed,
            "save_every": self._options.save_every,
            "the callbacks that keep checkpoints": _listed(self._callbacks.keeping),
            "metrics": _listed(sorted(fit_call.metrics)),
        }
        with contextlib.ExitStack() as stack:
            data, shard = train_data
            train = stack.enter_context(
                self._opened_data(data, self._options.loader, shard, "fit", "train_data", arguments=agreed)
            )
            test, (data, shard) = None, eval_data
            if data is not None:
                test = stack.enter_context(
                    self._opened_data(data, self._evaluation_options, shard, "fit", "eval_data", "eval_shard")
                )
            loop = stack.enter_context(
                training_loop.opened(fit_call, self._options, self._parts, train, test, self._recovering_calls)
            )
            self._reporter = loop.reporter
            loop.run_all_epochs()
        return self.position.history

    def _evaluate(self, data: Any, metrics: Mapping[str, evaluation.Metric], shard: bool | None) -> dict[str, float]:
        with self._opened_data_outside_fit(
            data, shard, "evaluate", arguments={"metrics": _listed(sorted(metrics))}
        ) as source:
            outcome = evaluation.evaluate(self._parts.step, source, metrics)
        assert outcome is not None  # it is never stopped
        means, count = outcome
        return {**means, "samples": count}

    def _predict(self, data: Any, shard: bool | None, *, has_targets: bool, all_ranks: bool) -> Any:
        with self._opened_data_outside_fit(data, shard, "predict", may_drop=False) as source:
            return evaluation.predict(self._parts.step, source, has_targets=has_targets, all_ranks=all_ranks)

    def _export(self, path: str | os.PathLike[str]) -> None:
        if self._recovering_calls is not None:
            self._recovering_calls.check_state()
        with self._callbacks.evaluating(self):
            model_file.export(self.wrapped.inner, path)


def _check_interval(save_every: int | str | None, node_mtbf_hours: float | None) -> None:
    if save_every == "auto" and node_mtbf_hours is None:
        raise ValueError(
            "save_every='auto' requires the mean time between failures of a node, got node_mtbf_hours=None.\n"
            "Pass node_mtbf_hours, such as the node hours of past jobs divided by the number of their failures, or "
            "pass a number of steps as save_every."
        )
    if save_every != "auto" and node_mtbf_hours is not None:
        raise ValueError(
            f"node_mtbf_hours={node_mtbf_hours} requires save_every='auto', got save_every={save_every!r}.\n"
            f"Pass save_every='auto', or omit node_mtbf_hours."
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
