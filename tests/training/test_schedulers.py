"""Changes of the learning rate: they depend on the metrics of an epoch, and do not occur at skipped steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpicomm
from tests.training.job import digest
from tests.training.test_steps import make_model, samples

pytestmark = pytest.mark.mpi


def make_trainer(directory: Path | None = None, *, leave_in_evaluation: int = 0, **options: Any) -> mpicomm.Trainer:
    """Return a trainer that halves its learning rate after each epoch but the first, which remains the best one."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.99)

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() and trainer.position.epoch == leave_in_evaluation:
            trainer._stop_request.why = "enough"
        return nn.functional.cross_entropy(outputs, labels)

    trainer = mpicomm.Trainer(
        model,
        optimizer,
        loss_fn,
        scheduler=scheduler,
        checkpoint_dir=directory,
        batch_size=8,
        progress="none",
        **options,
    )
    return trainer


def state_of(trainer: mpicomm.Trainer) -> tuple[Any, ...]:
    return trainer.optimizer.param_groups[0]["lr"], trainer.scheduler.state_dict(), digest(trainer)


@pytest.mark.parametrize("save_every", [None, 2])
def test_a_plateau_of_the_evaluation_lowers_the_rate(
    world: mpicomm.World, directory: Path, save_every: int | None
) -> None:
    """A run that was stopped during an evaluation and after an epoch is bit-identical to an uninterrupted one."""
    train, test = samples(16 * world.size), samples(20, seed=1)
    whole = make_trainer()
    expected = whole.fit(train, 4, test)
    assert whole.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3
    assert whole.scheduler.best == expected[0]["eval_loss"]
    first = make_trainer(directory, save_every=save_every, leave_in_evaluation=2)
    with pytest.raises(mpicomm.Preempted):
        first.fit(train, 4, test)
    assert first.scheduler.last_epoch == 1, "the second epoch has no figure yet"
    for epochs in (3, 4):
        again = make_trainer(directory, save_every=save_every)
        history = again.fit(train, epochs, test)
    assert history == expected
    assert state_of(again) == state_of(whole)
    states = mpicomm.all_gather_object(again.scheduler.state_dict())
    assert all(each == states[0] for each in states)


def test_a_plateau_of_the_training_or_of_a_metric(world: mpicomm.World) -> None:
    train = samples(16 * world.size)
    trainer = make_trainer()
    history = trainer.fit(train, 3)
    assert (trainer.scheduler.best, trainer.scheduler.last_epoch) == (history[0]["loss"], 3)
    trainer = make_trainer(monitor="size")
    trainer.fit(train, 2, train, {"size": lambda out, _: out.abs().mean(dim=1)})
    assert trainer.scheduler.best == trainer.position.history[0]["size"]
    with pytest.raises(ValueError, match=r"monitor must be one of .*, 'loss', 'eval_loss', got 'size'"):
        trainer.fit(train, 3, train)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_scheduler_skips_the_steps_that_overflow_in_float16(
    world: mpicomm.World, strategy: str, max_grad_norm: float | None
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    parameters: list[list[torch.Tensor]] = []

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        local = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
        parameters.append([each.detach().clone() for each in local] if strategy == "ddp" else [])
        loss = nn.functional.cross_entropy(outputs.float(), labels)
        overflows = trainer.position.step == 1 and world.rank == world.size - 1
        return loss * 1e30 if overflows else loss  # the loss is finite, its gradients are not

    trainer = mpicomm.Trainer(
        model,
        optimizer,
        loss_fn,
        scheduler=scheduler,
        precision="float16",
        strategy=strategy,
        max_grad_norm=max_grad_norm,
        batch_size=8,
        progress="none",
    )
    trainer.fit(samples(8 * world.size * 4), 1)
    assert trainer.position.step == 4
    rates = mpicomm.all_gather_object(optimizer.param_groups[0]["lr"])
    assert rates == [0.1 * 0.5**3] * world.size
    assert trainer.precision.scaler.get_scale() == 2.0**16 / 2
    if strategy == "ddp":
        before, after = parameters[-3:-1]  # at the second and the third of four steps
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), "the step was left out"
    assert all(torch.isfinite(each).all() for each in model.parameters())
