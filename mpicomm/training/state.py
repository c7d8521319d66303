"""State of a run: its position, and the content of its checkpoints."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from mpicomm.errors import CheckpointError, raised_on_all_ranks
from mpicomm.metrics_file import ENTRY_FIELDS
from mpicomm.training import batches, checkpoint, randomness
from mpicomm.training.checkpoint import Checkpoints, State
from mpicomm.training.data import DataSource
from mpicomm.training.step_metrics import LOSS

if TYPE_CHECKING:
    from mpicomm.training.assembly import Assembly

History = list[dict[str, float]]

EVALUATION_FIELDS = ENTRY_FIELDS | {"loss", "samples", "eval_loss", "eval_samples"}
"""The fields of the entries of an evaluation and of an epoch in the history, which metrics must not have as names."""


@dataclasses.dataclass
class Position:
    """The progress of a run; the same on all ranks."""

    step: int = 0
    """Optimizer steps so far."""

    epoch: int = 0
    """Complete epochs."""

    consumed: int = 0
    """Samples of the current epoch that all ranks together have taken."""

    steps_of_epoch: int = 0

    data: list[dict[str, object]] = dataclasses.field(default_factory=list)
    """The properties that determine the samples of the epoch (`rank_sync.begin_epoch`), if it has steps."""

    loss_sum: float = 0.0
    """Sum of the losses over the `loss_count` samples of the epoch whose losses the ranks have reduced."""

    loss_count: int = 0
    is_evaluated: bool = True
    """Whether the evaluation of the last complete epoch is done, or not needed."""

    history: History = dataclasses.field(default_factory=list)
    evaluated_step: int = 0
    """The step of the last evaluation within an epoch (`eval_every`)."""

    evaluated_metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """The metrics of that evaluation."""

    @property
    def progress(self) -> tuple[int, int, bool, int]:
        """The progress as numbers, which are greater at later positions."""
        return self.step, self.epoch, self.is_evaluated, self.evaluated_step

    @property
    def name(self) -> str:
        """The name of the checkpoint at this position; later positions sort later alphabetically."""
        name = f"step-{self.step:09d}"
        if self.epoch and not self.consumed:
            name += f"-epoch-{self.epoch:05d}{'-evaluated' if self.is_evaluated else ''}"
        return name

    def advance(self, count: int, losses: tuple[float, int] = (0.0, 0)) -> None:
        """Count a step that took `count` samples on all ranks together, and the sum of its losses if it is known."""
        self.step += 1
        self.steps_of_epoch += 1
        self.consumed += count
        self.add_losses(*losses)

    def add_losses(self, total: float, count: int) -> None:
        """Add the sum of the losses of `count` samples of all ranks."""
        self.loss_sum += total
        self.loss_count += count

    def end_epoch(self, *, is_evaluated: bool) -> None:
        """Append the metrics of the epoch to the history, and start the next epoch."""
        self.epoch += 1
        loss = self.loss_sum / max(self.loss_count, 1)
        self.history.append({"epoch": self.epoch, "step": self.step, "loss": loss, "samples": self.consumed})
        self.consumed = self.steps_of_epoch = self.loss_count = 0
        self.loss_sum, self.is_evaluated = 0.0, is_evaluated

    def add_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of the evaluation of the last epoch to the history."""
        self.history[-1] |= metrics
        self.is_evaluated = True


def evaluation_metrics(means: Mapping[str, float], count: int) -> dict[str, float]:
    """Return the metrics of an evaluation: the means over `count` samples, with the loss as `eval_loss`."""
    metrics = {f"eval_{name}" if name == "loss" else name: value for name, value in means.items()}
    return {**metrics, "eval_samples": count}


def collect(parts: Assembly, evaluating: Callable[[], AbstractContextManager[object]] | None = None) -> State:
    """Return the content of a checkpoint as a copy, since training continues while it is written.

    Args:
        parts: The objects of the run.
        evaluating: Returns the context of evaluations, if the entry `model` is to contain their weights. The weights of
            training are then in the entry `training`.
    """
    is_without_state = not parts.optimizer.state
    model, optimizer = model_and_optimizer(parts)
    if is_without_state:  # torch has made one by a step with zero gradients, which Adam counts
        parts.optimizer.state.clear()
        optimizer["state"] = {}
    run = {"optimizer": type(parts.optimizer).__name__, "ranks": parts.world.size, **shared_state(parts)}
    of_callbacks = {name: checkpoint.pack(of_callback) for name, of_callback in run["callbacks"].items()}
    run["callbacks"] = {name: raw for name, (raw, _) in of_callbacks.items()}
    numbered = {
        name: {str(number): tensor for number, tensor in enumerate(tensors)}
        for name, (_, tensors) in of_callbacks.items()
        if tensors
    }
    content = {"model": model, "optimizer": optimizer, **({"callbacks": numbered} if numbered else {})}
    tensors = batches.mapped(content, _copied)
    if evaluating is not None:
        tensors["training"] = tensors["model"]
        with evaluating():
            tensors["model"] = batches.mapped(get_model_state_dict(parts.wrapped.inner), _copied)
    sums = parts.metrics.sums
    own = {
        "random": randomness.states(parts.world.device),
        "losses": sums.pop(LOSS, (0.0, 0)),
        "logged": sums,
        "hook": parts.wrapped.hook_state,
    }
    return {**tensors, **checkpoint.pickled({"run": run, f"rank {parts.world.rank}": own})}


