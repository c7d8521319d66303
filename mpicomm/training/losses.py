"""The losses of training: their sum between two entries of the metrics file, and losses that are not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm.errors import TrainingError
from mpicomm.training.data import Batch


class Losses:
    """The losses of this rank's batches since the last reduction."""

    def __init__(self, device: torch.device, stops: bool) -> None:
        """Start with an empty sum.

        Args:
            stops: Whether a loss that is not finite ends the run.
        """
        self._stops = stops
        self._is_immediate = device.type == "cpu"  # on a GPU, reading a number waits for the GPU
        self.total: Any = 0.0
        self.count = 0
        self._unchecked: list[tuple[int, Sequence[int] | None, torch.Tensor]] = []  # step, samples, loss

    def add(self, step: int, batch: Batch, loss: torch.Tensor) -> bool:
        """Add the mean loss of a batch, and return whether it is finite.

        Raises:
            TrainingError: If it is not finite and `stops` is set; on GPUs, `check` raises this error later.
        """
        if not batch.count:
            return self._stops or bool(torch.isfinite(loss))
        if self._is_immediate or not self._stops:
            value = loss.item()
            if not math.isfinite(value):
                if self._stops:
                    raise _not_finite(step, batch.indices, value)
                return False
            self.total += value * batch.count
        else:
            self._unchecked.append((step, batch.indices, loss.detach()))  # without the inputs, which can be large
            self.total = self.total + loss.detach().double() * batch.count
        self.count += batch.count
        return True

    def check(self) -> None:
        """Check the losses that `add` has not checked yet.

        Raises:
            TrainingError: If one of them is not finite.
        """
        if self._unchecked:
            values = torch.stack([loss for _, _, loss in self._unchecked]).tolist()
            unchecked, self._unchecked = self._unchecked, []
            for (step, indices, _), value in zip(unchecked, values, strict=True):
                if not math.isfinite(value):
                    raise _not_finite(step, indices, value)

    def take(self) -> tuple[float, int]:
        """Return the sum of the losses and the number of samples of this rank, and reset both.

        Raises:
            TrainingError: If a loss is not finite that `add` has not checked.
        """
        self.check()
        found = float(self.total), self.count
        self.total, self.count = 0.0, 0
        return found


def _not_finite(step: int, indices: Sequence[int] | None, value: float) -> TrainingError:
    which = "(unknown indices)" if indices is None else ", ".join(map(str, indices))
    return TrainingError(
        f"the loss of step {step} is {value} on rank {dist.get_rank()}, for the samples {which}.\n"
        f"Check these samples, set max_grad_norm, or skip such steps with on_nonfinite='skip'. To lower the learning "
        f"rate, use a new checkpoint_dir: a resumed run uses the learning rate of its checkpoint."
    )
