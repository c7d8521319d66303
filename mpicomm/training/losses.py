"""The losses of training: their sum between two entries of the metrics file, and losses that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm.errors import TrainingError
from mpicomm.training import rank_sync
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
        self.figures: dict[str, Any] = {}
        """Sums of the further figures of a training step of the user, over the same samples."""

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

    def add_figures(self, figures: Mapping[str, torch.Tensor], count: int) -> None:
        """Add the means of a batch of `count` samples; a padding batch defines the names only.

        Raises:
            ValueError: If the names are not those of the batches before.
        """
        if self.figures and figures.keys() != self.figures.keys():
            raise ValueError(
                f"training_step must return the same names for each batch, got {sorted(figures)} after "
                f"{sorted(self.figures)}.\nReturn all of these figures for each batch."
            )
        for name, value in figures.items():
            part = value.double() * count if count else torch.zeros_like(value, dtype=torch.float64)
            self.figures[name] = self.figures.get(name, 0.0) + part

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

    def reduce_figures(self, count: int) -> dict[str, float]:
        """Return the means of the further figures over `count` samples of all ranks, and reset them (collective)."""
        if not self.figures:
            return {}
        names = sorted(self.figures)
        sums = rank_sync.reduced([float(self.figures[name]) for name in names])
        self.figures = dict.fromkeys(names, 0.0)
        return {name: total / max(count, 1) for name, total in zip(names, sums, strict=True)}

    def reduce(self) -> tuple[float, int]:
        """Return the sum of the losses and the number of samples of all ranks, and reset both (collective)."""
        total, count = rank_sync.reduced(self.take())
        return total, int(count)


def _not_finite(step: int, indices: Sequence[int] | None, value: float) -> TrainingError:
    which = "(unknown indices)" if indices is None else ", ".join(map(str, indices))
    return TrainingError(
        f"the loss of step {step} is {value} on rank {dist.get_rank()}, for the samples {which}.\n"
        f"Check these samples, set max_grad_norm, or skip such steps with on_nonfinite='skip'. To lower the learning "
        f"rate, use a new checkpoint_dir: a resumed run uses the learning rate of its checkpoint."
    )