def model_and_optimizer(parts: Assembly) -> tuple[Any, Any]:
    """Return the states of the model and the optimizer, replicated or sharded; the tensors are not copies."""
    return get_state_dict(parts.wrapped.inner, parts.optimizer)


def load_model_and_optimizer(parts: Assembly, model: Any, optimizer: Any) -> None:
    """Load the states of the model and the optimizer, in the form of `model_and_optimizer`."""
    set_state_dict(
        parts.wrapped.inner,
        parts.optimizer,
        model_state_dict=model,
        optim_state_dict=optimizer,
        options=StateDictOptions(strict=False),  # a parameter that never had a gradient has no state
    )


def collect_replicated(parts: Assembly) -> dict[str, Any]:
    """Return the state of a replicated model (DDP), all of which every rank has; the tensors are not copies."""
    tensors = {"model": parts.wrapped.inner.state_dict(), "optimizer": parts.optimizer.state_dict()}
    return {**tensors, "run": shared_state(parts)}


def load_replicated(parts: Assembly, content: dict[str, Any]) -> None:
    """Load the state that `collect_replicated` returned on another rank."""
    parts.wrapped.inner.load_state_dict(content["model"])
    parts.optimizer.load_state_dict(content["optimizer"])
    load_shared_state(parts, content["run"])


def shared_state(parts: Assembly, *, has_callbacks: bool = True) -> dict[str, Any]:
    """Return the objects that are equal on all ranks; without callbacks before their `on_setup`."""
    return {
        "position": dataclasses.asdict(parts.position),
        "reduced": parts.metrics.reduced,
        "scheduler": None if parts.scheduler is None else parts.scheduler.state_dict(),
        "scaler": parts.precision.scaler.state_dict(),
        "callbacks": parts.callbacks.states() if has_callbacks else {},
    }


def load_shared_state(parts: Assembly, run: Mapping[str, Any]) -> None:
    """Load the objects that are equal on all ranks."""
    if parts.scheduler is not None and run["scheduler"] is not None:
        parts.scheduler.load_state_dict(run["scheduler"])
    parts.precision.scaler.load_state_dict(run["scaler"])
    parts.callbacks.load(run["callbacks"])
    for name, value in run["position"].items():
        setattr(parts.position, name, value)
    parts.metrics.restore_reduced(run.get("reduced", {}))  # checkpoints of earlier commits lack them


def restore(checkpoints: Checkpoints, parts: Assembly, train: DataSource) -> None:
    """Restore the newest checkpoint (collective).

    Raises:
        CheckpointError: On every rank, if the checkpoint is of another model or optimizer, or this number of ranks
            cannot resume from it.
    """
    # 1. check that the checkpoint fits this run
    objects = checkpoints.objects()
    run = objects["run"]
    position = Position(**run["position"])
    name = type(parts.optimizer).__name__
    if run["optimizer"] != name:
        raise raised_on_all_ranks(
            CheckpointError(
                f"the checkpoint in {checkpoints.directory} was saved with the optimizer {run['optimizer']}, "
                f"got {name}.\n"
                f"Pass another checkpoint_dir, or use {run['optimizer']}."
            )
        )
    is_regrouped = run["ranks"] != parts.world.size
    if is_regrouped and position.consumed and not train.is_shared:
        raise raised_on_all_ranks(
            CheckpointError(
                f"expected {run['ranks']} ranks, got {parts.world.size}: the checkpoint was saved within an epoch in "
                f"which each rank had its own share of the data, so the remaining samples of each rank are unknown.\n"
                f"Resume with {run['ranks']} ranks until the epoch is complete. Between epochs the number can change."
            )
        )
    # 2. load the model and the optimizer
    model, optimizer = model_and_optimizer(parts)
    checkpoints.check_model(model)
    with_state = checkpoints.parameters_with_state()
    optimizer["state"] = {name: value for name, value in optimizer["state"].items() if name in with_state}
    weights = "training" if checkpoints.has_training_weights else "model"
    content: State = {weights: model, "optimizer": optimizer}
    templates = {name: checkpoint.pack(value)[1] for name, value in parts.callbacks.states().items()}
    packed = run["callbacks"]
    tensors = {name: checkpoints.empty_tensors(f"callbacks.{name}", templates.get(name, ())) for name in packed}
    if any(tensors.values()):
        content["callbacks"] = {name: value for name, value in tensors.items() if value}
    checkpoints.load(content)
    run["callbacks"] = {name: checkpoint.unpack(raw, [*tensors[name].values()]) for name, raw in packed.items()}
    load_model_and_optimizer(parts, content[weights], content["optimizer"])
    # 3. restore the objects that all ranks share, then those of each rank
    load_shared_state(parts, run)
    owns = [objects[f"rank {rank}"] for rank in range(run["ranks"])]
    if is_regrouped:
        _share_out(owns, parts)
    else:
        own = owns[parts.world.rank]
        randomness.restore(own["random"], parts.world.device)
        parts.wrapped.hook_state = own["hook"]
        _restore_metrics([own], parts)


def _share_out(owns: list[dict[str, Any]], parts: Assembly) -> None:
    """Restore the state of each rank on another number of ranks: new seeds, and rank 0 gets the sums of all ranks."""
    text = f"{parts.position.step} {owns[0]['random']['torch'].tolist()}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    randomness.seed_all(seed, parts.world.rank)
    _restore_metrics(owns if parts.world.rank == 0 else [], parts)


def _restore_metrics(owns: Sequence[dict[str, Any]], parts: Assembly) -> None:
    parts.metrics.restore([{LOSS: own["losses"], **own["logged"]} for own in owns])


def _copied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()
