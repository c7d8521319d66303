"""The limits of a run: max_steps, max_time, limit_batches, and evaluations within an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

import mpicomm
from mpicomm.training.resumable_run import RunRequests
from mpicomm.training.trainer import Trainer
from tests.training.job import digest
from tests.training.test_checkpoints import complete, make_trainer
from tests.training.test_steps import make_model, samples

pytestmark = pytest.mark.mpi


def make(directory: Path | None, **options: Any) -> Trainer:
    return make_trainer(directory, make_model(), batch_size=4, **options)


def test_max_steps_ends_within_an_epoch_and_continues_exactly(world: mpicomm.World, directory: Path) -> None:
    data = samples(4 * 5 * world.size)
    whole = make(None)
    expected = whole.fit(data, max_steps=12)
    assert (whole.position.step, whole.position.epoch, len(expected)) == (12, 2, 2)
    for steps, epochs in ((3, 0), (5, 1), (12, 2)):  # 5 is the last step of an epoch, which is complete then
        trainer = make(directory)
        history = trainer.fit(data, max_steps=steps)
        assert (trainer.position.step, len(history)) == (steps, epochs)
        assert complete(directory)[-1] == trainer.position.name
    assert history == expected
    assert digest(trainer) == digest(whole)


def test_max_time_of_one_rank_ends_all_ranks_in_one_step(world: mpicomm.World, directory: Path) -> None:
    """The clock of the last rank reaches the limit in step 3; with a checkpoint directory and without."""
    data, last = samples(4 * 50 * world.size), world.size - 1
    for where in (None, directory):
        trainer = make(where)
        loss_fn = trainer.loss_fn
        assert loss_fn is not None

        def late(*arguments: Any, trainer: Trainer = trainer, loss_fn: Any = loss_fn) -> torch.Tensor:
            if world.rank == last and trainer.position.step == 2:
                trainer._requests._end_at = 0.0
            return loss_fn(*arguments)

        trainer.loss_fn = late
        assert trainer.fit(data, max_time=3600.0) == []
        assert mpicomm.all_gather_object(trainer.position.step) == [3] * world.size
    assert complete(directory) == ["step-000000003"]


def test_a_callback_on_one_rank_stops_all_ranks_after_an_epoch(world: mpicomm.World) -> None:
    class Stop(mpicomm.Callback):
        def on_epoch_end(self, trainer: Trainer) -> None:
            if trainer.world.rank == trainer.world.size - 1:
                trainer.stop("enough")

    trainer = make(None, callbacks=[Stop()])
    assert len(trainer.fit(samples(4 * 2 * world.size), 3)) == 1
    assert mpicomm.all_gather_object(trainer.position.step) == [2] * world.size


def test_a_callback_on_one_rank_stops_all_ranks(world: mpicomm.World) -> None:
    entries: list[dict[str, Any]] = []

    class Stop(mpicomm.Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.world.rank == trainer.world.size - 1 and trainer.position.step == 2:
                trainer.stop("enough")

    trainer = make(None, callbacks=[Stop()], logger=entries.append)
    trainer.fit(samples(4 * 10 * world.size), 1)
    assert mpicomm.all_gather_object(trainer.position.step) == [3] * world.size, "the vote of step 3 contains it"
    if world.rank == 0:
        (end,) = [each for each in entries if each["event"] == "ended"]
        assert end["why"] == f"enough on rank {world.size - 1}"


@pytest.mark.parametrize("grad_accum_steps", [1, 2])
def test_limit_batches_limits_epochs_and_evaluations(world: mpicomm.World, grad_accum_steps: int) -> None:
    data = samples(4 * 10 * world.size)
    trainer = make(None, grad_accum_steps=grad_accum_steps)
    history = trainer.fit(data, 2, data, limit_batches=3)
    steps = -(-3 // grad_accum_steps)
    assert [each["step"] for each in history] == [steps, 2 * steps]
    assert [each["samples"] for each in history] == [steps * grad_accum_steps * 4 * world.size] * 2
    assert [each["eval_samples"] for each in history] == [3 * 4 * world.size] * 2
    first = trainer.evaluate(Subset(data, range(3 * 4 * world.size)))
    assert history[-1]["eval_loss"] == pytest.approx(first["loss"], rel=1e-5), "the evaluation takes the first batches"


def test_eval_every_evaluates_within_epochs(world: mpicomm.World) -> None:
    data, entries = samples(4 * 5 * world.size), []
    plain, trainer = make(None), make(None, logger=entries.append)
    expected = plain.fit(data, 2, data)
    assert trainer.fit(data, 2, data, eval_every=2) == expected, "training does not depend on evaluations"
    assert digest(trainer) == digest(plain)
    if world.rank == 0:
        found = [each for each in entries if each["event"] == "step_eval"]
        assert [each["step"] for each in found] == [2, 4, 6, 8, 10]
        assert found[-1]["eval_loss"] == expected[-1]["eval_loss"]
        assert {each["eval_samples"] for each in found} == {len(data)}


def test_unused_limits_add_no_collective(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checkpoints, callbacks and max_time there is no vote."""
    monkeypatch.setattr("mpicomm.training.resumable_run.StepVote.__init__", lambda *_, **__: pytest.fail("a vote"))
    trainer = make(None)
    monkeypatch.setattr(RunRequests, "check_max_time", lambda _: pytest.fail("a request"))
    trainer.fit(samples(4 * 2 * world.size), 1, max_steps=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"expected a limit of the run, got epochs=None, max_steps=None and max_time=None"),
        ({"epochs": 0}, r"epochs must be a positive integer or None, got 0"),
        ({"max_steps": 0}, r"max_steps must be a positive integer or None, got 0"),
        ({"max_time": -1.0}, r"max_time must be a positive number of seconds or None, got -1.0"),
        ({"epochs": 1, "eval_every": 2}, r"eval_every=2 requires eval_data, got eval_data=None"),
        ({"epochs": 1, "limit_batches": 0}, r"limit_batches must be a positive integer or None, got 0"),
    ],
)
def test_limits_out_of_range_are_refused(world: mpicomm.World, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(None).fit(samples(8), **options)
