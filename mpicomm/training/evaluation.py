"""Evaluation: means of the loss and of metrics over all samples of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mpicomm.arguments import Expected
from mpicomm.training import rank_sync
from mpicomm.training.data import DataSource, Step
from mpicomm.training.parallel import FSDPModel
from mpicomm.training.step_metrics import Clock
from mpicomm.training.training_step import TrainingStep

Metric = Callable[[Any, Any], Any]
"""A function of a batch's outputs and targets that returns one number per sample, or their mean."""

METRICS = Expected(
    "a mapping of names to functions",
    lambda metrics: isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics),
    "a mapping of names to functions of the outputs and the targets",
    lambda metrics: all(callable(each) for each in metrics.values()),
    'Pass for example {"accuracy": lambda outputs, labels: outputs.argmax(dim=1) == labels}.',
).or_none()


@torch.no_grad()
def evaluate(
    training_step: TrainingStep,
    source: DataSource,
    metrics: Mapping[str, Metric],
    is_stopping: Callable[[], bool] = lambda: False,
    limit: int | None = None,
) -> tuple[dict[str, float], int] | None:
    """Return the means of the loss and the metrics, and the number of samples (collective).

    Args:
        training_step: The model and its forward pass.
        source: The data.
        metrics: The metrics of the user.
        is_stopping: Called after each step; whether to stop the evaluation, which then returns None.
        limit: The most batches of each rank; None for all.

    Raises:
        ValueError: If the model is sharded and this rank has no batch: all ranks must call a sharded model the same
            number of times.
    """
    averages = Averages(metrics, training_step.parts.world.device)
    with training_step.parts.wrapped.evaluating() as model:
        for step, _ in itertools.islice(aligned(training_step, source), limit):
            for batch in step.batches:
                loss, outputs, targets = training_step.forward(model, batch)
                if batch.count:
                    averages.add(loss, outputs, targets, batch.count)
            if is_stopping():
                return None
    return averages.reduce()


def aligned(training_step: TrainingStep, source: DataSource) -> Iterator[tuple[Step, int]]:
    """Yield the steps of data as `rank_sync.aligned_steps`, for passes without gradients (collective).

    Raises:
        ValueError: If the model is sharded and this rank has no batch.
    """
    training_step.parts.metrics.begin_batch(0)  # values that the loss function logs now are not those of training
    wrapped = training_step.parts.wrapped
    last = Step([])

    def padding() -> Step:
        if not last.batches and isinstance(wrapped, FSDPModel):
            raise rank_sync.no_data()
        return last.as_padding()

    clock = Clock(training_step.parts.world.device)
    steps = source.steps(0, 0, 0)
    rank_sync.begin_epoch(source)
    for step, count in rank_sync.aligned_steps(source, steps, padding, clock):
        last = step
        yield step, count


class Averages:
    """Means of metrics over a set of samples, in float64; each sample counts once for any number of ranks."""

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._metrics = metrics
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in ("loss", *metrics)}
        self.count = 0

    def add(self, loss: torch.Tensor, outputs: Any, targets: Any, count: int) -> None:
        """Add a batch of `count` samples.

        Raises:
            ValueError: If a metric returns neither one number nor one number per sample.
        """
        self._sums["loss"] += loss.detach().double() * count
        for name, metric in self._metrics.items():
            value = torch.as_tensor(metric(outputs, targets)).detach().double()
            each_sample = value.shape[:1] == (count,) and value.numel() == count
            if value.numel() != 1 and not each_sample:
                raise ValueError(
                    f"the metric {name!r} must return one number per sample ({count}) or their mean, got a tensor of "
                    f"shape {list(value.shape)}.\n"
                    f"Return a tensor of shape [{count}] or [], such as value.flatten(1).mean(dim=1)."
                )
            whole = value.sum() if each_sample else value.reshape(()) * count
            self._sums[name] += whole.to(self._sums[name].device)
        self.count += count

    def reduce(self) -> tuple[dict[str, float], int]:
        """Return the means over the samples of all ranks, and the number of these samples (collective)."""
        sums = [each.item() for each in self._sums.values()]
        *totals, count = rank_sync.reduced([*sums, self.count])
        return {name: total / max(count, 1) for name, total in zip(self._sums, totals, strict=True)}, int(count)
