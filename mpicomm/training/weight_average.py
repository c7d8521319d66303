"""A callback that averages the weights of the model over the steps (exponential moving average)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mpicomm import arguments
from mpicomm.training.callbacks import Callback
from mpicomm.training.parallel import FSDPModel

if TYPE_CHECKING:
    from mpicomm.training.trainer import Trainer

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
            self._averages = [each.detach().clone() for each in _parameters(trainer)]

    @torch.no_grad()
    def on_fit_start(self, trainer: Trainer) -> None:
        """Start from the parameters of the model, unless a checkpoint contained the averages."""
        if not self._is_started:
            for average, parameter in zip(self._averages, _parameters(trainer), strict=True):
                _local(average).copy_(_local(parameter))
            self._is_started = True

    @torch.no_grad()
    def on_step_end(self, trainer: Trainer) -> None:
        """Update the averages, unless the step was skipped."""
        if not trainer.is_step_taken:
            return
        parameters = [_local(each) for each in _parameters(trainer)]
        self._update([_local(each) for each in self._averages], parameters, None)

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
            mine, other = _local(average), _local(parameter)
            before = other.clone()
            other.copy_(mine)
            mine.copy_(before)

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
    return [each for each in trainer.wrapped.inner.parameters() if each.is_floating_point() or each.is_complex()]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
