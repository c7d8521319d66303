"""Checkpoints and preemption within the pytest job; tests/training/test_runs.py starts jobs and kills them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpicomm
from mpicomm.training.checkpoint import Checkpoints
from mpicomm.training.trainer import Trainer
from tests.launching import background_job, python
from tests.time_limits import EVENT_SECONDS, scaled
from tests.training import kills
from tests.training.job import Samples, digest, make_model

pytestmark = [pytest.mark.mpi, pytest.mark.each_torch("trainer")]


def make_trainer(directory: Path | None, model: nn.Module | None = None, **options: Any) -> Trainer:
    torch.manual_seed(1)
    random.seed(1)  # the random state of a new process, not the one in which the previous trainer stopped
    np.random.seed(1)
    model = model or make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    given = {"batch_size": 8, "checkpoint_dir": directory, "progress": "none", "log_every": 3, **options}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    return Trainer(model, optimizer, nn.functional.cross_entropy, scheduler=scheduler, **given)


def fit(trainer: Trainer, epochs: int = 3, **limits: Any) -> list[dict[str, float]]:
    train, test = Samples(61, 2, 0.1), Samples(19, 3, 0.0)
    metrics = {"accuracy": lambda out, labels: out.argmax(dim=1) == labels}
    return trainer.fit(train, epochs, test, metrics, **limits)


def complete(directory: Path) -> list[str]:
    """Return the names of the complete checkpoints, the same on all ranks (collective)."""
    found = sorted(path.parent.name for path in directory.glob("*/COMPLETE"))
    return mpicomm.broadcast_object(found, src=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "fsdp"},
        {"precision": "float16"},
        {"grad_accum_steps": 2, "num_workers": 1},
    ],
    ids=str,
)
def test_a_run_in_parts_is_one_run(world: mpicomm.World, directory: Path, options: dict[str, Any]) -> None:
    whole = make_trainer(None, **options)
    expected = fit(whole)
    for epochs in (1, 3):
        trainer = make_trainer(directory, **options)
        history = fit(trainer, epochs)
    assert history == expected
    assert digest(trainer) == digest(whole)


class SaysWhenStep3Ends(mpicomm.Callback):
    def __init__(self) -> None:
        self.has_ended = threading.Event()

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.position.step == 3:
            self.has_ended.set()


def test_steps_during_a_save_do_not_change_it(
    world: mpicomm.World, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_trainer(None)
    fit(whole)
    step_3, store = SaysWhenStep3Ends(), Checkpoints._store

    def store_later(checkpoints: Checkpoints, *arguments: Any) -> str:
        assert step_3.has_ended.wait(scaled(EVENT_SECONDS)), "training does not continue during a save"
        return store(checkpoints, *arguments)

    monkeypatch.setattr(Checkpoints, "_store", store_later)
    fit(make_trainer(directory, save_every=2, callbacks=[step_3]), max_steps=3)
    monkeypatch.undo()
    saved_before_step_3, saved_after_it = complete(directory)
    if world.rank == 0:
        shutil.rmtree(directory / saved_after_it)
    mpicomm.barrier()
    trainer = make_trainer(directory, callbacks=[step_3])
    fit(trainer)
    assert kills.starts(directory) == [0, 2], saved_before_step_3
    assert digest(trainer) == digest(whole)


def test_a_complete_run_is_left_alone(world: mpicomm.World, directory: Path) -> None:
    history = fit(make_trainer(directory))
    names = complete(directory)
    trainer = make_trainer(directory)
    trainer.loss_fn = lambda *_: pytest.fail("the complete run trains again")
    assert fit(trainer) == history
    assert complete(directory) == names


@pytest.mark.parametrize("keep_checkpoints", [1, 2])
def test_the_newest_are_kept(world: mpicomm.World, directory: Path, keep_checkpoints: int) -> None:
    trainer = make_trainer(directory, save_every=2, keep_checkpoints=keep_checkpoints)
    fit(trainer)
    names = complete(directory)
    assert len(names) == keep_checkpoints
    assert names[-1] == f"step-{trainer.position.step:09d}-epoch-00003-evaluated"
    left = {path.name for path in directory.iterdir()}
    assert left == {*names, "metrics.jsonl", ".lock"}


def test_a_signal_to_one_rank_makes_all_leave(world: mpicomm.World, directory: Path) -> None:
    """Tests SIGTERM; tests/unit/test_leaving_in_time.py tests all signals."""
    whole = make_trainer(None)
    expected = fit(whole)
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(directory)
    inner = trainer.loss_fn

    def signalled(*arguments: Any) -> torch.Tensor:
        if world.rank == world.size - 1 and trainer.position.step == 4 and torch.is_grad_enabled():
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(*arguments)

    trainer.loss_fn = signalled
    with pytest.raises(mpicomm.Preempted, match="85") as error:
        fit(trainer)
    assert (error.value.code, error.value.why) == (85, f"SIGTERM on rank {world.size - 1}")
    assert signal.getsignal(signal.SIGTERM) is before
    assert complete(directory)[-1] == trainer.position.name
    again = make_trainer(directory)
    assert fit(again) == expected
    assert digest(again) == digest(whole)


@pytest.mark.parametrize("continues_in", ["another trainer", "the same trainer"])
def test_a_stop_request_during_the_evaluation(world: mpicomm.World, directory: Path, continues_in: str) -> None:
    expected = fit(make_trainer(None))
    trainer = make_trainer(directory)
    inner = trainer.loss_fn

    def requesting_a_stop(*arguments: Any) -> torch.Tensor:
        if world.rank == 0 and not torch.is_grad_enabled():
            trainer._stop_request.why = "enough"
        return inner(*arguments)

    trainer.loss_fn = requesting_a_stop
    with pytest.raises(mpicomm.Preempted):
        fit(trainer)
    assert not trainer.position.is_evaluated
    trainer.loss_fn = inner
    assert fit(trainer if continues_in == "the same trainer" else make_trainer(directory)) == expected


def test_another_model_is_refused_by_name(world: mpicomm.World, directory: Path) -> None:
    fit(make_trainer(directory), 1)
    other = nn.Sequential(*make_model()[:-1], nn.Linear(24, 3))  # type: ignore[index]
    with pytest.raises(
        mpicomm.CheckpointError, match=r"another model: .* 5\.weight to be float32\[2, 24\], got float32\[3, 24\]\."
    ):
        fit(make_trainer(directory, other), 2)
    with pytest.raises(mpicomm.CheckpointError, match=r"another model: expected 5\.\w+ to be .*, got absent\."):
        fit(make_trainer(directory, nn.Sequential(*make_model()[:-1])), 2)  # type: ignore[index]


def test_another_optimizer_is_refused_by_name(world: mpicomm.World, directory: Path) -> None:
    fit(make_trainer(directory), 1)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    trainer = Trainer(model, optimizer, nn.functional.cross_entropy, checkpoint_dir=directory, progress="none")
    with pytest.raises(mpicomm.CheckpointError, match="was saved with the optimizer AdamW, got SGD"):
        trainer.fit(Samples(61, 2, 0.1), 2)


class OfNewerTorch:
    """An object that cannot be unpickled, like metadata of torch 2.15 in torch 2.13."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (divmod, (1, 2, 3))


