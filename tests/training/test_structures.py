"""Batches of any structure, and models that return their loss, train like pairs of tensors."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import mpicomm
from tests.training.test_steps import FEATURES, assert_close, make_model, samples, train

pytestmark = pytest.mark.mpi

HALF = FEATURES // 2


class Structured(Dataset[Any]):
    """The samples of tests/training/test_steps.py, in another structure."""

    def __init__(self, count: int, structure: Callable[..., Any]) -> None:
        self.pairs, self.structure = samples(count), structure

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        x, label = self.pairs[index]
        return self.structure(x[:HALF], x[HALF:], label)


class Net(nn.Module):
    """A model whose forward pass calls `take` with the layers and the batch, which contains two halves of the input."""

    def __init__(self, take: Callable[..., Any]) -> None:
        super().__init__()
        self.layers, self.take = make_model(), take

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.take(self.layers, *args, **kwargs)


def joined(layers: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return layers(torch.cat([a, b], dim=1))


def of_nested(layers: nn.Module, inputs: Any) -> torch.Tensor:
    a, rest = inputs
    assert rest["name"] == ["sample"] * len(a)
    return joined(layers, a, rest["b"][0])


def with_loss(layers: nn.Module, a: torch.Tensor, b: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    logits = joined(layers, a, b)
    return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def with_loss_inside(*arguments: Any) -> Any:
    return types.SimpleNamespace(**with_loss(*arguments))


STRUCTURES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "several inputs": (lambda a, b, t: (a, b, t), joined, {}),
    "nested, with text": (lambda a, b, t: ((a, {"b": (b,), "name": "sample"}), t), of_nested, {}),
    "a mapping": (lambda a, b, t: {"b": b, "labels": t, "a": a}, joined, {}),
    "a mapping with its own key": (lambda a, b, t: {"a": a, "b": b, "y": t}, joined, {"target_key": "y"}),
    "a mapping for a model that returns its loss": (
        lambda a, b, t: {"a": a, "b": b, "labels": t},
        with_loss,
        {"loss_fn": None},
    ),
    "a tuple for a model that returns its loss in an object": (
        lambda a, b, t: (a, b, t),
        with_loss_inside,
        {"loss_fn": None},
    ),
}


def make_trainer(model: nn.Module, **options: Any) -> mpicomm.Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = {"loss_fn": nn.functional.cross_entropy, "batch_size": 8, "progress": "none", **options}
    return mpicomm.Trainer(model, optimizer, **given)


@pytest.mark.parametrize(
    ("name", "strategy"), [*((name, "ddp") for name in STRUCTURES), *((name, "fsdp") for name in list(STRUCTURES)[-2:])]
)
def test_every_structure_trains_as_pairs_do(world: mpicomm.World, name: str, strategy: str) -> None:
    structure, take, options = STRUCTURES[name]
    count = 8 * world.size + 3
    model = Net(take)
    trainer = make_trainer(model, strategy=strategy, **options)
    trainer.fit(Structured(count, structure), 2)
    found = [each.full_tensor() if strategy == "fsdp" else each for each in model.parameters()]  # type: ignore[operator]
    assert_close([each.detach() for each in found], train(samples(count), batch_size=8))
    seen = []

    def is_right(outputs: Any, targets: Any) -> torch.Tensor:
        seen.append(targets)
        if "loss_fn" not in options:
            return outputs.argmax(dim=1) == targets
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
        return logits.argmax(dim=1) == (targets["labels"] if isinstance(targets, dict) else targets[-1])

    figures = trainer.evaluate(Structured(count, structure), {"accuracy": is_right})
    assert figures["samples"] == count
    assert 0.5 < figures["accuracy"] <= 1
    assert figures["loss"] < 0.69


def test_a_batch_that_does_not_fit_the_model_is_refused(world: mpicomm.World) -> None:
    trainer = make_trainer(make_model())
    with pytest.raises(TypeError, match=r"the batch does not fit the model's forward\(input\): too many positional"):
        trainer.fit(Structured(32, lambda a, b, t: (a, b, t)), 1)
    with pytest.raises(TypeError, match=r"the batch does not fit the model's forward\(input\)"):
        trainer.evaluate(Structured(32, lambda a, b, t: {"a": a, "b": b, "labels": t}))


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r"got a tensor of shape \[4\]\.\nUse reduction=\"mean\""),
        (None, r"without loss_fn, the model must return .*, got a tensor of shape \[4, 2\]\.\nPass a loss"),
    ],
    ids=["unreduced", "none"],
)
def test_an_invalid_loss_is_refused_at_the_first_step(world: mpicomm.World, loss_fn: Any, message: str) -> None:
    model = Net(lambda layers, x, labels=None: layers(x))
    trainer = make_trainer(model, loss_fn=loss_fn, batch_size=4)
    with pytest.raises(ValueError, match=message):
        trainer.fit(samples(8 * world.size), 1)
    assert trainer.position.step == 0
    trainer.loss_fn = nn.functional.cross_entropy
    trainer.fit(samples(8 * world.size), 1)  # the refused step has left no rank waiting for another


class InAnObject(nn.Module):
    """A model in which FSDP finds no layers, and whose output is an object that FSDP does not inspect."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return types.SimpleNamespace(logits=self.layer(x))


def test_outputs_without_tensors_are_refused_with_fsdp(world: mpicomm.World) -> None:
    """Otherwise each rank would train with its own gradients, without an error."""
    trainer = make_trainer(
        InAnObject(), loss_fn=lambda out, y: nn.functional.cross_entropy(out.logits, y), strategy="fsdp"
    )
    with pytest.raises(TypeError, match=r"FSDP found no tensor in the model's outputs"):
        trainer.fit(samples(8 * world.size), 1)
