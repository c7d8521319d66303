"""Passes without gradients: means of the loss and of metrics over all samples of all ranks, and predictions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mpicomm.arguments import Expected
from mpicomm.collective_ops import collectives, group_argument, pytree
from mpicomm.errors import TrainingError, raised_on_all_ranks
from mpicomm.recorder import rank_text
from mpicomm.training import rank_sync
from mpicomm.training.data import DataSource, Step
from mpicomm.training.parallel import FSDPModel
from mpicomm.training.training_step import TrainingStep

Metric = Callable[[Any, Any], Any]
"""A function of a batch's outputs and targets that returns one number per sample, or their mean."""

METRICS = Expected(
    "a mapping of names to functions",
    lambda metrics: isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics),
    "a mapping of names to functions of the outputs and the targets",
    lambda metrics: all(callable(metric) for metric in metrics.values()),
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
        for step in itertools.islice(aligned(training_step, source), limit):
            for batch in step.batches:
                loss, outputs, targets = training_step.forward(model, batch)
                if batch.count:
                    averages.add(loss, outputs, targets, batch.count)
            if is_stopping():
                return None
    return averages.reduce()


def aligned(training_step: TrainingStep, source: DataSource) -> Iterator[Step]:
    """Return the steps of data as `rank_sync.aligned_steps`, for passes without gradients (collective).

    Raises:
        ValueError: If the model is sharded and this rank has no batch.
    """
    training_step.parts.metrics.begin_batch(0)  # values that the loss function logs now are not those of training

    def padding(last: Step) -> Step:
        if not last.batches and isinstance(training_step.parts.wrapped, FSDPModel):
            raise rank_sync.no_data()
        return last.as_padding()

    steps = source.steps(0, 0, 0)
    rank_sync.begin_epoch(source)
    return rank_sync.aligned_steps(source, steps, padding)


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
        sums = [total.item() for total in self._sums.values()]
        *totals, count = rank_sync.sum_over_ranks([*sums, self.count])
        return {name: total / max(count, 1) for name, total in zip(self._sums, totals, strict=True)}, int(count)


# -- predictions -------------------------------------------------------------------------------------------------------


_Layout = tuple[Any, Sequence[tuple[torch.dtype, Sequence[int]]]]
"""The structure of the outputs, and the dtype and the shape without the first dimension of each of their tensors."""


@torch.no_grad()
def predict(training_step: TrainingStep, source: DataSource, *, has_targets: bool, all_ranks: bool) -> Any:
    """Return the outputs for all samples on the CPU of rank 0, or of all ranks; None on the other ranks (collective).

    Args:
        training_step: The model and its forward pass.
        source: The data, one batch in each step.
        has_targets: Whether the last element of a batch, or its item `target_key`, is no input of the model.
        all_ranks: Whether every rank gets the outputs.

    Raises:
        TypeError: If the outputs have no tensors, or other leaves than tensors.
        ValueError: If a tensor does not have one row for each sample, or the shapes of its rows differ; or if the model
            is sharded and this rank has no batch.
        TrainingError: On every rank, if the outputs of the ranks have different structures.
    """
    world = training_step.parts.world
    collected = _Outputs()
    with training_step.parts.wrapped.evaluating() as model:
        for number, step in enumerate(aligned(training_step, source)):
            for batch in step.batches:
                outputs = training_step.outputs(model, batch, has_targets=has_targets)
                if batch.count:
                    # The rank and the step are the position in data without indices, whose batches the ranks take by
                    # turns. Without shared data, the samples of rank 0 come first, then those of rank 1, and so on.
                    turn = number * world.size + world.rank if source.is_shared else world.rank
                    positions = batch.indices if batch.indices is not None else [turn] * batch.count
                    collected.add(outputs, batch.count, torch.tensor(positions))
    return _collected(collected, all_ranks=all_ranks)