@pytest.mark.parametrize("its", ["2.99.0+cpu", str(torch.__version__), None])
def test_a_checkpoint_of_another_torch_is_refused(world: mpicomm.World, directory: Path, its: str | None) -> None:
    """The error names both versions, if the version of the checkpoint is known."""
    fit(make_trainer(directory), 1)
    mpicomm.barrier()
    newest = directory / complete(directory)[-1]
    if world.rank == 0:
        (newest / ".metadata").write_bytes(pickle.dumps(OfNewerTorch()))
        mark = json.loads((newest / "COMPLETE").read_text())
        assert mark.pop("torch") == str(torch.__version__)
        (newest / "COMPLETE").write_text(json.dumps(mark | ({} if its is None else {"torch": its})))
    mpicomm.barrier()
    with pytest.raises(mpicomm.CheckpointError) as caught:
        fit(make_trainer(directory))
    first, *rest = str(caught.value).splitlines()
    assert first == f"cannot read the checkpoint {newest}: rank 0: divmod expected 2 arguments, got 3."
    last = "remove that directory to resume from the previous checkpoint."
    if its == str(torch.__version__):
        assert rest == [last.capitalize()]
        return
    its, install = ("torch 2.99.0+cpu", " (pip install torch==2.99.0)") if its else ("an unknown version of torch", "")
    assert rest == [
        f"The checkpoint was written by {its}, which torch {torch.__version__} may be unable to read.",
        f"Resume the run with that version of torch{install}, or {last}",
    ]


