"""Training steps with several backends in turn: their duration, and the share of communication."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from mpicomm.bench import timing
from mpicomm.bench.timing import Bench

WIDTHS = {"small": 128, "middle": 512, "large": 2048}
"""Widths of the models, each of two linear layers: 33 k, 525 k and 8.4 M parameters."""

_BATCH = 32  # samples per rank and step
_SAMPLES = 1024
_COMPUTE, _DATA = "compute", "data"


@dataclasses.dataclass(frozen=True)
class ModelRow:
    """Results for one model, strategy and backend: milliseconds per step on the slowest rank."""

    model: str
    parameters: int
    strategy: str
    backend: str
    ms: float
    ms_median: float
    data_ms: float
    """Loading a batch."""
    compute_ms: float
    """Forward pass, backward pass and optimizer of the model on each rank alone, but not more than the step, which can
    be shorter: with FSDP2, a rank updates only its part of the parameters."""
    communication_ms: float
    """The remainder of the step: communication that is not hidden."""


def measure(
    cases: Iterable[tuple[str, str]], groups: Mapping[str, Any], bench: Bench, device: torch.device
) -> list[ModelRow]:
    """Measure training steps (collective).

    Args:
        cases: Pairs of a model and a strategy.
        groups: Process groups by backend name.
        bench: The functions for timing.
        device: The device of the models.
    """
    return [row for model, strategy in cases for row in _rows(model, strategy, groups, bench, device)]


def _rows(
    model: str, strategy: str, groups: Mapping[str, Any], bench: Bench, device: torch.device
) -> Iterator[ModelRow]:
    batches = _batches(WIDTHS[model], device)
    alone = _make(model, device)
    calls = {_DATA: lambda: next(batches), _COMPUTE: _step(alone, batches)}
    calls |= {name: _step(_spread(_make(model, device), strategy, group), batches) for name, group in groups.items()}
    times = timing.in_turn(bench, calls)
    loading, alone_step = times[_DATA].least / 1e3, times[_COMPUTE].least / 1e3
    for name in groups:
        whole = times[name].least / 1e3
        data = min(loading, whole)
        compute = min(max(0.0, alone_step - loading), whole - data)
        yield ModelRow(
            model=model,
            parameters=sum(parameter.numel() for parameter in alone.parameters()),
            strategy=strategy,
            backend=name,
            ms=round(whole, 4),
            ms_median=round(times[name].median / 1e3, 4),
            data_ms=round(data, 4),
            compute_ms=round(compute, 4),
            communication_ms=round(whole - data - compute, 4),
        )


def _make(model: str, device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    width = WIDTHS[model]
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(device)


def _spread(model: nn.Module, strategy: str, group: Any) -> nn.Module:
    if strategy == "ddp":
        return DistributedDataParallel(model, process_group=group)
    mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    for layer in model:  # type: ignore[attr-defined]  # an nn.Sequential
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _step(model: nn.Module, batches: Iterator[Sequence[torch.Tensor]]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def _batches(width: int, device: torch.device) -> Iterator[Sequence[torch.Tensor]]:
    data = TensorDataset(torch.randn(_SAMPLES, width), torch.randn(_SAMPLES, width))
    loader = DataLoader(data, _BATCH, shuffle=True, drop_last=True)
    while True:
        for batch in loader:
            yield [tensor.to(device) for tensor in batch]
