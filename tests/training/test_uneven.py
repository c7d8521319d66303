"""Runs with uneven data on the ranks, or with parameters without optimizer state: no hang, and no loss of data."""

from __future__ import annotations

import concurrent.futures
import os
import random
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    random_split,
)

import mpicomm
from mpicomm.collective_ops import collectives
from mpicomm.training import preemption
from mpicomm.training.checkpoint import Checkpoints
from mpicomm.training.run_directory import RunDirectory
from mpicomm.training.trainer import Trainer
from tests.time_limits import wait_until
from tests.training import test_steps
from tests.training.test_checkpoints import complete
from tests.training.test_steps import FEATURES, assert_close, make_model, samples

pytestmark = pytest.mark.mpi


class IterableSource(IterableDataset[Any]):
    def __init__(self, count: int, start: int = 0) -> None:
        self.pairs = TensorDataset(*[each[start:] for each in samples(start + count).tensors])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pairs)


def make_trainer(model: nn.Module | None = None, *, leave_at: int = 0, **options: Any) -> Trainer:
    model = model or make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    given = {"batch_size": 2, "progress": "none", **options}
    trainer = Trainer(model, optimizer, nn.functional.cross_entropy, **given)
    inner = trainer.loss_fn

    def loss_fn(*arguments: Any) -> torch.Tensor:
        if leave_at and trainer.position.step + 1 == leave_at:
            trainer._stop_request.why = "enough"
        return inner(*arguments)

    trainer.loss_fn = loss_fn
    return trainer


def assert_trained(trainer: Trainer, data: TensorDataset, steps: list[list[int]]) -> None:
    """Compare the parameters with those of one process that trains on these samples in each step."""
    alone = make_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    x, y = data.tensors
    for taken in steps:
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone(x[taken]), y[taken]).backward()
        optimizer.step()
    assert_close(parameters_of(trainer), [each.detach() for each in alone.parameters()])


