"""Optimizers and learning-rate schedulers: which of them the trainer can step, and when."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mpicomm import arguments
from mpicomm.arguments import TEXT

SCHEDULES = ("step", "epoch")
ON_METRIC = "metric"
"""The schedule of ReduceLROnPlateau: after each epoch, with one of its figures."""


_MODEL = arguments.instance("a torch.nn.Module", nn.Module, remedy="Pass the model itself, not its class.")
_OPTIMIZER = arguments.instance(
    "a torch.optim.Optimizer", torch.optim.Optimizer, remedy="Pass one, such as torch.optim.SGD(model.parameters())."
)


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of another model, and one that needs a closure.

    Raises:
        ValueError: If it has parameters that the model has not.
        TypeError: If one of them is something else, or step() has a required argument.
    """
    _MODEL.check(model, "model")
    _OPTIMIZER.check(optimizer, "optimizer")
    known = set(model.parameters())
    if not all(each in known for group in optimizer.param_groups for each in group["params"]):
        raise ValueError("the optimizer has parameters that the model has not.\nMake it of model.parameters().")
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
        scheduler: None if there is none.
        schedule: What the user asks for.
        monitor: The figure that the user has ReduceLROnPlateau follow.

    Raises:
        TypeError: If it cannot be stepped, saved and restored.
        ValueError: If it belongs to another optimizer, or an argument does not fit it.
    """
    arguments.one_of(*SCHEDULES).or_none().check(schedule, "schedule")
    TEXT.or_none().check(monitor, "monitor")
    if isinstance(scheduler, ReduceLROnPlateau):
        _check_owner(scheduler, optimizer)
        _check_plateau(scheduler, schedule, monitor)
        return ON_METRIC
    if monitor is not None:
        raise ValueError(
            f"monitor={monitor!r} is for ReduceLROnPlateau, got {type(scheduler).__name__} as the scheduler.\n"
            f"Leave monitor out."
        )
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
            f"Pass a scheduler of torch.optim.lr_scheduler, made for the optimizer: StepLR(optimizer, step_size=10)."
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
            f"the {type(scheduler).__name__} was made for another optimizer than the one of the Trainer.\n"
            f"Make it of the same one: scheduler = {type(scheduler).__name__}(optimizer, ...)."
        )


def _check_plateau(scheduler: ReduceLROnPlateau, schedule: str | None, monitor: str | None) -> None:
    if schedule == "step":
        raise ValueError(
            'schedule="step" does not fit ReduceLROnPlateau, which needs a figure of each epoch.\nLeave schedule out.'
        )
    if scheduler.mode == "max" and monitor is None:
        raise ValueError(
            "ReduceLROnPlateau(mode='max') follows a figure that grows, and a loss shrinks.\n"
            'Name the metric: Trainer(..., monitor="accuracy"), or use mode="min".'
        )


def monitored(monitor: str | None, metrics: Iterable[str], *, is_evaluated: bool) -> str:
    """Return the name of the figure that ReduceLROnPlateau follows.

    Args:
        monitor: What the user asks for; None for the loss of the evaluation, or of training where there is none.
        metrics: Those of the evaluation.

    Raises:
        ValueError: If epochs have no such figure.
    """
    known = ["loss", "eval_loss", *metrics] if is_evaluated else ["loss"]
    name = monitor or ("eval_loss" if is_evaluated else "loss")
    if name not in known:
        more = "" if is_evaluated else ", or pass eval_data, which metrics are computed from"
        raise ValueError(
            f"ReduceLROnPlateau is to follow {name!r}, and the epochs have {', '.join(map(repr, known))}.\n"
            f"Set monitor to one of these{more}."
        )
    return name


def _required_of_step(steps: Any) -> str:
    """Return the names of the arguments without which step() cannot be called."""
    try:
        # The class's: on objects, schedulers of torch put functions in its place that have `self` as an argument.
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(type(steps).step).parameters
    except (AttributeError, TypeError, ValueError):
        return ""
    empty, named = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [each.name for each in parameters.values() if each.default is empty and each.kind not in named]
    return ", ".join(map(repr, required[1:]))
