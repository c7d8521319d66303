"""`Trainer.log`: values from inside a step become means over samples in the step entries, in the losses' all-reduce."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpicomm
from mpicomm.training import rank_sync
from tests.training import test_uneven
from tests.training.test_steps import FEATURES, make_model, make_trainer, samples

pytestmark = pytest.mark.mpi

Entries = list[dict[str, Any]]


def logging_trainer(log: Any, entries: Entries, **options: Any) -> mpicomm.Trainer:
    """Return a trainer whose loss function logs `log(outputs, targets, loss)`; rank 0 appends its step entries."""

    def logger(entry: dict[str, Any]) -> None:
        if entry["event"] == "step":
            entries.append(entry)

    trainer = make_trainer(make_model(), logger=logger, **options)

    def loss_fn(outputs: Any, targets: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(outputs, targets)
        trainer.log(**log(outputs, targets, loss))
        return loss

    trainer.loss_fn = loss_fn
    return trainer


def test_values_are_means_over_ranks_and_steps(world: mpicomm.World) -> None:
    """Ranks also log names that others do not; evaluations and the pass before the first step do not count."""
    entries: Entries = []
    calls = iter(range(10**6))

    def log(outputs: Any, targets: Any, loss: Any) -> dict[str, Any]:
        number = next(calls) if torch.is_grad_enabled() else -1
        named = {f"of_{world.rank}": world.rank} if torch.is_grad_enabled() else {"of_evaluation": 1.0}
        return {"rank": world.rank, "call": number, "own_loss": loss, **named}

    steps = 6
    data = samples(2 * world.size * steps)
    trainer = logging_trainer(log, entries, batch_size=2, log_every=3)
    trainer.fit(data, 1, eval_data=data)
    if world.rank:
        return
    mean_rank = (world.size - 1) / 2
    full = [entry for entry in entries if entry["loss"] is not None]
    assert [entry["step"] for entry in full] == [3, 6]
    for number, entry in enumerate(full):
        assert entry["rank"] == pytest.approx(mean_rank)
        assert entry["call"] == 3 * number + 2  # of the calls 3n + 1 to 3n + 3; call 0 precedes the first step
        assert entry["own_loss"] == pytest.approx(entry["loss"])
        assert [entry[f"of_{rank}"] for rank in range(world.size)] == list(range(world.size))
        assert "of_evaluation" not in entry


def test_a_mean_is_over_samples_in_uneven_batches(world: mpicomm.World) -> None:
    """The last batch has one sample; a batch whose loss is not finite and padding do not count."""
    entries: Entries = []
    stream = test_uneven.IterableSource(2 * world.size * 2 + 3)
    stream.pairs.tensors[0][0] = torch.nan
    trainer = logging_trainer(
        lambda *found: {"own_loss": found[2], "count": len(found[1])}, entries, batch_size=2, on_nonfinite="skip"
    )
    trainer.fit(stream, 1)
    if not world.rank:
        (entry,) = entries
        assert entry["own_loss"] == pytest.approx(entry["loss"])
        # Each of the 4n + 1 samples that count, in 2n batches of two and one of one, has the size of its batch.
        assert entry["count"] == pytest.approx((8 * world.size + 1) / (4 * world.size + 1))


def test_the_reductions_of_the_losses_contain_the_values(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    reduced = rank_sync.sum_over_ranks

    def recorded(values: Any) -> list[float]:
        lengths.append(len(values))
        return reduced(values)

    monkeypatch.setattr(rank_sync, "sum_over_ranks", recorded)
    data = samples(2 * world.size * 8)
    logging_trainer(lambda *_: {}, [], batch_size=2, log_every=3).fit(data, 1)
    assert lengths == [3, 3, 3]
    lengths.clear()
    logging_trainer(lambda *_: {"a": 1, "b": 2.0}, [], batch_size=2, log_every=3).fit(data, 1)
    assert lengths == [3, 4, 7, 7]


def test_a_resumed_run_logs_the_values_of_an_uninterrupted_run(world: mpicomm.World, directory: Path) -> None:
    def run(leave_at: int, **options: Any) -> Entries:
        entries: Entries = []
        trainer = logging_trainer(lambda *found: {"own_loss": found[2]}, entries, batch_size=2, log_every=4, **options)
        inner = trainer.loss_fn
        assert inner is not None

        def leaving(*arguments: Any) -> torch.Tensor:
            if leave_at and trainer.position.step + 1 == leave_at:
                trainer._stop_request.why = "enough"
            return inner(*arguments)

        trainer.loss_fn = leaving
        with contextlib.suppress(mpicomm.Preempted):
            trainer.fit(samples(2 * world.size * 8), 1)
        return [{name: entry[name] for name in ("step", "own_loss", "loss")} for entry in entries if entry["loss"]]

    whole = run(0)
    first, second = run(6, checkpoint_dir=directory), run(0, checkpoint_dir=directory)
    assert first + second == whole
    assert len(whole) == (0 if world.rank else 2)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ({"loss": 1.0}, ValueError, "log: 'loss' is the name of a field of each step entry"),
        ({"a": torch.ones(2)}, ValueError, r"log: a must be a number or a tensor of one element, got .* shape \[2\]"),
        ({"a": "0.5"}, TypeError, r"log: a must be a number or a tensor of one element, got '0.5' \(str\)"),
        ({"a": torch.tensor(1j)}, TypeError, r"log: a must be a number or a tensor of one element, got tensor\(0"),
        ({"a": "text"}, TypeError, r"log: a must be a number or a tensor of one element, got 'text' \(str\)"),
    ],
)
def test_values_that_are_no_numbers(world: mpicomm.World, value: Any, kind: type[Exception], message: str) -> None:
    trainer = make_trainer(nn.Linear(FEATURES, 2))
    with pytest.raises(kind, match=message):
        trainer.log(**value)