class _Outputs:
    """The outputs of this rank, and the positions of their samples in the data."""

    def __init__(self) -> None:
        self.structure: Any = None
        self._columns: list[list[torch.Tensor]] = []  # for each tensor of the outputs, its part in each batch
        self._positions: list[torch.Tensor] = []

    def add(self, outputs: Any, count: int, positions: torch.Tensor) -> None:
        """Add the outputs of a batch of `count` samples."""
        leaves: list[Any] = []
        structure = pytree.flatten(_without_loss(outputs), leaves, frozenset({torch.Tensor}))
        _check(leaves, count)
        if self._columns and structure != self.structure:
            raise ValueError(
                f"predict: the model must return outputs of one structure for all batches, got {structure} after "
                f"{self.structure}.\nReturn the same tensors for each batch."
            )
        self.structure = structure
        self._columns = self._columns or [[] for _ in leaves]
        for column, leaf in zip(self._columns, leaves, strict=True):
            if column and column[0].shape[1:] != leaf.shape[1:]:
                raise ValueError(
                    f"predict: the outputs of all samples must have equal shapes, got {list(leaf.shape[1:])} after "
                    f"{list(column[0].shape[1:])}.\nPad the outputs to one shape in the model."
                )
            column.append(leaf.cpu())
        self._positions.append(positions)

    @property
    def layout(self) -> _Layout | None:
        """The layout of the outputs; None on a rank without samples."""
        if not self._columns:
            return None
        return self.structure, [(column[0].dtype, tuple(column[0].shape[1:])) for column in self._columns]

    def tensors(self, layout: _Layout) -> list[torch.Tensor]:
        """Return the positions and the outputs of all samples of this rank, each as one tensor."""
        columns = self._columns or [[torch.empty(0, *shape, dtype=dtype)] for dtype, shape in layout[1]]
        positions = torch.cat(self._positions) if self._positions else torch.empty(0, dtype=torch.int64)
        return [positions, *[torch.cat(column) for column in columns]]


def _without_loss(outputs: Any) -> Any:
    """Return the outputs without the loss of the batch, which models of Hugging Face return beside them."""
    if not isinstance(outputs, Mapping):
        return outputs
    return {
        name: output
        for name, output in outputs.items()
        if not (name == "loss" and isinstance(output, torch.Tensor) and not output.dim())
    }


def _check(leaves: Sequence[Any], count: int) -> None:
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "no tensor"
        raise TypeError(
            f"predict: the model must return a tensor, or a container of tensors, got {kinds}.\n"
            f"Return tensors from forward()."
        )
    for leaf in leaves:
        if leaf.shape[:1] != (count,):
            raise ValueError(
                f"predict: each tensor of the outputs must have one row per sample ({count}), got a tensor of shape "
                f"{list(leaf.shape)}.\nReturn outputs of shape [{count}, ...], not a mean or a loss."
            )


def _collected(own: _Outputs, *, all_ranks: bool) -> Any:
    """Gather the outputs of all ranks, and order them (collective)."""
    # 1. compare the layouts; a rank without samples has none
    layouts = collectives.all_gather_object(own.layout)
    ranks = [rank for rank, layout in enumerate(layouts) if layout is not None]
    layout = layouts[ranks[0]] if ranks else None
    if layout is None:
        raise raised_on_all_ranks(
            TrainingError("predict: the data have no samples on any rank.\nCheck the source of the data.")
        )
    others = [rank for rank in ranks if layouts[rank] != layout]
    if others:
        raise raised_on_all_ranks(
            TrainingError(
                f"predict: the outputs of {rank_text.name_ranks(others)} have another structure, dtype or shape than "
                f"those of rank {ranks[0]}: {layouts[others[0]]}, expected {layout}.\n"
                f"Return the same tensors for each batch, padded to one shape."
            )
        )
    # 2. gather the tensors
    control = group_argument.resolve(None, "predict").control
    tensors = [tensor.to(control) for tensor in own.tensors(layout)]
    gathered = collectives.all_gather(tensors) if all_ranks else collectives.gather(tensors, dst=0)
    if gathered is None:
        return None
    # 3. order the samples: stable, since the samples of a batch may have one position
    positions, *columns = [torch.cat([part.cpu() for part in parts]) for parts in zip(*gathered, strict=True)]
    order = positions.argsort(stable=True)
    ordered: Iterator[torch.Tensor] = iter([column[order] for column in columns])
    return pytree.unflatten(layout[0], ordered)
