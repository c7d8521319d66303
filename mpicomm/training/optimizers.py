"""Checks of optimizers and learning-rate schedulers, when the trainer steps a scheduler, and combined optimizers."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mpicomm import arguments
from mpicomm.arguments import TEXT

SCHEDULES = ("step", "epoch")
ON_METRIC = "metric"
"""The schedule of ReduceLROnPlateau: after each epoch, with a metric of the epoch."""


_MODEL = arguments.instance("a torch.nn.Module", nn.Module, remedy="Pass the model itself, not its class.")
_OPTIMIZER = arguments.instance(
    "a torch.optim.Optimizer", torch.optim.Optimizer, remedy="Pass for example torch.optim.SGD(model.parameters())."
)


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer is for the model.

    Raises:
        ValueError: If the optimizer has parameters that do not belong to the model.
        TypeError: If an argument is of another type.
    """
    _MODEL.check(model, "model")
    _OPTIMIZER.check(optimizer, "optimizer")
    known = set(model.parameters())
    if not all(parameter in known for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "the optimizer has parameters that do not belong to the model.\n"
            "Create the optimizer from model.parameters()."
        )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer is for the model and needs no closure.

    Raises:
        ValueError: If the optimizer has parameters that do not belong to the model.
        TypeError: If an argument is of another type, or step() has a required argument.
    """
    check_parameters(model, optimizer)
    if required := _required_of_step(optimizer):
        raise TypeError(
            f"Trainer does not support {type(optimizer).__name__}: its step() requires {required}, and Trainer calls "
            f"step() once, with gradients accumulated over batches and averaged over ranks.\n"
            f"Use an optimizer whose step() needs no closure, such as torch.optim.AdamW or torch.optim.SGD; for LBFGS, "
            f"write the training loop with torch.nn.parallel.DistributedDataParallel."
        )


def schedule_of(scheduler: Any, optimizer: torch.optim.Optimizer, schedule: str | None, monitor: str | None) -> str:
    """Return when a scheduler is stepped: "step", "epoch" or ON_METRIC.

    Args:
        scheduler: The scheduler, or None.
        optimizer: The optimizer of the trainer.
        schedule: The user's choice; None for the default.
        monitor: The metric that the user chose for ReduceLROnPlateau.

    Raises:
        TypeError: If the scheduler cannot be stepped, saved and restored.
        ValueError: If it belongs to another optimizer, or an argument does not fit it.
    """
    arguments.one_of(*SCHEDULES).or_none().check(schedule, "schedule")
    TEXT.or_none().check(monitor, "monitor")
    if isinstance(scheduler, ReduceLROnPlateau):
        _check_owner(scheduler, optimizer)
        _check_plateau(scheduler, schedule, monitor)
        return ON_METRIC
    if monitor is not None:
        got = "scheduler=None" if scheduler is None else type(scheduler).__name__
        raise ValueError(f"monitor={monitor!r} requires a ReduceLROnPlateau scheduler, got {got}.\nOmit monitor.")
    if scheduler is not None:
        _check_scheduler(scheduler)
        _check_owner(scheduler, optimizer)
    return schedule or "step"


def _check_scheduler(scheduler: Any) -> None:
    missing = [name for name in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, name)]
    if missing or isinstance(scheduler, type):
        got = "a class" if isinstance(scheduler, type) else f"a {type(scheduler).__name__} without {missing[0]}()"
        raise TypeError(
            f"scheduler must have step(), state_dict() and load_state_dict(), got {got}.\n"
            f"Pass a scheduler of torch.optim.lr_scheduler, such as StepLR(optimizer, step_size=10)."
        )
    if required := _required_of_step(scheduler):
        raise TypeError(
            f"Trainer does not support {type(scheduler).__name__}: its step() requires {required}, and Trainer calls "
            f"step() without arguments, except for ReduceLROnPlateau.\n"
            f"Use a scheduler of torch.optim.lr_scheduler."
        )


def _check_owner(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"the {type(scheduler).__name__} belongs to another optimizer than the one passed to Trainer.\n"
            f"Create it for the same optimizer: scheduler = {type(scheduler).__name__}(optimizer, ...)."
        )


def _check_plateau(scheduler: ReduceLROnPlateau, schedule: str | None, monitor: str | None) -> None:
    if schedule == "step":
        raise ValueError(
            'schedule="step" cannot be used with ReduceLROnPlateau, which requires a metric of each epoch.\n'
            "Omit schedule."
        )
    if scheduler.mode == "max" and monitor is None:
        raise ValueError(
            "ReduceLROnPlateau(mode='max') requires monitor: its default is a loss, which training decreases.\n"
            'Pass the metric: Trainer(..., monitor="accuracy"), or use mode="min".'
        )


def metric_names(metrics: Iterable[str], *, is_evaluated: bool) -> tuple[str, ...]:
    """Return the names of the metrics that can be monitored: of an epoch, and of its evaluation if there is one."""
    return ("loss", "eval_loss", *metrics) if is_evaluated else ("loss",)


def monitored(monitor: str | None, metrics: Iterable[str], *, is_evaluated: bool) -> str:
    """Return the name of the metric that ReduceLROnPlateau monitors.

    Args:
        monitor: The user's choice; None for the loss of the evaluation, or of training without an evaluation.
        metrics: The names of the metrics of the evaluation.
        is_evaluated: Whether an evaluation follows each epoch.

    Raises:
        ValueError: If epochs do not have this metric.
    """
    known = metric_names(metrics, is_evaluated=is_evaluated)
    name = monitor or ("eval_loss" if is_evaluated else "loss")
    if name not in known:
        more = "" if is_evaluated else ", or pass eval_data, from which metrics are computed"
        raise ValueError(
            f"monitor must be one of the metrics of an epoch, {', '.join(map(repr, known))}, got {name!r}.\n"
            f"Set monitor to one of these{more}."
        )
    return name


def _required_of_step(steps: Any) -> str:
    """Return the names of the required arguments of step()."""
    try:
        # The signature of the class: schedulers of torch replace step() on instances by functions that take `self`.
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(type(steps).step).parameters
    except (AttributeError, TypeError, ValueError):
        return ""
    empty, named = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is empty and parameter.kind not in named
    ]
    return ", ".join(map(repr, required[1:]))


# -- several optimizers as one -----------------------------------------------------------------------------------------


_OPTIMIZERS = arguments.Expected(
    "a non-empty list of optimizers",
    lambda value: (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in value)
    ),
    remedy="Pass for example [torch.optim.AdamW(model.a.parameters()), torch.optim.SGD(model.b.parameters())].",
)


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps several optimizers of disjoint parameters together, for example in `Trainer`.

    Its parameter groups are those of the optimizers, one after the other. A scheduler belongs to the combined
    optimizer, and changes the learning rates of all groups.

    Example::

        optimizer = mpicomm.CombinedOptimizer([
            torch.optim.AdamW(model.generator.parameters(), lr=1e-4),
            torch.optim.SGD(model.discriminator.parameters(), lr=1e-2),
        ])
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Combine optimizers, which have taken no step yet.

        Args:
            optimizers: The optimizers.

        Raises:
            TypeError: If it is not a list of optimizers.
            ValueError: If two of them have a parameter in common.
        """
        _OPTIMIZERS.check(optimizers, "optimizers", "CombinedOptimizer")
        self._optimizers = list(optimizers)
        super().__init__([group for optimizer in self._optimizers for group in optimizer.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the optimizers use the parameter groups and the state of this one."""
        groups = iter(self.param_groups)
        for optimizer in self._optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers.

        Args:
            closure: Not supported.
        """
        if closure is not None:
            raise TypeError("CombinedOptimizer.step() takes no closure, got one.\nCompute the loss before step().")
        for optimizer in self._optimizers:
            optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state.

        Args:
            state_dict: The state, from `state_dict()`.
        """
        super().load_state_dict(state_dict)
        self.state = collections.defaultdict(dict, self.state)
        self._share()
