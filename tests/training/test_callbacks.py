"""Callbacks: their order, their state in a run that is resumed, and the ones that the package provides."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

import mpicomm
from mpicomm.training.trainer import Trainer
from tests.training.job import digest
from tests.training.test_checkpoints import complete, fit, make_trainer
from tests.training.test_steps import make_model, samples

pytestmark = pytest.mark.mpi


class Recorder(mpicomm.Callback):
    """Records the hooks with the positions at which they are called."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def add(self, trainer: Trainer, hook: str, *more: Any) -> None:
        self.events.append((hook, trainer.position.name, *more))

    def on_setup(self, trainer: Trainer) -> None:
        self.add(trainer, "setup")

    def on_fit_start(self, trainer: Trainer) -> None:
        self.add(trainer, "fit_start")

    def on_fit_end(self, trainer: Trainer) -> None:
        self.add(trainer, "fit_end")

    def on_epoch_start(self, trainer: Trainer) -> None:
        self.add(trainer, "epoch_start")

    def on_epoch_end(self, trainer: Trainer) -> None:
        self.add(trainer, "epoch_end", trainer.position.history[-1]["eval_loss"])

    def on_step_end(self, trainer: Trainer) -> None:
        self.add(trainer, "step_end")

    def on_eval_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self.add(trainer, "eval_end", metrics["eval_loss"])

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        assert (path / "COMPLETE").exists()
        self.add(trainer, "checkpoint", path.name)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self.add(trainer, "exception", type(error).__name__)


def test_hooks_are_called_in_order_on_all_ranks(world: mpicomm.World, directory: Path) -> None:
    recorder = Recorder()
    data = samples(2 * 4 * world.size)
    trainer = make_trainer(directory, make_model(), batch_size=4, callbacks=[recorder])
    history = trainer.fit(data, 2, data)
    first, second = (each["eval_loss"] for each in history)
    end = "step-000000002-epoch-00001-evaluated", "step-000000004-epoch-00002-evaluated"
    assert recorder.events == [
        ("setup", "step-000000000"),
        ("fit_start", "step-000000000"),
        ("epoch_start", "step-000000000"),
        ("step_end", "step-000000001"),
        ("step_end", "step-000000002"),
        ("eval_end", end[0], first),
        ("epoch_end", end[0], first),
        ("epoch_start", end[0]),
        ("step_end", "step-000000003"),
        ("step_end", "step-000000004"),
        ("eval_end", end[1], second),
        ("epoch_end", end[1], second),
        ("checkpoint", end[1], end[0]),
        ("checkpoint", end[1], end[1]),
        ("fit_end", end[1]),
    ]
    gathered = mpicomm.all_gather_object(recorder.events)
    assert gathered == [recorder.events] * world.size


def test_values_with_the_name_of_a_field_are_refused(world: mpicomm.World) -> None:
    data = samples(4 * world.size)
    trainer = make_trainer(None, make_model(), batch_size=4)
    with pytest.raises(ValueError, match=r"write_metrics: 'step' is the name of a field of each entry.\nUse another"):
        trainer.write_metrics("mine", step=99)
    with pytest.raises(ValueError, match=r"the Trainer writes the entries 'start'.\nUse another name, such as"):
        trainer.write_metrics("start", note=1)
    for name in ("time", "samples"):
        with pytest.raises(ValueError, match=f"fit: metrics: '{name}' is the name of a field of each entry"):
            trainer.fit(data, 1, data, {name: lambda outputs, targets: outputs.mean()})
    assert trainer.position.step == 0


def test_several_callbacks_of_one_class_are_called(world: mpicomm.World) -> None:
    recorders = [Recorder(), Recorder()]
    data = samples(4 * world.size)
    make_trainer(None, make_model(), batch_size=4, callbacks=recorders).fit(data, 1, data)
    assert recorders[0].events
    assert recorders[0].events == recorders[1].events


