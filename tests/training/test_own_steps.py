"""Training steps of the user, with several losses and several optimizers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpicomm
from mpicomm.training.trainer import Trainer
from tests.training.job import digest
from tests.training.test_steps import FEATURES, assert_close, make_model, samples, train

pytestmark = pytest.mark.mpi


def cross_entropy_step(model: Any, batch: Any) -> torch.Tensor:
    x, labels = batch
    return nn.functional.cross_entropy(model(x), labels)


def make_trainer(model: nn.Module, step: Any, **options: Any) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Trainer(model, optimizer, training_step=step, progress="none", **options)


@pytest.mark.parametrize("options", [{}, {"strategy": "fsdp"}, {"grad_accum_steps": 2}], ids=str)
def test_a_step_of_the_user_trains_as_the_loss_function_does(world: mpicomm.World, options: dict[str, Any]) -> None:
    data, model = samples(53), make_model()
    trainer = make_trainer(model, cross_entropy_step, batch_size=4, **options)
    history = trainer.fit(data, 2, data)
    whole = [each.full_tensor() if "strategy" in options else each for each in model.parameters()]  # type: ignore[operator]
    assert_close([each.detach() for each in whole], train(data, batch_size=4, **options_of_ddp(options)))
    assert history[-1]["eval_loss"] == pytest.approx(trainer.evaluate(data)["loss"])


def options_of_ddp(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "strategy"}


def metrics_step(model: Any, batch: Any) -> dict[str, Any]:
    x, labels = batch
    outputs = model(x)
    loss, penalty = nn.functional.cross_entropy(outputs, labels), outputs.pow(2).mean()
    right = (outputs.argmax(dim=1) == labels).double().mean()
    return {"loss": loss + 0.1 * penalty, "penalty": penalty, "right": right, "first": x[:, 0].mean()}


def test_further_metrics_are_means_over_all_samples(world: mpicomm.World) -> None:
    """Uneven batches count by their samples; a run in parts writes the same entries."""
    data, entries = samples(53), []
    trainer = make_trainer(make_model(), metrics_step, batch_size=4, log_every=3, logger=entries.append)
    history = trainer.fit(data, 1, data, {"penalty": lambda found, _: found["penalty"]})
    assert history[0]["penalty"] > 0
    if world.rank == 0:
        logged = [each for each in entries if each["event"] == "step"]
        assert all({"penalty", "right", "first"} <= each.keys() for each in logged)
        before = [0, *(each["consumed"] for each in logged)]
        counts = [end - start for start, end in itertools.pairwise(before)]
        # the last entry is written at the end of the epoch, before `consumed` is reset
        mean = sum(each["first"] * count for each, count in zip(logged, counts, strict=True)) / sum(counts)
        assert sum(counts) == 53
        assert mean == pytest.approx(data.tensors[0][:, 0].double().mean().item(), rel=1e-5)


class Pair(nn.Module):
    """Two networks with separate losses, of which the second takes the detached outputs of the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(FEATURES, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        return hidden, self.second(hidden.detach())


def pair_losses(found: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, outputs = found
    return (hidden.mean(dim=1) - batch[0].sum(dim=1)).pow(2).mean(), nn.functional.cross_entropy(outputs, batch[1])


def pair_step(model: Any, batch: Any) -> dict[str, Any]:
    first, second = pair_losses(model(batch[0]), batch)
    return {"loss": first + second, "first": first, "second": second}


def pair_trainer(directory: Path | None, **options: Any) -> Trainer:
    model = Pair()
    optimizer = mpicomm.CombinedOptimizer(
        [torch.optim.AdamW(model.first.parameters(), lr=0.01), torch.optim.SGD(model.second.parameters(), 0.1, 0.9)]
    )
    return Trainer(
        model,
        optimizer,
        training_step=pair_step,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        batch_size=4,
        checkpoint_dir=directory,
        progress="none",
        **options,
    )


@pytest.mark.each_torch("trainer")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_losses_and_optimizers(world: mpicomm.World, directory: Path, strategy: str) -> None:
    data = samples(4 * 5 * world.size)
    whole = pair_trainer(None, strategy=strategy)
    whole.fit(data, 2)
    for steps in (1, 7, 10):
        trainer = pair_trainer(directory, strategy=strategy)
        trainer.fit(data, max_steps=steps)
    assert digest(trainer) == digest(whole)
    found = whole.wrapped.inner.state_dict()
    full = [each.full_tensor() if strategy == "fsdp" else each for each in found.values()]
    assert_close(full, pair_by_hand(data, 4 * world.size))


def pair_by_hand(data: Any, batch: int) -> list[torch.Tensor]:
    from tests.training.test_steps import order_of

    model = Pair()
    optimizers = [
        torch.optim.AdamW(model.first.parameters(), 0.01),
        torch.optim.SGD(model.second.parameters(), 0.1, 0.9),
    ]
    x, y = data.tensors
    for step in range(10):
        order = order_of(data, step // 5, 1)
        chosen = order[step % 5 * batch : (step % 5 + 1) * batch]
        for each, rate in zip(optimizers, (0.01, 0.1), strict=True):
            each.param_groups[0]["lr"] = rate * 0.9**step
            each.zero_grad()
        for loss in pair_losses(model(x[chosen]), (x[chosen], y[chosen])):
            loss.backward()
        for each in optimizers:
            each.step()
    return [each.detach() for each in model.state_dict().values()]


@pytest.mark.parametrize(
    ("found", "error", "message"),
    [
        (lambda loss: loss.item(), TypeError, r"training_step must return a tensor of shape \[\], or a mapping"),
        (lambda loss: {"other": loss}, TypeError, r"training_step must return a tensor .* got a NoneType"),
        (lambda loss: loss.detach(), ValueError, r"training_step must return a loss that depends on"),
        (lambda loss: {"loss": loss, "step": 1.0}, ValueError, r"training_step: 'step' is the name of a field"),
        (lambda loss: {"loss": loss, 1: 2.0}, TypeError, "training_step: the name of a value must be a str, got 1"),
        (lambda loss: {"loss": loss, "a": torch.ones(2)}, ValueError, r"training_step: a must be a number or a tensor"),
    ],
)
def test_other_results_of_a_step_are_refused(world: mpicomm.World, found: Any, error: Any, message: str) -> None:
    trainer = make_trainer(make_model(), lambda *given: found(cross_entropy_step(*given)), batch_size=4)
    with pytest.raises(error, match=message):
        trainer.fit(samples(4 * world.size), 1)


def test_optimizers_with_a_common_parameter_are_refused(world: mpicomm.World) -> None:
    model = make_model()
    with pytest.raises(ValueError, match="more than one parameter group"):
        mpicomm.CombinedOptimizer([torch.optim.SGD(model.parameters()) for _ in range(2)])
    with pytest.raises(TypeError, match="optimizers must be a non-empty list of optimizers, got"):
        mpicomm.CombinedOptimizer(model.parameters())
