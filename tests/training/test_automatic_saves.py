"""Runs with save_every="auto": rank 0 decides by its clock, and all ranks save after the same steps."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import mpicomm
from mpicomm.training.checkpoint import Checkpoints
from mpicomm.training.trainer import Trainer
from tests.time_limits import EVENT_SECONDS, scaled
from tests.training.job import digest
from tests.training.test_checkpoints import complete, fit, make_trainer

pytestmark = [pytest.mark.mpi, pytest.mark.each_torch("trainer")]

ALWAYS, NEVER = 1e-9, 1e9
"""Hours between failures for which each step, and no step but the first, is followed by a save."""


def automatic(directory: Path, node_mtbf_hours: float, **options: Any) -> Trainer:
    return make_trainer(directory, save_every="auto", node_mtbf_hours=node_mtbf_hours, keep_checkpoints=99, **options)


def entries(directory: Path, event: str) -> list[dict[str, Any]]:
    """Return the entries of a kind in the metrics file, the same on all ranks (collective)."""
    mpicomm.barrier()
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def steps(names: list[str]) -> list[int]:
    return [int(name.split("-")[1]) for name in names]


class WaitForSaves(mpicomm.Callback):
    """Lets the save of the previous step complete, so that the next step can be followed by a save."""

    def __init__(self) -> None:
        self.checkpoints: Checkpoints | None = None

    def on_step_end(self, trainer: Trainer) -> None:
        while self.checkpoints is not None and self.checkpoints.is_saving:
            time.sleep(0.01)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_save_when_the_interval_of_rank_0_has_passed(
    world: mpicomm.World, directory: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, save, store, saves = [], Checkpoints.save, Checkpoints._store, WaitForSaves()

    def recorded_save(checkpoints: Checkpoints, *arguments: Any, **options: Any) -> None:
        saves.checkpoints = checkpoints
        save(checkpoints, *arguments, **options)

    def recorded_store(checkpoints: Checkpoints, temporary: Path, *arguments: Any) -> str:
        written.append(temporary.name)
        return store(checkpoints, temporary, *arguments)

    monkeypatch.setattr(Checkpoints, "save", recorded_save)
    monkeypatch.setattr(Checkpoints, "_store", recorded_store)
    trainer = automatic(directory, ALWAYS, strategy=strategy, callbacks=[saves])
    fit(trainer, max_steps=5)
    saved = steps(complete(directory))
    assert saved[0] == 1
    assert len(saved) >= 3
    assert len({tuple(names) for names in mpicomm.all_gather_object(written)}) == 1
    chosen = entries(directory, "save_interval")
    assert [entry["step"] for entry in chosen] == saved[: len(chosen)]
    assert all(entry["mtbf_s"] == 3600 * ALWAYS / world.num_nodes for entry in chosen)


def test_a_save_before_the_first_update_changes_nothing(world: mpicomm.World, directory: Path) -> None:
    """torch makes the state of an optimizer by a step with zero gradients, which Adam would count."""
    digests = []
    for number, save_every in enumerate((None, 1)):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters())
        data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
        calls = itertools.count()

        def loss_of(output: torch.Tensor, target: torch.Tensor, calls: Any = calls) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(output, target)
            return loss * float("inf") if next(calls) == 0 else loss

        options = {"save_every": save_every, "checkpoint_dir": directory / str(number), "progress": "none"}
        trainer = Trainer(model, optimizer, loss_of, batch_size=4, on_nonfinite="skip", **options)
        trainer.fit(data, 1, max_steps=6)
        digests.append([parameter.tolist() for parameter in model.parameters()])
        steps_taken = {float(state["step"]) for state in optimizer.state.values()}
        assert len(steps_taken) == 1
        digests.append(steps_taken)
    assert digests[:2] == digests[2:]


def test_the_interval_must_be_the_same_on_all_ranks(world: mpicomm.World, directory: Path) -> None:
    if world.size == 1:
        pytest.skip("needs two ranks")
    trainer = make_trainer(directory, save_every=2 if world.rank == 0 else 3)
    with pytest.raises(mpicomm.MpicommError, match="save_every"):
        fit(trainer)


def test_a_rare_failure_needs_few_saves(
    world: mpicomm.World, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = automatic(directory, NEVER, progress="lines")
    fit(trainer)
    assert steps(complete(directory)) == [1, trainer.position.step]
    (chosen,) = entries(directory, "save_interval")
    assert chosen["interval_s"] == pytest.approx((2 * chosen["save_s"] * chosen["mtbf_s"]) ** 0.5, rel=0.01)
    line = f"a checkpoint every {chosen['interval_s']:.3g} s: a save delays training by {chosen['save_s']:.3g} s"
    assert (line in capfd.readouterr().out) == (world.rank == 0)


def test_a_run_in_parts_is_the_run_without_saves(world: mpicomm.World, directory: Path) -> None:
    whole = make_trainer(None)
    expected = fit(whole)
    for max_steps in (2, 5, None):
        trainer = automatic(directory, ALWAYS)
        history = fit(trainer, max_steps=max_steps)
    assert history == expected
    assert digest(trainer) == digest(whole)


class Step4(mpicomm.Callback):
    def __init__(self) -> None:
        self.has_ended = threading.Event()

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.position.step == 4:
            self.has_ended.set()


def test_a_due_save_does_not_wait_for_the_previous_one(
    world: mpicomm.World, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_4, store, wait, early = Step4(), Checkpoints._store, Checkpoints.wait, []

    def store_later(checkpoints: Checkpoints, *arguments: Any) -> str:
        assert step_4.has_ended.wait(scaled(EVENT_SECONDS))
        return store(checkpoints, *arguments)

    def recorded_wait(checkpoints: Checkpoints) -> None:
        if checkpoints.is_saving and not step_4.has_ended.is_set():
            early.append(checkpoints.newest)
            step_4.has_ended.set()  # instead of a deadlock
        wait(checkpoints)

    monkeypatch.setattr(Checkpoints, "_store", store_later)
    monkeypatch.setattr(Checkpoints, "wait", recorded_wait)
    fit(automatic(directory, ALWAYS, callbacks=[step_4]), max_steps=6)
    assert not early
    assert steps(complete(directory))[:2] in ([1, 5], [1, 6])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_every": "auto"}, r"time between failures of a node, got node_mtbf_hours=None\.\nPass node_mtbf_hours"),
        ({"node_mtbf_hours": 5.0}, r"node_mtbf_hours=5\.0 requires save_every='auto', got save_every=None"),
        ({"save_every": 3, "node_mtbf_hours": 5}, r"node_mtbf_hours=5 requires save_every='auto', got save_every=3"),
    ],
)
def test_a_failure_rate_is_needed_for_auto_only(world: mpicomm.World, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(None, torch.nn.Linear(2, 2), **options)