class Failing(mpicomm.Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        raise LookupError(f"step {trainer.position.step}")

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        raise AssertionError("the error of a hook replaced the first one")


def test_an_exception_in_a_hook_leaves_fit(world: mpicomm.World) -> None:
    recorder = Recorder()
    trainer = make_trainer(None, make_model(), batch_size=4, callbacks=[Failing(), recorder])
    failed = pytest.warns(RuntimeWarning, match=r"Failing.on_exception failed: AssertionError: the error of")
    with failed, pytest.raises(LookupError, match="step 1"):
        trainer.fit(samples(4 * world.size), 1)
    assert recorder.events[-1] == ("exception", "step-000000001", "LookupError")


class Counter(mpicomm.Callback):
    """Counts hooks, and sums losses in a tensor."""

    def __init__(self) -> None:
        self.counts = {"step": 0, "epoch_start": 0, "epoch_end": 0, "eval": 0, "checkpoints": []}
        self.losses = torch.zeros((), dtype=torch.float64)

    def on_epoch_start(self, trainer: Trainer) -> None:
        self.counts["epoch_start"] += 1

    def on_epoch_end(self, trainer: Trainer) -> None:
        self.counts["epoch_end"] += 1

    def on_step_end(self, trainer: Trainer) -> None:
        self.counts["step"] += 1

    def on_eval_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self.counts["eval"] += 1
        self.losses = self.losses * 0.5 + metrics["eval_loss"]

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        if path.name not in self.counts["checkpoints"]:
            self.counts["checkpoints"].append(path.name)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts, self.losses = state["counts"], state["losses"]


def all_callbacks() -> list[Any]:
    return [Counter(), mpicomm.EMA(0.7), mpicomm.EarlyStopping(patience=9), mpicomm.BestCheckpoint(), mpicomm.EMA(0.9)]


def states(callbacks: list[Any]) -> list[dict[str, Any]]:
    """Return the states of all callbacks, with digests of the averages (of this rank's shards)."""
    found = []
    for each in callbacks:
        state = each.state_dict()
        if "averages" in state:
            local = [each.to_local() if isinstance(each, DTensor) else each for each in state["averages"]]
            state["averages"] = [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in local]
        found.append(state)
    return found


@pytest.mark.each_torch("trainer")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_in_parts_has_the_states_of_one_run(world: mpicomm.World, directory: Path, strategy: str) -> None:
    """The parts end within epochs, between them, and by a stop request within an evaluation of `eval_every`."""
    options = {"strategy": strategy, "save_every": 2}
    fit_options = {"eval_every": 2}

    def run(where: Path, **limits: Any) -> tuple[Any, ...]:
        callbacks = all_callbacks()
        trainer = make_trainer(where, callbacks=callbacks, **options)
        history = fit(trainer, **{**fit_options, **limits})
        return trainer, history, callbacks

    whole, expected, callbacks = run(directory / "whole")
    steps = whole.position.step
    assert callbacks[0].counts["step"] == steps
    assert callbacks[0].counts["epoch_start"] == callbacks[0].counts["epoch_end"] == 3
    ends = {int(each["step"]) for each in expected}
    assert callbacks[0].counts["eval"] == len(ends | set(range(2, steps + 1, 2))), "each step counts once"
    parts = directory / "parts"
    run(parts, max_steps=1)
    run(parts, max_steps=3)
    run(parts, epochs=2)
    interrupted = make_trainer(parts, callbacks=all_callbacks(), **options)
    request_stop_within_evaluation(interrupted)
    with pytest.raises(mpicomm.Preempted):
        fit(interrupted, **fit_options)
    assert interrupted.position.consumed > 0
    last, history, restored = run(parts)
    assert history == expected
    assert digest(last) == digest(whole)
    restored[0].counts["checkpoints"] = callbacks[0].counts["checkpoints"]  # the parts saved at other steps, too
    assert states(restored) == states(callbacks)


def request_stop_within_evaluation(trainer: Trainer) -> None:
    """Request a stop on one rank in the first evaluation within an epoch."""
    inner = trainer.loss_fn

    def requesting(*arguments: Any) -> torch.Tensor:
        if trainer.world.rank == 0 and not torch.is_grad_enabled() and trainer.position.consumed:
            trainer._stop_request.why = "enough"
        assert inner is not None
        return inner(*arguments)

    trainer.loss_fn = requesting


def test_a_missing_callback_is_a_warning_and_a_new_one_starts_anew(world: mpicomm.World, directory: Path) -> None:
    fit(make_trainer(directory, callbacks=[Counter(), Counter()]), 1)
    ema = mpicomm.EMA(0.5)
    counters = [Counter()]
    trainer = make_trainer(directory, callbacks=[*counters, ema])
    with pytest.warns(RuntimeWarning, match="the state of the callback 'Counter-2' is not restored"):
        fit(trainer, 1)
    assert counters[0].counts["epoch_end"] == 1
    for average, parameter in zip(ema.state_dict()["averages"], trainer.wrapped.inner.parameters(), strict=True):
        assert torch.equal(average, parameter), "it starts from the restored parameters"


class Figures:
    """A metric that has given values in successive evaluations."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def callback(self) -> mpicomm.Callback:
        figures = self

        class Next(mpicomm.Callback):
            def on_epoch_end(self, trainer: Trainer) -> None:
                figures.values.pop(0)

        return Next()

    def __call__(self, *_: Any) -> float:
        return self.values[0]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_checkpoint_is_kept(world: mpicomm.World, directory: Path, mode: str) -> None:
    figure = Figures(*(each if mode == "max" else -each for each in (float("nan"), 3.0, 2.0, 3.0, float("nan"), 0.0)))
    best = mpicomm.BestCheckpoint("figure", mode)
    options = {"batch_size": 4, "keep_checkpoints": 1, "save_every": 100}
    at_best: list[torch.Tensor] = []
    data = samples(4 * world.size)

    class Copy(mpicomm.Callback):
        def on_epoch_end(self, trainer: Trainer) -> None:
            if trainer.position.epoch == 2:
                at_best.extend(each.detach().clone() for each in trainer.wrapped.inner.parameters())

    trainer = make_trainer(directory, make_model(), callbacks=[best, figure.callback(), Copy()], **options)
    trainer.fit(data, 6, data, {"figure": figure})
    names = ["step-000000002-epoch-00002-evaluated", "step-000000006-epoch-00006-evaluated"]
    assert complete(directory) == names
    assert best.path == directory / names[0]
    assert best.best == (3.0 if mode == "max" else -3.0)
    model = make_model()
    weights = {"model": model.state_dict()}
    dcp.load(weights, checkpoint_id=best.path, no_dist=True)
    for mine, expected in zip(weights["model"].values(), at_best, strict=True):
        assert torch.equal(mine, expected)


def test_the_best_checkpoint_survives_newer_ones_and_a_resume(world: mpicomm.World, directory: Path) -> None:
    data = samples(4 * world.size)
    for epochs, values in ((3, (1.0, 5.0, 2.0)), (6, (3.0, 2.0, 1.0))):
        figure, best = Figures(*values), mpicomm.BestCheckpoint("figure", "max")
        trainer = make_trainer(
            directory, make_model(), batch_size=4, keep_checkpoints=1, callbacks=[best, figure.callback()]
        )
        trainer.fit(data, epochs, data, {"figure": figure})
        last = f"step-{epochs:09d}-epoch-{epochs:05d}-evaluated"
        assert complete(directory) == ["step-000000002-epoch-00002-evaluated", last]
        assert best.path == directory / complete(directory)[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("monitor", ["eval_loss", "loss"])
def test_the_best_checkpoint_has_the_weights_that_were_measured(
    world: mpicomm.World, directory: Path, strategy: str, monitor: str
) -> None:
    """These are the averages for figures of evaluations. A run that resumes continues with the weights of training."""
    data, best = samples(8 * world.size), mpicomm.BestCheckpoint(monitor)
    options = {"batch_size": 4, "strategy": strategy}
    trainer = make_trainer(directory, make_model(), callbacks=[mpicomm.EMA(0.5), best], **options)
    trainer.fit(data, 2, data)
    again = make_trainer(
        directory, make_model(), callbacks=[mpicomm.EMA(0.5), mpicomm.BestCheckpoint(monitor)], **options
    )
    again.fit(data, 2, data)
    assert best.path == directory / again.position.name, "the newest checkpoint is the best one"
    assert all(map(torch.equal, whole(again), whole(trainer)))
    weights = {"model": make_model().state_dict()}
    dcp.load(weights, checkpoint_id=best.path, no_dist=True)
    loss = trainer_loss([*weights["model"].values()], data)
    of_training = trainer_loss([each.detach() for each in whole(trainer)], data)
    assert trainer.position.history[-1]["eval_loss"] != pytest.approx(of_training, rel=1e-5)
    assert loss == pytest.approx(best.best if monitor == "eval_loss" else of_training, rel=1e-5)


def test_a_checkpoint_cannot_have_the_weights_of_training_and_of_evaluations(world: mpicomm.World) -> None:
    both = [mpicomm.BestCheckpoint("loss"), mpicomm.BestCheckpoint()]
    make_trainer(None, make_model(), callbacks=both)
    with pytest.raises(ValueError, match=r"got BestCheckpoint \(training\) and BestCheckpoint-2 \(evaluations\)"):
        make_trainer(None, make_model(), callbacks=[*both, mpicomm.EMA(0.5), mpicomm.EarlyStopping()])


@pytest.mark.mpi(min_size=2)
def test_kept_checkpoints_that_differ_are_an_error(world: mpicomm.World, directory: Path) -> None:
    """Otherwise a checkpoint has weights of training from some ranks, and averages from others."""

    class Keeper(mpicomm.Callback):
        def kept_checkpoints(self) -> tuple[str, ...]:
            return (trainer.position.name,) if world.rank == 0 else ()

    trainer = make_trainer(directory, make_model(), callbacks=[mpicomm.EMA(0.5), Keeper()])
    with pytest.raises(mpicomm.TrainingError, match=r"kept_checkpoints must be equal on all ranks, got .* on rank 0"):
        trainer.fit(samples(8 * world.size), 1)
    assert complete(directory) == []


def whole(trainer: Trainer) -> list[torch.Tensor]:
    parameters = trainer.wrapped.inner.parameters()
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in parameters]


def test_ema_stays_in_a_skipped_step(world: mpicomm.World) -> None:
    ema, seen = mpicomm.EMA(0.5), []

    class Watch(mpicomm.Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            seen.append((trainer.is_step_taken, ema.state_dict()["averages"][0].sum().item()))

    trainer = make_trainer(None, make_model(), batch_size=4, on_nonfinite="skip", callbacks=[ema, Watch()])
    inner = trainer.loss_fn
    trainer.loss_fn = lambda *batch: inner(*batch) * (float("nan") if len(seen) in (1, 2) else 1.0)
    trainer.fit(samples(16 * world.size), 1)
    assert [is_taken for is_taken, _ in seen] == [True, False, False, True]
    averages = [average for _, average in seen]
    assert averages[0] == averages[1] == averages[2] != averages[3]


def test_a_step_that_is_evaluated_twice_counts_once(world: mpicomm.World) -> None:
    """The last step of an epoch is evaluated by eval_every, and after the epoch."""
    data, stopping, recorder, entries = samples(8 * world.size), mpicomm.EarlyStopping(patience=1), Recorder(), []
    trainer = make_trainer(None, make_model(), batch_size=4, callbacks=[stopping, recorder], logger=entries.append)
    history = trainer.fit(data, 3, data, eval_every=2)
    assert [each["step"] for each in history] == [2, 4, 6]
    assert [each[0] for each in recorder.events].count("eval_end") == 3
    if world.rank == 0:
        found = [(each["event"], each["eval_loss"]) for each in entries if "eval_loss" in each]
        assert found == [(event, each["eval_loss"]) for each in history for event in ("step_eval", "eval")]


def test_early_stopping_ends_the_run_for_good(world: mpicomm.World, directory: Path) -> None:
    data, entries = samples(4 * world.size), []
    values = (1.0, 0.5, 0.4375, 0.625, 0.4375, 0.125, 0.125)  # after 0.5, three are not better by min_delta
    for _ in range(2):
        figure, stopping = Figures(*values), mpicomm.EarlyStopping("figure", patience=3, min_delta=0.125)
        trainer = make_trainer(
            directory, make_model(), batch_size=4, callbacks=[stopping, figure.callback()], logger=entries.append
        )
        history = trainer.fit(data, 7, data, {"figure": figure})
        assert [each["figure"] for each in history] == list(values[:5])
        assert (stopping.best, stopping.count) == (0.5, 3)
    if world.rank == 0:
        ends = [each for each in entries if each["event"] == "ended"]
        ranks = "rank 0" if world.size == 1 else f"ranks 0-{world.size - 1}"
        why = "EarlyStopping: no better figure than 0.5 in 3 comparisons"
        assert [(each["step"], each["why"].split(" on rank")[0]) for each in ends] == [(5, why)] * 2, ranks


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ema_averages_the_parameters_of_the_steps(world: mpicomm.World, directory: Path, strategy: str) -> None:
    decay, data = 0.6, samples(12 * world.size)
    parameters: list[list[torch.Tensor]] = []

    def whole(tensors: Any) -> list[torch.Tensor]:
        return [(each.full_tensor() if isinstance(each, DTensor) else each).detach().clone() for each in tensors]

    class Copy(mpicomm.Callback):
        def on_fit_start(self, trainer: Trainer) -> None:
            parameters.append(whole(trainer.wrapped.inner.parameters()))

        def on_step_end(self, trainer: Trainer) -> None:
            parameters.append(whole(trainer.wrapped.inner.parameters()))

    ema = mpicomm.EMA(decay)
    trainer = make_trainer(None, make_model(), batch_size=4, strategy=strategy, callbacks=[ema, Copy()])
    history = trainer.fit(data, 2, data)
    weights = [
        decay ** (len(parameters) - 1),
        *((1 - decay) * decay ** (len(parameters) - 1 - step) for step in range(1, len(parameters))),
    ]
    assert len(parameters) == 7
    expected = [
        sum(w * p for w, p in zip(weights, of_steps, strict=True)) for of_steps in zip(*parameters, strict=True)
    ]
    averaged = make_model()
    with torch.no_grad():
        for mine, value in zip(averaged.parameters(), expected, strict=True):
            mine.copy_(value)
    x, y = data.tensors
    loss = nn.functional.cross_entropy(averaged(x), y).item()
    assert trainer.evaluate(data)["loss"] == pytest.approx(loss, rel=1e-5)
    assert history[-1]["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert abs(trainer_loss(parameters[-1], data) - loss) > 1e-4, "the average does not differ from the last step"
    trainer.export(directory / "ema.pt")
    mpicomm.barrier()
    exported = torch.load(directory / "ema.pt", weights_only=True)
    for mine, value in zip(exported.values(), expected, strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6)
    for mine, value in zip(whole(trainer.wrapped.inner.parameters()), parameters[-1], strict=True):
        assert torch.equal(mine, value), "the parameters of training are not restored"


def trainer_loss(parameters: list[torch.Tensor], data: Any) -> float:
    model = make_model()
    with torch.no_grad():
        for mine, value in zip(model.parameters(), parameters, strict=True):
            mine.copy_(value)
    x, y = data.tensors
    return nn.functional.cross_entropy(model(x), y).item()


def test_learning_rates_of_all_groups_are_logged(world: mpicomm.World, directory: Path) -> None:
    model = make_model()
    groups = [{"params": model[0].parameters(), "name": "first"}, {"params": model[2].parameters(), "lr": 0.5}]  # type: ignore[index]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    trainer = mpicomm.Trainer(
        model,
        optimizer,
        nn.functional.cross_entropy,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        callbacks=[mpicomm.LearningRateLogger(every=2)],
        batch_size=4,
        checkpoint_dir=directory,
        progress="none",
    )
    trainer.fit(samples(5 * 4 * world.size), 1)
    mpicomm.barrier()
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    found = [(each["step"], each["lr_first"], each["lr_1"]) for each in lines if each["event"] == "learning_rate"]
    assert found == [(step, 0.1 * 0.5**step, 0.5 * 0.5**step) for step in (2, 4)]


@pytest.mark.parametrize("name", ["metrics.csv", "metrics.jsonl"])
def test_metrics_that_cannot_be_written_are_an_error_of_all_ranks(
    world: mpicomm.World, directory: Path, name: str
) -> None:
    """A table of another program, and a directory."""
    path = directory / name
    if world.rank == 0:
        directory.mkdir()
        path.mkdir() if name == "metrics.jsonl" else path.write_text("mine\n")
    mpicomm.barrier()
    recorder = Recorder()
    trainer = make_trainer(directory, callbacks=[recorder], logger="csv")
    with pytest.raises(
        mpicomm.CheckpointError, match=rf"rank 0 cannot write metrics: .*{name}.*\nIf this names a file"
    ):
        fit(trainer)
    assert [event for event, *_ in recorder.events] == ["setup", "exception"]


@pytest.mark.parametrize(
    ("callback", "directory_is_given", "message"),
    [
        (lambda: mpicomm.BestCheckpoint("loss"), False, r"BestCheckpoint requires a checkpoint_dir"),
        (lambda: mpicomm.EarlyStopping("accurracy"), True, r"monitor must be one of 'loss', got 'accurracy'"),
        (lambda: mpicomm.EarlyStopping(patience=0), True, r"patience must be a positive integer, got 0"),
        (lambda: mpicomm.BestCheckpoint(mode="least"), True, r"mode must be 'min' or 'max', got 'least'"),
        (lambda: mpicomm.EMA(1.5), True, r"decay must be a number from 0 to 1, got 1.5"),
    ],
)
def test_arguments_of_callbacks_are_checked(
    world: mpicomm.World, directory: Path, callback: Any, directory_is_given: bool, message: str
) -> None:
    def run() -> None:
        trainer = make_trainer(directory if directory_is_given else None, callbacks=[callback()])
        trainer.fit(samples(8 * world.size), 1)

    with pytest.raises(ValueError, match=message):
        run()
