"""The objects of a trainer across worlds, of which some end before the objects are complete."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from mpicomm.errors import RankFailedError
from mpicomm.training import parallel
from mpicomm.training.assembly import Assembly
from mpicomm.training.parallel import ParallelOptions
from mpicomm.training.training_step import StepOptions

WORLD: Any = types.SimpleNamespace(device=torch.device("cpu"))


def assembly(strategy: str) -> Assembly:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = StepOptions("labels", None, "float32", skips=False, recovers=True)
    return Assembly(model, optimizer, None, None, ParallelOptions(strategy, None, False, False, False), options)


def wrap(model: nn.Module, *_: Any, **__: Any) -> Any:
    return types.SimpleNamespace(inner=model, model=nn.Sequential(model))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_failure_in_the_assembly_starts_it_again(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RankFailedError("rank 1 of 2 failed")

    assembled = assembly(strategy)
    monkeypatch.setattr(parallel, "wrap", wrap)
    assembled.assemble(WORLD)
    assembled.loss_fn = None
    assembled.step.loss_fn = nn.functional.mse_loss
    monkeypatch.setattr(parallel, "wrap", fail)
    for _ in range(2):
        with pytest.raises(RankFailedError):
            assembled.assemble(WORLD)
    monkeypatch.setattr(parallel, "wrap", wrap)
    assembled.assemble(WORLD)
    assert assembled.step.loss_fn is nn.functional.mse_loss


def test_an_assembly_is_freed_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "wrap", wrap)
    assembled = assembly("ddp")
    assembled.assemble(WORLD)
    wrapped = weakref.ref(assembled.wrapped.model)
    gc.collect()
    gc.disable()
    try:
        del assembled
        assert wrapped() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("strategy", "expected"), [("ddp", [True, True]), ("fsdp", [True, False])])
def test_a_sharded_model_that_is_made_again_has_no_values(
    strategy: str, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "wrap", wrap)
    assembled, found = assembly(strategy), []
    for _ in range(2):
        assembled.assemble(WORLD)
        found.append(assembled.has_values)
    assert found == expected