def test_a_directory_that_cannot_be_is_refused(world: mpicomm.World, directory: Path) -> None:
    if world.rank == 0:
        directory.write_text("a file")
    mpicomm.barrier()
    with pytest.raises(mpicomm.CheckpointError, match=r"rank 0 cannot use .* for checkpoints: .*File exists"):
        fit(make_trainer(directory))


HOLD = """
import fcntl, signal, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
signal.pause()
"""


def test_a_directory_that_another_job_uses_is_refused(
    world: mpicomm.World, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpicomm.training.run_directory._LOCK_SECONDS", 0.2)
    holder = contextlib.nullcontext()
    if world.rank == 0:
        directory.mkdir()
        holder = background_job(python(["-S", "-c", HOLD, str(directory / ".lock")]))
    with holder as job:
        if job is not None:
            job.wait_until(lambda: job.stdout() == "locked\n", "the lock is held")
        mpicomm.barrier()
        with pytest.raises(mpicomm.CheckpointError, match=r"checkpoint_dir .* is locked by another running job"):
            fit(make_trainer(directory), 1)
    fit(make_trainer(directory), 1)
    assert len(complete(directory)) == 1


def test_a_checkpoint_is_synced_before_it_is_marked(
    world: mpicomm.World, directory: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power failure could leave a checkpoint that is marked complete without its content."""
    trainer = make_trainer(directory)
    trainer.fit(Samples(8 * world.size, 2, 0.1), 1)
    name = trainer.position.name
    monkeypatch.undo()
    of_all_ranks = itertools.chain.from_iterable(mpicomm.all_gather_object(synced))
    names = [Path(each).name for each in of_all_ranks if each.startswith("sync")]
    final_names = {each.removesuffix(".tmp").removesuffix(".new").replace("IN", "") for each in names}
    content = {path.name for path in (directory / name).iterdir()}
    assert {".metadata", "COMPLETE", "__0_0.distcp"} <= content <= final_names
    if world.rank == 0:
        needed = [
            "rename to partial/INCOMPLETE",
            "sync partial",
            f"rename to {name}",
            "sync .",
            f"rename to {name}/COMPLETE",
            f"sync {name}",
        ]
        left = iter([re.sub(rf"{name}\.\w+\.partial", "partial", each) for each in synced])
        assert [each for each in needed if each not in left] == [], synced  # in this order


@pytest.mark.parametrize("failing_rank", ["first", "last"])
def test_a_full_disk_leaves_the_last_checkpoint(
    world: mpicomm.World, directory: Path, small_files: Any, failing_rank: str
) -> None:
    fit(make_trainer(directory), 1)
    (name,) = complete(directory)
    if world.rank == (0 if failing_rank == "first" else world.size - 1):
        small_files(2000)
    with pytest.raises(mpicomm.CheckpointError, match=r"cannot write the .* to [^:]*: rank \d: .*\n.*" + name):
        fit(make_trainer(directory))
    small_files(resource.RLIM_INFINITY)
    mpicomm.barrier()
    assert complete(directory) == [name]
    fit(make_trainer(directory))


def test_the_files_of_a_run(world: mpicomm.World, directory: Path) -> None:
    entries: list[dict[str, Any]] = []
    trainer = make_trainer(directory, logger=entries.append, rank_logs=True)
    inner = trainer.loss_fn

    def printing(*arguments: Any) -> torch.Tensor:
        if trainer.position.step == 1 and torch.is_grad_enabled():
            print(f"rank {world.rank} is at step 1")
        return inner(*arguments)

    trainer.loss_fn = printing
    fit(trainer, 2)
    mpicomm.barrier()
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == mpicomm.broadcast_object(entries, src=0)
    events = [json.loads(line)["event"] for line in lines]
    assert (events[0], events[-1]) == ("start", "end")
    assert (events.count("epoch"), events.count("eval"), events.count("checkpoint")) == (2, 2, 2)
    logs = {path.name: path.read_text() for path in directory.glob("*.log")}
    assert sorted(logs) == [f"rank_{rank:03d}.log" for rank in range(world.size)]
    counts = {rank: logs[f"rank_{rank:03d}.log"].count(f"rank {rank} is at step 1\n") for rank in range(world.size)}
    assert counts == dict.fromkeys(range(world.size), 1)
