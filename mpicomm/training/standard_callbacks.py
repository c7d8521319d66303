"""The callbacks of the package: the best checkpoint, early stopping, averaged weights, learning rates."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mpicomm import arguments
from mpicomm.arguments import POSITIVE, TEXT
from mpicomm.training.callbacks import Callback
from mpicomm.training.parallel import FSDPModel, local

if TYPE_CHECKING:
    from mpicomm.training.trainer import Trainer


_MODE = arguments.one_of("min", "max")
_NOT_NEGATIVE = arguments.number("a non-negative number", lambda value: value >= 0)


class MetricMonitor(Callback):
    """Base class of callbacks that follow one metric. All ranks have the same values, and decide the same."""

    def __init__(self, monitor: str, mode: str, min_delta: float = 0.0) -> None:
        """Follow a metric.

        Args:
            monitor: "loss", after each epoch, or "eval_loss" or the name of a metric, after each evaluation.
            mode: "min" if smaller values are better, "max" if greater ones are.
            min_delta: The smallest change that counts as an improvement.
        """
        name = type(self).__name__
        TEXT.check(monitor, "monitor", name)
        _MODE.check(mode, "mode", name)
        _NOT_NEGATIVE.check(min_delta, "min_delta", name)
        self._monitor, self._sign, self._min_delta = monitor, -1.0 if mode == "min" else 1.0, min_delta
        self.measures_training = monitor == "loss"
        self.best: float | None = None
        """The best value so far, or None."""

    def on_setup(self, trainer: Trainer) -> None:
        """Check that the run has the metric.

        Raises:
            ValueError: If it does not.
        """
        if self._monitor not in trainer.metric_names:
            raise ValueError(
                f"{type(self).__name__}: monitor must be one of {', '.join(map(repr, trainer.metric_names))}, got "
                f"{self._monitor!r}.\n"
                f"Set monitor to one of these, or pass eval_data and the metric to fit()."
            )

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Compare the loss of the epoch, if it is the monitored metric."""
        if self.measures_training:
            self._compare(trainer, trainer.position.history[-1]["loss"])

    def on_eval_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Compare a metric of the evaluation, if it is the monitored one."""
        if not self.measures_training:
            self._compare(trainer, metrics[self._monitor])

    def _compare(self, trainer: Trainer, value: float) -> None:
        """Compare a new value with the best one; a value that is not finite is never better."""
        is_better = math.isfinite(value) and (self.best is None or self._sign * (value - self.best) > self._min_delta)
        if is_better:
            self.best = value
        self.follow(trainer, is_better=is_better)

    def follow(self, trainer: Trainer, *, is_better: bool) -> None:
        """React to a new value.

        Args:
            trainer: The trainer.
            is_better: Whether it is the best one so far.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the best value."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value.

        Args:
            state: The state.
        """
        self.best = state["best"]


class BestCheckpoint(MetricMonitor):
    """Saves a checkpoint at each new best value of a metric, and keeps the best one in addition to `keep_checkpoints`.

    `Trainer.fit` still resumes from the newest checkpoint. The entry "model" of the best one has the weights that were
    measured: with `EMA`, those of training for "loss", and the averages for the other metrics. Load them into a model
    with `torch.distributed.checkpoint`, in a job or in one process::

        weights = {"model": model.state_dict()}
        torch.distributed.checkpoint.load(weights, checkpoint_id=best.path)
        model.load_state_dict(weights["model"])
    """

    def __init__(self, monitor: str = "eval_loss", mode: str = "min") -> None:
        """Follow a metric.

        Args:
            monitor: "loss", after each epoch, or "eval_loss" or the name of a metric, after each evaluation.
            mode: "min" if smaller values are better, "max" if greater ones are.
        """
        super().__init__(monitor, mode)
        self._name: str | None = None
        self._directory: Path | None = None

    @property
    def path(self) -> Path | None:
        """The best checkpoint, which is complete at the end of `fit`; None before the first value."""
        return None if self._name is None or self._directory is None else self._directory / self._name

    def on_setup(self, trainer: Trainer) -> None:
        """Check the arguments of the trainer.

        Raises:
            ValueError: If it has no checkpoint_dir, or the run does not have the metric.
        """
        super().on_setup(trainer)
        self._directory = trainer.checkpoint_dir
        if self._directory is None:
            raise ValueError(
                "BestCheckpoint requires a checkpoint_dir, got checkpoint_dir=None.\n"
                "Pass checkpoint_dir to Trainer, or omit BestCheckpoint."
            )

    def follow(self, trainer: Trainer, *, is_better: bool) -> None:
        """Save a checkpoint if the value is the best one so far."""
        if is_better:
            self._name = trainer.position.name
            trainer.save_checkpoint()

    def kept_checkpoints(self) -> tuple[str, ...]:
        """Return the name of the best checkpoint."""
        return () if self._name is None else (self._name,)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and the name of its checkpoint."""
        return {**super().state_dict(), "name": self._name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value, and the name of its checkpoint.

        Args:
            state: The state.
        """
        super().load_state_dict(state)
        self._name = state["name"]


class EarlyStopping(MetricMonitor):
    """Ends the run when a metric has not improved for a number of evaluations (for "loss": epochs).

    `fit` then returns as after the last epoch. When the program is started again, the run does not continue.
    """

    def __init__(
        self, monitor: str = "eval_loss", patience: int = 3, mode: str = "min", min_delta: float = 0.0
    ) -> None:
        """Follow a metric.

        Args:
            monitor: "loss", after each epoch, or "eval_loss" or the name of a metric, after each evaluation.
            patience: The number of values in a row without an improvement after which the run ends.
            mode: "min" if smaller values are better, "max" if greater ones are.
            min_delta: The smallest change that counts as an improvement.
        """
        super().__init__(monitor, mode, min_delta)
        POSITIVE.check(patience, "patience", "EarlyStopping")
        self._patience = patience
        self.count = 0
        """The number of values in a row without an improvement."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """End a run that had ended before it was resumed."""
        self._end_if_due(trainer)

    def follow(self, trainer: Trainer, *, is_better: bool) -> None:
        """Count the values without an improvement, and end the run when there are too many."""
        self.count = 0 if is_better else self.count + 1
        self._end_if_due(trainer)

    def _end_if_due(self, trainer: Trainer) -> None:
        if self.count >= self._patience:
            trainer.stop(f"EarlyStopping: no better {self._monitor} than {self.best} in {self.count} comparisons")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and the number of values without an improvement."""
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value, and the number of values without an improvement.

        Args:
            state: The state.
        """
        super().load_state_dict(state)
        self.count = state["count"]


# -- averages of the weights -------------------------------------------------------------------------------------------


_DECAY = arguments.number("a number from 0 to 1", lambda value: 0 <= value <= 1)


class EMA(Callback):
    """Keeps an exponential moving average of the parameters, with which evaluations and `export` run.

    After each step that the optimizer takes, average = decay * average + (1 - decay) * parameter. Each rank averages
    its own copy (DDP) or shard (FSDP), without communication. Checkpoints contain the average. Buffers, such as the
    statistics of batch normalization, are not averaged: evaluations use those of training.
    """

    def __init__(self, decay: float = 0.999) -> None:
        """Average with a decay.

        Args:
            decay: The weight of the previous average in each step.
        """
        _DECAY.check(decay, "decay", "EMA")
        self._update = get_ema_multi_avg_fn(decay)
        self._averages: list[torch.Tensor] = []
        self._is_started = False

    def on_setup(self, trainer: Trainer) -> None:
        """Create the averages.

        Raises:
            ValueError: If the trainer recovers a sharded model after failures.
        """
        if isinstance(trainer.wrapped, FSDPModel) and trainer.recovers:
            raise ValueError(
                'EMA supports on_failure="recover" only with strategy="ddp", got strategy="fsdp": after a failure, '
                "there is no copy of the failed rank's averages.\n"
                'Use strategy="ddp" or on_failure="abort", or omit EMA.'
            )
        if not self._averages:
            self._averages = [parameter.detach().clone() for parameter in _parameters(trainer)]

    @torch.no_grad()
    def on_fit_start(self, trainer: Trainer) -> None:
        """Start from the parameters of the model, unless a checkpoint contained the averages."""
        if not self._is_started:
            for average, parameter in zip(self._averages, _parameters(trainer), strict=True):
                local(average).copy_(local(parameter))
            self._is_started = True

    @torch.no_grad()
    def on_step_end(self, trainer: Trainer) -> None:
        """Update the averages, unless the step was skipped."""
        if not trainer.is_step_taken:
            return
        parameters = [local(tensor) for tensor in _parameters(trainer)]
        self._update([local(tensor) for tensor in self._averages], parameters, None)

    @contextlib.contextmanager
    def evaluating(self, trainer: Trainer) -> Iterator[None]:
        """Exchange the parameters and the averages in a block.

        Args:
            trainer: The trainer.
        """
        self._exchange(trainer)
        try:
            yield
        finally:
            self._exchange(trainer)

    @torch.no_grad()
    def _exchange(self, trainer: Trainer) -> None:
        for average, parameter in zip(self._averages, _parameters(trainer), strict=False):  # no averages before fit()
            own, other = local(average), local(parameter)
            before = other.clone()
            other.copy_(own)
            own.copy_(before)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        return {"averages": self._averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the averages.

        Args:
            state: The state.
        """
        self._averages, self._is_started = state["averages"], True


def _parameters(trainer: Trainer) -> list[torch.Tensor]:
    """Return the parameters that can be averaged, in the order of the model."""
    return [
        parameter
        for parameter in trainer.wrapped.inner.parameters()
        if parameter.is_floating_point() or parameter.is_complex()
    ]


# -- learning rates ----------------------------------------------------------------------------------------------------


class LearningRateLogger(Callback):
    """Logs the learning rates of all parameter groups, as entries "learning_rate" of the metrics file.

    Step entries of the metrics file contain only the rate of the first group. An entry has `lr_0`, `lr_1` and so on, or
    `lr_<name>` for a group with a "name".
    """

    def __init__(self, every: int = 1) -> None:
        """Log after each `every`-th step.

        Args:
            every: The number of steps from one entry to the next.
        """
        POSITIVE.check(every, "every", "LearningRateLogger")
        self._every = every

    def on_step_end(self, trainer: Trainer) -> None:
        """Log the rates of the next step."""
        if trainer.position.step % self._every == 0:
            groups = enumerate(trainer.optimizer.param_groups)
            rates = {f"lr_{group.get('name', number)}": float(group["lr"]) for number, group in groups if "lr" in group}
            trainer.write_metrics("learning_rate", **rates)
