"""A training run whose ranks are killed: `mpicomm run -n 5 --spares 1 -m tests.recovery.training_job DIRECTORY`.

The model, the data and the trainer are those of tests/training/job.py, with every component that has state. Each rank
that completes the run writes its final state to DIRECTORY/final-<rank>.json; every process logs its steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import mpicomm
from mpicomm.training.data import Step
from mpicomm.training.trainer import Trainer
from mpicomm.training.training_loop import TrainingLoop
from tests.recovery import kill_plan
from tests.recovery.kill_plan import Plan
from tests.training import job
from tests.training.job import EVAL_SAMPLES, SAMPLES, Samples

EPOCHS = 12


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", default="[]", help="the kills in JSON, as tests.recovery.kill_plan.Kill")
    parser.add_argument("--from", dest="starts", default="", help="NAME:CHECKPOINT,...: a run from each checkpoint")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--keep", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--replicate", action="store_true")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds that each forward pass takes longer")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    mpicomm.bootstrap("mpi", on_failure="recover")
    if not arguments.starts:
        train(arguments.directory, arguments)
        return
    for each in arguments.starts.split(","):
        train(arguments.directory / each, arguments)


def train(directory: Path, arguments: argparse.Namespace) -> None:
    """Train to the end, from the checkpoint in the directory if there is one."""
    plan = Plan(kill_plan.from_text(arguments.kills), directory)
    plan.install()
    log = Log(directory / f"steps-{os.getpid()}.jsonl")
    log.install()
    callbacks: list[mpicomm.Callback] = [Figures()]
    if arguments.strategy == "ddp":
        callbacks.append(mpicomm.EMA(0.9))
    trainer = job.make_trainer(
        directory / "run",
        callbacks=callbacks,
        strategy=arguments.strategy,
        save_every=arguments.save_every,
        keep_checkpoints=arguments.keep,
        num_workers=arguments.workers,
        progress="none",
        on_failure="recover",
        replicate_shards=arguments.replicate,
        replicate_every=4,
    )
    loss_fn = trainer.loss_fn

    def slowly(*data: Any) -> torch.Tensor:
        time.sleep(arguments.pause)
        loss = loss_fn(*data)
        trainer.log(own_loss=loss, **{f"of_{trainer.world.rank}": 1.0})
        return loss

    def is_right(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        plan.visit("in an evaluation")
        return job.is_right(outputs, labels)

    trainer.loss_fn = slowly
    data, test = Samples(SAMPLES, 2, 0.1), Samples(EVAL_SAMPLES, 3, 0.0)
    history = trainer.fit(data, arguments.epochs, eval_data=test, metrics={"accuracy": is_right})
    plan.visit("after fit")
    evaluation = trainer.evaluate(test)
    outputs = trainer.predict(test, all_ranks=True)
    assert outputs.shape == (EVAL_SAMPLES, 2)
    states = digest_of([each.state_dict() for each in callbacks])
    final = {"digest": digest(trainer), "history": history, "evaluation": evaluation, "callbacks": states}
    final["predicted"] = hashlib.sha256(outputs.numpy().tobytes()).hexdigest()
    Path(directory, f"final-{trainer.world.rank}.json").write_text(json.dumps(final))


def digest(trainer: Trainer) -> str:
    """Return a digest of the whole parameters, buffers and optimizer state (collective)."""
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(trainer.wrapped.inner, trainer.optimizer, options=options)
    named: dict[str, torch.Tensor] = dict(model)
    for name, values in optimizer["state"].items():
        named |= {f"{name} {key}": each for key, each in values.items()}
    found = hashlib.sha256()
    for name, tensor in sorted(named.items()):
        found.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def digest_of(states: list[dict[str, Any]]) -> str:
    """Return a digest of the states of callbacks."""
    tensors = [tensor.numpy().tobytes() for state in states for tensor in state.get("averages", ())]
    return hashlib.sha256(b"".join([repr(states[0]).encode(), *tensors])).hexdigest()


class Figures(mpicomm.Callback):
    """A callback whose state depends on every step, epoch and evaluation."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_step_end(self, trainer: Trainer) -> None:
        self.events.append(trainer.position.step)

    def on_epoch_end(self, trainer: Trainer) -> None:
        self.events.append(trainer.position.history[-1])

    def on_eval_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self.events.append(metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"events": self.events}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.events = state["events"]


class Log:
    """The steps of this process, each when it begins and when it is complete."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def install(self) -> None:
        kill_plan.before(TrainingLoop, "_take_step", self._begin)
        kill_plan.before(TrainingLoop, "_count_step", self._end)

    def _begin(self, loop: TrainingLoop, step: Step, _count: int) -> None:
        position, rank = loop.position, loop.parts.world.rank
        indices = [index for batch in step.batches for index in batch.indices or ()]
        self._write("begin", step=position.step + 1, epoch=position.epoch, rank=rank, indices=indices)

    def _end(self, loop: TrainingLoop) -> None:
        self._write("end", step=loop.position.step, epoch=loop.position.epoch, rank=loop.parts.world.rank)

    def _write(self, what: str, **values: Any) -> None:
        world = mpicomm.current_world().recoveries
        self._file.write(json.dumps({"what": what, "time": time.time(), "world": world, **values}) + "\n")
        self._file.flush()


if __name__ == "__main__":
    main()
