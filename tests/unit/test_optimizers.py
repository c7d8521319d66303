"""The optimizers and schedulers that the trainer accepts, and its errors for all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from mpicomm.training import optimizers

MODEL = nn.Linear(2, 2)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1, momentum=0.9)
STEP_LR = lr_scheduler.StepLR(SGD, 1)  # replaces SGD.step by a function of its own


@pytest.mark.parametrize(
    "optimizer", [SGD, torch.optim.AdamW(MODEL.parameters()), torch.optim.Rprop([*MODEL.parameters()])]
)
def test_optimizers_whose_step_has_no_required_argument(optimizer: torch.optim.Optimizer) -> None:
    optimizers.check_optimizer(MODEL, optimizer)


def test_lbfgs_is_refused() -> None:
    lbfgs = torch.optim.LBFGS(MODEL.parameters())
    lr_scheduler.StepLR(lbfgs, 1)
    with pytest.raises(TypeError) as error:
        optimizers.check_optimizer(MODEL, lbfgs)
    assert str(error.value) == (
        "Trainer does not support LBFGS: its step() requires 'closure', and Trainer calls step() once, with gradients "
        "accumulated over batches and averaged over ranks.\n"
        "Use an optimizer whose step() needs no closure, such as torch.optim.AdamW or torch.optim.SGD; for LBFGS, "
        "write the training loop with torch.nn.parallel.DistributedDataParallel."
    )


def plateau(**options: Any) -> lr_scheduler.ReduceLROnPlateau:
    return lr_scheduler.ReduceLROnPlateau(SGD, **options)


@pytest.mark.parametrize(
    ("scheduler", "schedule", "monitor", "expected"),
    [
        (None, None, None, "step"),
        (STEP_LR, None, None, "step"),
        (STEP_LR, "epoch", None, "epoch"),
        (lr_scheduler.SequentialLR(SGD, [STEP_LR, STEP_LR], [3]), "step", None, "step"),
        (plateau(), None, None, optimizers.ON_METRIC),
        (plateau(), "epoch", "loss", optimizers.ON_METRIC),
        (plateau(mode="max"), None, "accuracy", optimizers.ON_METRIC),
    ],
)
def test_when_a_scheduler_steps(scheduler: Any, schedule: str | None, monitor: str | None, expected: str) -> None:
    assert optimizers.schedule_of(scheduler, SGD, schedule, monitor) == expected


class OfTime:
    """A scheduler whose step() requires the epoch, as in timm."""

    def step(self, epoch: int) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    load_state_dict = state_dict


OTHER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("scheduler", "schedule", "monitor", "error", "message"),
    [
        (STEP_LR, "day", None, ValueError, "schedule must be 'step', 'epoch' or None, got 'day'"),
        (plateau(), "step", None, ValueError, r'schedule="step" cannot be used with ReduceLROnPlateau'),
        (plateau(mode="max"), None, None, ValueError, r"mode='max'.*\nPass the metric: Trainer\(..., monitor="),
        (STEP_LR, None, "loss", ValueError, "monitor='loss' requires a ReduceLROnPlateau scheduler, got StepLR"),
        (None, None, "loss", ValueError, "monitor='loss' requires a ReduceLROnPlateau scheduler, got scheduler=None"),
        (lr_scheduler.StepLR, None, None, TypeError, r"scheduler must have step\(\), .*, got a class"),
        ("cosine", None, None, TypeError, r"got a str without step\(\)"),
        (OfTime(), None, None, TypeError, r"does not support OfTime: its step\(\) requires 'epoch'"),
        (lr_scheduler.StepLR(OTHER, 1), None, None, ValueError, "StepLR belongs to another optimizer"),
        (lr_scheduler.ReduceLROnPlateau(OTHER), None, None, ValueError, "belongs to another optimizer"),
    ],
)
def test_unsupported_schedulers_are_refused(
    scheduler: Any, schedule: str | None, monitor: str | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        optimizers.schedule_of(scheduler, SGD, schedule, monitor)


@pytest.mark.parametrize(
    ("monitor", "is_evaluated", "expected"),
    [(None, False, "loss"), (None, True, "eval_loss"), ("loss", True, "loss"), ("accuracy", True, "accuracy")],
)
def test_the_metric_that_a_plateau_monitors(monitor: str | None, is_evaluated: bool, expected: str) -> None:
    assert optimizers.monitored(monitor, ["accuracy"], is_evaluated=is_evaluated) == expected


def test_a_metric_that_epochs_do_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"epoch, 'loss', 'eval_loss', 'accuracy', got 'f1'\.\nSet monitor"):
        optimizers.monitored("f1", ["accuracy"], is_evaluated=True)
    with pytest.raises(ValueError, match=r"epoch, 'loss', got 'accuracy'\.\nSet .*, or pass eval_data"):
        optimizers.monitored("accuracy", ["accuracy"], is_evaluated=False)
