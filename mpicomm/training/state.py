"""What a run is made of: how far it has come, and everything that a checkpoint of it holds."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from mpicomm.errors import CheckpointError, raised_on_all_ranks
from mpicomm.runtime import World
from mpicomm.training import checkpoint, randomness
from mpicomm.training.checkpoint import Checkpoints, State
from mpicomm.training.data import DataSource
from mpicomm.training.metrics import Losses
from mpicomm.training.parallel import DDPModel, FSDPModel

History = list[dict[str, float]]


@dataclasses.dataclass
class Position:
    """How far a run has come; the same on all ranks."""

    step: int = 0
    """Steps of the optimizer so far."""

    epoch: int = 0
    """Epochs that are complete."""

    consumed: int = 0
    """Samples of the epoch that all ranks have taken."""

    steps_of_epoch: int = 0
    loss_sum: float = 0.0
    """Over the samples of the epoch, as far as the ranks have added theirs up."""

    loss_count: int = 0
    is_evaluated: bool = True
    """Whether the last complete epoch has been, if it is to be."""

    history: History = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        """A name for this moment; those of later ones come later in the alphabet."""
        name = f"step-{self.step:09d}"
        if self.epoch and not self.consumed:
            name += f"-epoch-{self.epoch:05d}{'-evaluated' if self.is_evaluated else ''}"
        return name

    def advance(self, count: int) -> None:
        """Count a step."""
        self.step += 1
        self.steps_of_epoch += 1
        self.consumed += count

    def add_losses(self, total: float, count: int) -> None:
        """Add losses of all ranks."""
        self.loss_sum += total
        self.loss_count += count

    def end_epoch(self, *, is_evaluated: bool) -> None:
        """Close the epoch."""
        self.epoch += 1
        loss = self.loss_sum / max(self.loss_count, 1)
        self.history.append({"epoch": self.epoch, "step": self.step, "loss": loss, "samples": self.consumed})
        self.consumed = self.steps_of_epoch = self.loss_count = 0
        self.loss_sum, self.is_evaluated = 0.0, is_evaluated

    def add_evaluation(self, means: Mapping[str, float], count: int) -> None:
        """Add what the evaluation of the last epoch has found."""
        self.history[-1] |= {**means, "eval_samples": count}
        self.is_evaluated = True


@dataclasses.dataclass(frozen=True)
class Parts:
    """What has a state."""

    wrapped: DDPModel | FSDPModel
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler
    position: Position
    losses: Losses
    world: World


def collect(parts: Parts) -> State:
    """Return what a checkpoint holds, copied, since training goes on while it is written."""
    model, optimizer = get_state_dict(parts.wrapped.inner, parts.optimizer)
    tensors = _copied({"model": model, "optimizer": optimizer})
    shared = {
        "position": dataclasses.asdict(parts.position),
        "optimizer": type(parts.optimizer).__name__,
        "scheduler": None if parts.scheduler is None else parts.scheduler.state_dict(),
        "scaler": parts.scaler.state_dict(),
        "ranks": parts.world.size,
    }
    own = {
        "random": randomness.states(parts.world.device),
        "losses": (float(parts.losses.total), parts.losses.count),
        "hook": parts.wrapped.hook_state,
    }
    return {**tensors, **checkpoint.packed({"run": shared, f"rank {parts.world.rank}": own})}


def restore(checkpoints: Checkpoints, parts: Parts, train: DataSource) -> None:
    """Go back to the newest checkpoint (collective).

    Raises:
        CheckpointError: On every rank, if it is of another model or optimizer, or cannot be gone on from.
    """
    objects = checkpoints.objects()
    run = objects["run"]
    position = Position(**run["position"])
    name = type(parts.optimizer).__name__
    if run["optimizer"] != name:
        raise raised_on_all_ranks(
            CheckpointError(
                f"{checkpoints.directory} holds a run with {run['optimizer']}, and this one has {name}.\n"
                f"Give this run a checkpoint_dir of its own, or that optimizer."
            )
        )
    is_regrouped = run["ranks"] != parts.world.size
    if is_regrouped and position.consumed and not train.is_shared:
        raise raised_on_all_ranks(
            CheckpointError(
                f"the run stopped within an epoch on {run['ranks']} ranks, whose DataLoaders were their own; "
                f"what {parts.world.size} ranks have left is not known.\nGo on with {run['ranks']} ranks, or pass the "
                f"dataset itself."
            )
        )
    model: Any
    optimizer: Any
    model, optimizer = get_state_dict(parts.wrapped.inner, parts.optimizer)
    checkpoints.check_model(model)
    with_state = checkpoints.parameters_with_state()
    optimizer["state"] = {name: each for name, each in optimizer["state"].items() if name in with_state}
    content: State = {"model": model, "optimizer": optimizer}
    checkpoints.load(content)
    set_state_dict(
        parts.wrapped.inner,
        parts.optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
        options=StateDictOptions(strict=False),  # a parameter that never had a gradient has no state
    )
    if parts.scheduler is not None and run["scheduler"] is not None:
        parts.scheduler.load_state_dict(run["scheduler"])
    parts.scaler.load_state_dict(run["scaler"])
    for field in dataclasses.fields(Position):
        setattr(parts.position, field.name, getattr(position, field.name))
    owns = [objects[f"rank {rank}"] for rank in range(run["ranks"])]
    if is_regrouped:
        _share_out(owns, parts)
    else:
        own = owns[parts.world.rank]
        randomness.restore(own["random"], parts.world.device)
        parts.wrapped.hook_state = own["hook"]
        parts.losses.total, parts.losses.count = own["losses"]


def _share_out(owns: list[dict[str, Any]], parts: Parts) -> None:
    """Divide what was the ranks' among another number of them."""
    text = f"{parts.position.step} {owns[0]['random']['torch'].tolist()}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    randomness.seed_all(seed, parts.world.rank)
    is_first = parts.world.rank == 0
    parts.losses.total = sum(own["losses"][0] for own in owns) if is_first else 0.0
    parts.losses.count = sum(own["losses"][1] for own in owns) if is_first else 0


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(each) for each in value)
    return value