def parameters_of(trainer: Trainer) -> list[torch.Tensor]:
    """Return the full parameters on every rank (collective)."""
    found = [each.detach() for each in trainer.wrapped.inner.parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("grad_accum_steps", [1, 2])
def test_a_stream_that_ends_sooner_on_some_ranks(world: mpicomm.World, strategy: str, grad_accum_steps: int) -> None:
    whole = 2 * world.size * grad_accum_steps
    count = whole + 2  # one additional batch, on rank 0
    trainer = test_steps.make_trainer(make_model(), batch_size=2, strategy=strategy, grad_accum_steps=grad_accum_steps)
    (epoch,) = trainer.fit(IterableSource(count), 1)
    assert epoch["samples"] == count
    assert_trained(trainer, samples(count), [list(range(whole)), [whole, whole + 1]])
    assert trainer.evaluate(IterableSource(count))["samples"] == count


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_loaders_of_very_different_lengths(world: mpicomm.World, strategy: str) -> None:
    mine = 12 if world.rank == 0 else 2
    loader = DataLoader(samples(12), batch_size=2, sampler=range(mine))
    trainer = test_steps.make_trainer(make_model(), strategy=strategy, grad_accum_steps=4)
    (epoch,) = trainer.fit(loader, 1)
    assert (epoch["samples"], epoch["step"]) == (12 + 2 * (world.size - 1), 2)
    assert_trained(trainer, samples(12), [[*range(8), *[0, 1] * (world.size - 1)], list(range(8, 12))])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_splits_itself_by_rank(world: mpicomm.World, num_workers: int) -> None:
    """It is refused before the first step, unless the program passes shard=False."""
    own = IterableSource(3 + 2 * world.rank, start=4 * world.rank)
    trainer = make_trainer(num_workers=num_workers)
    names = "rank 1" if world.size == 2 else f"ranks 1-{world.size - 1}"
    message = rf"dataset IterableSource: its first sample differs between rank 0 and {names}\.\nSet shard=False"
    with pytest.raises(mpicomm.TrainingError, match=message):
        trainer.fit(own, 1)
    assert trainer.position.step == 0
    count = sum(3 + 2 * rank for rank in range(world.size))
    assert trainer.fit(own, 1, shard=False)[0]["samples"] == count
    assert trainer.evaluate(own, shard=False)["samples"] == count
    outputs = trainer.predict(own, shard=False)
    assert (outputs is None) == (world.rank > 0)
    assert outputs is None or len(outputs) == count


class ByProcess(IterableSource):
    """Yields other samples in each process, as one that reads a queue does."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.full((FEATURES,), float(os.getpid())), torch.tensor(0))] * 6)


def test_a_share_that_differs_between_workers(world: mpicomm.World) -> None:
    """Each worker reads all of it, so samples would be lost."""
    message = r"2 workers cannot share the iterable-style dataset ByProcess: .* on rank.*\nSet num_workers=1, or pass"
    trainer = make_trainer(num_workers=2)
    with pytest.raises(mpicomm.TrainingError, match=message):
        trainer.fit(ByProcess(6), 1, shard=False)
    assert trainer.position.step == 0
    assert make_trainer(num_workers=1).fit(ByProcess(6), 1, shard=False)[0]["samples"] == 6 * world.size


SHARES = [torch.arange(0.0, 8.0), torch.arange(2.0, 10.0), torch.arange(3.0, 9.0), torch.arange(4.0)]


@pytest.mark.parametrize(
    ("call", "data", "message"),
    [
        ("fit", lambda rank: samples(6 + 3 * rank), r"samples of train_data .*got 6 on rank 0, 9 on ranks? 1"),
        ("eval_data", lambda rank: samples(6 + 3 * rank), r"number of samples of eval_data .*\n.*eval_shard=False"),
        ("evaluate", lambda rank: TensorDataset(SHARES[rank]), r"digest of the first sample of data must be equal"),
        ("predict", lambda rank: samples(6 + 3 * rank), r"predict: the number of samples of data .*9 on ranks? 1"),
        ("prepare", lambda rank: samples(6 + 3 * rank), r"prepare: the number of samples of loader 1 .*9 on ranks? 1"),
        ("prepare", lambda rank: samples(12), r"prepare: the batch_size of loader 1 .*got 2 on rank 0, 3 on ranks? 1"),
        ("prepare", lambda rank: IterableSource(4) if rank else samples(12), r"the kind of loader 1 .*share of each"),
        ("fit", lambda rank: samples(0 if rank else 6), r"must have at least one sample|train_data of ranks? 1.*: the"),
    ],
)
def test_ranks_compare_their_data_before_they_train(world: mpicomm.World, call: str, data: Any, message: str) -> None:
    own, model = data(min(world.rank, 1)), make_model()
    trainer = make_trainer(model)
    batch_size = 3 if "batch_size" in message and world.rank else 2
    calls: dict[str, Callable[[], Any]] = {
        "fit": lambda: trainer.fit(own, 1),
        "eval_data": lambda: trainer.fit(samples(12), 1, eval_data=own),
        "evaluate": lambda: trainer.evaluate(own),
        "predict": lambda: trainer.predict(own),
        "prepare": lambda: mpicomm.prepare(model, trainer.optimizer, DataLoader(own, batch_size=batch_size)),
    }
    with pytest.raises((mpicomm.TrainingError, ValueError), match=message):
        calls[call]()
    assert trainer.position.step == 0


def test_ranks_compare_the_limits_of_a_run(world: mpicomm.World) -> None:
    message = r"fit: max_steps must be equal on all ranks, got 100 on rank 0, 101 on"
    with pytest.raises(mpicomm.TrainingError, match=message):
        make_trainer().fit(samples(12), 1, max_steps=100 + min(world.rank, 1))


def test_an_evaluation_compares_its_arguments_in_one_exchange(
    world: mpicomm.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, gather = [], collectives.all_gather_object
    monkeypatch.setattr(collectives, "all_gather_object", lambda value: calls.append(value) or gather(value))
    trainer = make_trainer()
    calls.clear()
    trainer.evaluate(samples(12), {"one": lambda *_: 1.0})
    assert len(calls) == 1
    if world.size > 1:
        with pytest.raises(mpicomm.TrainingError, match="metrics must be equal on all ranks, got a on rank 0"):
            trainer.evaluate(samples(12), {"ab"[min(world.rank, 1)]: lambda *_: 1.0})


def test_metrics_of_own_shares_are_over_all_samples(world: mpicomm.World) -> None:
    values = torch.cat(SHARES[: world.size])
    trainer = test_steps.make_trainer(nn.Linear(1, 1), batch_size=3)
    trainer.loss_fn = lambda outputs, target: target.mean() + 0 * outputs.mean()
    own = SHARES[world.rank][:, None]
    found = trainer.evaluate(TensorDataset(own, own), {"value": lambda _, target: target[:, 0]}, shard=False)
    assert (found["samples"], found["value"]) == (len(values), pytest.approx(values.mean().item()))
    assert found["loss"] == pytest.approx(values.mean().item())


@pytest.mark.parametrize("value", [torch.zeros(4, 3, 5), torch.zeros(4, 0), torch.zeros(2)])
def test_metrics_of_other_shapes_are_refused(world: mpicomm.World, value: torch.Tensor) -> None:
    trainer = make_trainer(batch_size=4)
    with pytest.raises(
        ValueError, match=rf"'odd' must return one number per sample \(4\).*shape {re.escape(str([*value.shape]))}"
    ):
        trainer.evaluate(samples(4 * world.size), {"odd": lambda *_: value})


def test_a_step_with_one_sample_for_batch_normalization(world: mpicomm.World) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    count = 5 * world.size
    with pytest.raises(ValueError, match=r"this rank has 1 in step 1\.\nPass DataLoader\(.*drop_last=True"):
        make_trainer(model, batch_size=4).fit(samples(count), 1)
    loader = DataLoader(samples(count), batch_size=4, drop_last=True)
    assert make_trainer(model).fit(loader, 1)[0]["samples"] == 4 * world.size


@pytest.mark.parametrize(
    ("data", "before", "after", "message"),
    [
        (
            samples,
            {},
            {"shard": False},
            r"the kind of train_data was a dataset with indices that the ranks share, got a share of",
        ),
        (
            IterableSource,
            {"shard": False},
            {"shard": True},
            r"the kind of train_data was an iterable-style dataset of each rank, got",
        ),
        (
            IterableSource,
            {"shard": False},
            {"shard": False, "grad_accum_steps": 2},
            r"the grad_accum_steps of train_data was 1, got 2",
        ),
        (
            IterableSource,
            {"shard": False},
            {"shard": False, "batch_size": 3},
            r"the batch_size of train_data was 2, got 3",
        ),
        (samples, {"shard": False}, {"shard": False, "batch_size": 3}, r"the batch_size of train_data was 2, got 3"),
        (IterableSource, {}, {"seed": 7}, r"the seed of train_data was 0, got 7"),
        (samples, {}, {"seed": 7}, r"the seed of train_data was 0, got 7"),
        (
            lambda count: random_split(samples(2 * count), [0.5, 0.5])[0],
            {},
            {},
            r"the digest of the indices of train_data was",
        ),
        (lambda count: DataLoader(samples(count), 2), {"shard": None}, {"shard": False}, r"the kind of train_data was"),
    ],
)
def test_a_run_continues_within_an_epoch_with_the_same_data_only(
    world: mpicomm.World,
    directory: Path,
    data: Callable[[int], Any],
    before: dict[str, Any],
    after: dict[str, Any],
    message: str,
) -> None:
    def fit(options: dict[str, Any], **limits: int) -> Trainer:
        given = dict(options)
        shard = given.pop("shard", None)
        trainer = make_trainer(checkpoint_dir=directory, **given)
        torch.manual_seed(len(limits))  # other parts by random_split, the same on all ranks
        trainer.fit(data(12 * world.size), 1, shard=shard, **limits)
        return trainer

    fit(before, max_steps=1)
    with pytest.raises(mpicomm.TrainingError, match=rf"^fit: cannot continue within .*: {message}.*\nPass the same"):
        fit(after)


@pytest.mark.parametrize("data", [samples, IterableSource])
def test_a_run_continues_with_another_batch_size(world: mpicomm.World, data: Callable[[int], Any]) -> None:
    trainer = make_trainer(batch_size=2)
    trainer.fit(data(12 * world.size), 1, max_steps=1)
    other = make_trainer(batch_size=5, grad_accum_steps=2)
    vars(other.position).update(vars(trainer.position))
    (epoch,) = other.fit(data(12 * world.size), 1)
    assert (epoch["samples"], epoch["step"]) == (12 * world.size, 2)


def test_data_are_corrected_before_the_first_step(world: mpicomm.World) -> None:
    trainer = make_trainer()
    wide = TensorDataset(torch.zeros(4, FEATURES + 1), torch.zeros(4, dtype=torch.long))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.fit(wide, 1, shard=False)
    assert trainer.fit(samples(12 * world.size), 1)[0]["samples"] == 12 * world.size


class Remembering(IterableSource):
    """Shuffles with a random state of its own."""

    random: random.Random

    def __iter__(self) -> Iterator[Any]:
        pairs = list(super().__iter__())
        return iter(self.random.sample(pairs, len(pairs)))


class WithEpoch(Remembering):
    def set_epoch(self, epoch: int) -> None:
        self.random = random.Random(epoch)


@pytest.mark.parametrize(
    ("kind", "steps", "differs"), [(Remembering, 2, False), (Remembering, 8, True), (WithEpoch, 8, False)]
)
@pytest.mark.parametrize("shard", [None, True, False])
def test_a_run_that_continues_with_another_order_warns(
    world: mpicomm.World, directory: Path, kind: type[IterableSource], steps: int, differs: bool, shard: bool | None
) -> None:
    def fit(**limits: int) -> Trainer:
        stream = kind(12 if shard is False else 12 * world.size)
        stream.random = random.Random(5)  # as in a new process
        trainer = make_trainer(checkpoint_dir=directory)
        trainer.fit(stream, 2, shard=shard, **limits)
        return trainer

    fit(max_steps=steps)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit()
    messages = [str(each.message) for each in found]
    named = [each for each in messages if f"first sample of {kind.__name__} differs from" in each]
    assert len(named) == (differs and not world.rank), messages


@pytest.mark.parametrize("loading", [{"sampler": RandomSampler(range(64), num_samples=6)}, {"shuffle": True}])
def test_evaluations_take_the_same_samples(world: mpicomm.World, loading: dict[str, Any]) -> None:
    def value(_: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        taken.append(target.tolist())
        return target.double()

    taken: list[list[float]] = []
    x, _ = samples(64).tensors
    numbered = DataLoader(TensorDataset(x, torch.arange(64.0)), batch_size=3, **loading)
    trainer = test_steps.make_trainer(make_model())
    trainer.loss_fn = lambda outputs, _: outputs.mean()
    history = trainer.fit(samples(12), 2, eval_data=numbered, metrics={"value": value})
    assert history[0]["value"] == history[1]["value"]
    half = len(taken) // 2
    assert taken[:half] == taken[half:]


def test_a_checkpoint_that_cannot_resume_exactly_warns_once(world: mpicomm.World, directory: Path) -> None:
    loader = DataLoader(IterableSource(8), batch_size=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make_trainer(checkpoint_dir=directory, save_every=1).fit(loader, 1)
    assert [1 for each in found if "within an epoch may take other samples" in str(each.message)] == [1] * (
        not world.rank
    )


class Partly(nn.Module):
    """A model with a part that never gets a gradient, and with state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(FEATURES, 2), nn.Linear(4, 4)
        self.note = "first"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def test_a_parameter_that_never_gets_a_gradient(world: mpicomm.World, directory: Path) -> None:
    data = samples(16 * world.size)
    whole = Partly()
    make_trainer(whole, find_unused_parameters=True).fit(data, 2)
    model = Partly()
    model.note = "second"
    with pytest.raises(mpicomm.Preempted):
        make_trainer(model, find_unused_parameters=True, checkpoint_dir=directory, leave_at=3).fit(data, 2)
    model = Partly()
    trainer = make_trainer(model, find_unused_parameters=True, checkpoint_dir=directory)
    trainer.fit(data, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
    assert model.unused.weight not in trainer.optimizer.state
    assert model.note == "second"


@pytest.mark.parametrize("place", [0, -1])
def test_skipped_steps_change_no_state(world: mpicomm.World, place: int) -> None:
    """Neither the buffers nor the padding batch of a rank without data contain values of a skipped step."""
    stream = IterableSource(2 * world.size + 2)
    stream.pairs.tensors[0][2 * world.size - 1 if place else 0] = torch.nan
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 2))
    (epoch,) = make_trainer(model, on_nonfinite="skip").fit(stream, 1)
    assert epoch["step"] == 2
    assert all(torch.isfinite(each).all() for each in model.state_dict().values())


