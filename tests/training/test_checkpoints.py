"""Checkpoints and leaving, in the job that runs the tests; tests/training/test_runs.py has jobs that are killed."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpicomm
from mpicomm.training.trainer import Trainer
from tests.training.job import Samples, digest, make_model

pytestmark = pytest.mark.mpi


def make_trainer(directory: Path | None, model: nn.Module | None = None, **options: Any) -> Trainer:
    torch.manual_seed(1)
    model = model or make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    given = {"batch_size": 8, "checkpoint_dir": directory, "show": "none", "log_every": 3, **options}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    return Trainer(model, optimizer, nn.functional.cross_entropy, scheduler=scheduler, **given)


def fit(trainer: Trainer, epochs: int = 3) -> list[dict[str, float]]:
    train, test = Samples(61, 2, 0.1), Samples(19, 3, 0.0)
    return trainer.fit(train, epochs, test, {"accuracy": lambda out, labels: out.argmax(dim=1) == labels})


def complete(directory: Path) -> list[str]:
    """Return the names of the complete checkpoints, on all ranks (collective)."""
    found = sorted(path.parent.name for path in directory.glob("*/COMPLETE"))
    return mpicomm.broadcast_object(found, src=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "fsdp"},
        {"precision": "bfloat16"},
        {"precision": "float16"},
        {"accumulate": 2, "num_workers": 1},
    ],
    ids=str,
)
def test_a_run_in_parts_is_one_run(world: mpicomm.World, directory: Path, options: dict[str, Any]) -> None:
    whole = make_trainer(None, **options)
    expected = fit(whole)
    for epochs in (1, 2, 3):
        trainer = make_trainer(directory, **options)
        history = fit(trainer, epochs)
    assert history == expected
    assert digest(trainer) == digest(whole)


def test_a_complete_run_is_left_alone(world: mpicomm.World, directory: Path) -> None:
    history = fit(make_trainer(directory))
    names = complete(directory)
    trainer = make_trainer(directory)
    assert fit(trainer) == history
    assert complete(directory) == names


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_are_kept(world: mpicomm.World, directory: Path, keep: int) -> None:
    trainer = make_trainer(directory, save_every=2, keep=keep)
    fit(trainer)
    names = complete(directory)
    assert len(names) == keep
    assert names[-1] == f"step-{trainer.position.step:09d}-epoch-00003-evaluated"
    left = {path.name for path in directory.iterdir()}
    assert left == {*names, "metrics.jsonl", ".lock"}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_to_one_rank_makes_all_leave(world: mpicomm.World, directory: Path, number: signal.Signals) -> None:
    whole = make_trainer(None)
    expected = fit(whole)
    before = signal.getsignal(number)
    trainer = make_trainer(directory)
    inner = trainer.loss_fn

    def signalled(*arguments: Any) -> torch.Tensor:
        if world.rank == world.size - 1 and trainer.position.step == 4:
            os.kill(os.getpid(), number)
        return inner(*arguments)

    trainer.loss_fn = signalled
    with pytest.raises(mpicomm.Preempted, match="85") as error:
        fit(trainer)
    assert (error.value.code, error.value.why) == (85, f"{number.name} on rank {world.size - 1}")
    assert signal.getsignal(number) is before
    assert complete(directory)[-1] == trainer.position.name
    again = make_trainer(directory)
    assert fit(again) == expected
    assert digest(again) == digest(whole)


def test_a_wish_during_the_evaluation(world: mpicomm.World, directory: Path) -> None:
    expected = fit(make_trainer(None))
    trainer = make_trainer(directory)
    inner = trainer.loss_fn

    def wishes(*arguments: Any) -> torch.Tensor:
        if world.rank == 0 and not torch.is_grad_enabled():
            trainer._wish.why = "enough"
        return inner(*arguments)

    trainer.loss_fn = wishes
    with pytest.raises(mpicomm.Preempted):
        fit(trainer)
    assert not trainer.position.is_evaluated
    assert fit(make_trainer(directory)) == expected


def test_another_model_is_refused_by_name(world: mpicomm.World, directory: Path) -> None:
    fit(make_trainer(directory), 1)
    other = nn.Sequential(*make_model()[:-1], nn.Linear(24, 3))  # type: ignore[index]
    with pytest.raises(
        mpicomm.CheckpointError, match=r"another model: 5\.weight is float32\[2, 24\] there, and float32\[3, 24\] in"
    ):
        fit(make_trainer(directory, other), 2)
    with pytest.raises(mpicomm.CheckpointError, match=r"another model: 5\.\w+ is .* there, and nothing in this one"):
        fit(make_trainer(directory, nn.Sequential(*make_model()[:-1])), 2)  # type: ignore[index]


def test_another_optimizer_is_refused_by_name(world: mpicomm.World, directory: Path) -> None:
    fit(make_trainer(directory), 1)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    trainer = Trainer(model, optimizer, nn.functional.cross_entropy, checkpoint_dir=directory, show="none")
    with pytest.raises(mpicomm.CheckpointError, match="holds a run with AdamW, and this one has SGD"):
        trainer.fit(Samples(61, 2, 0.1), 2)


def test_a_directory_that_cannot_be_is_refused(world: mpicomm.World, directory: Path) -> None:
    if world.rank == 0:
        directory.write_text("a file")
    mpicomm.barrier()
    with pytest.raises(mpicomm.CheckpointError, match=r"rank 0 cannot use .* for checkpoints: .*File exists"):
        fit(make_trainer(directory))


@pytest.fixture
def small_files() -> Iterator[Any]:
    """Let this process write no more into a file than some bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("who", ["first", "last"])
def test_a_full_disk_leaves_the_last_checkpoint(
    world: mpicomm.World, directory: Path, small_files: Any, who: str
) -> None:
    fit(make_trainer(directory), 1)
    (name,) = complete(directory)
    if world.rank == (0 if who == "first" else world.size - 1):
        small_files(2000)
    with pytest.raises(mpicomm.CheckpointError, match=r"could not be written to [^:]*: rank \d: .*\n.*" + name):
        fit(make_trainer(directory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    mpicomm.barrier()
    assert complete(directory) == [name]
    fit(make_trainer(directory))


def test_what_is_written_of_a_run(world: mpicomm.World, directory: Path) -> None:
    entries: list[dict[str, Any]] = []
    trainer = make_trainer(directory, logger=entries.append, rank_logs=True)
    fit(trainer, 2)
    mpicomm.barrier()
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == mpicomm.broadcast_object(entries, src=0)
    events = [json.loads(line)["event"] for line in lines]
    assert (events[0], events[-1]) == ("start", "end")
    assert (events.count("epoch"), events.count("eval"), events.count("checkpoint")) == (2, 2, 2)
    assert sorted(path.name for path in directory.glob("*.log")) == [
        f"rank_{rank:03d}.log" for rank in range(world.size)
    ]