def test_compressed_gradients_resume_unchanged(world: mpicomm.World, directory: Path) -> None:
    def parameters(**options: Any) -> list[torch.Tensor]:
        model = nn.Linear(FEATURES, 64)
        torch.manual_seed(3)
        nn.init.normal_(model.weight)
        nn.init.zeros_(model.bias)
        trainer = make_trainer(model, grad_compression="powersgd", **options)
        try:
            trainer.fit(samples(2 * world.size * 30), 1)
        except mpicomm.Preempted:
            return []
        return [each.detach() for each in model.parameters()]

    whole = parameters()
    assert parameters(checkpoint_dir=directory, leave_at=17) == []
    assert all(torch.equal(a, b) for a, b in zip(parameters(checkpoint_dir=directory), whole, strict=True))


def test_all_ranks_raise_the_error_of_a_failed_checkpoint_at_the_next_step(
    world: mpicomm.World,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, save = Checkpoints.save, Checkpoints._save
    running: list[concurrent.futures.Future[None] | None] = []

    def late(self: Checkpoints, *arguments: Any) -> None:
        try:
            save(self, *arguments)
        finally:
            time.sleep(0.1 * world.rank)  # rank 0 detects the failure before the other ranks do

    def started(self: Checkpoints, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        running.append(self._running)

    def full(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(Checkpoints, "_save", late)
    monkeypatch.setattr(Checkpoints, "save", started)
    monkeypatch.setattr(RunDirectory, "publish", full)
    trainer = make_trainer(checkpoint_dir=directory, save_every=3)
    inner = trainer.loss_fn

    def after_the_failure(*arguments: Any) -> torch.Tensor:
        if world.rank == 0:
            concurrent.futures.wait([each for each in running if each is not None])
        return inner(*arguments)

    trainer.loss_fn = after_the_failure
    with pytest.raises(mpicomm.CheckpointError, match="no room"):
        trainer.fit(samples(2 * world.size * 10), 1)
    steps = mpicomm.all_gather_object(trainer.position.step)
    assert len(set(steps)) == 1
    assert steps[0] < 6, "the next checkpoint is due, which waits for the one before"
    assert complete(directory) == []


class Slow(Dataset[Any]):
    def __init__(self, pairs: TensorDataset) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return self.pairs[index]


def test_a_signal_to_all_processes_does_not_end_those_that_load(world: mpicomm.World, directory: Path) -> None:
    trainer = make_trainer(checkpoint_dir=directory, num_workers=1)
    inner = trainer.loss_fn
    ignored: list[bool] = []

    def signalled(*arguments: Any) -> torch.Tensor:
        if trainer.position.step == 2:
            ignored.extend(ignores(pid, number) for pid in children() for number in preemption.SIGNALS)
            for pid in (*children(), os.getpid()):
                os.kill(pid, signal.SIGTERM)
        return inner(*arguments)

    trainer.loss_fn = signalled
    with pytest.raises(mpicomm.Preempted, match="85"):
        trainer.fit(Slow(samples(2 * world.size * 50)), 1)
    assert complete(directory) == [f"step-{trainer.position.step:09d}"]
    assert ignored == [True] * len(preemption.SIGNALS)
    wait_until(lambda: not children(), "the workers have ended")


def children() -> list[int]:
    text = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return [pid for pid in map(int, text.split()) if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def ignores(pid: int, number: signal.Signals) -> bool:
    """Return whether a process ignores a signal; torch's workers exit with status 0 if they do not ignore SIGTERM."""
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)
