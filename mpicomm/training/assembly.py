"""The objects of a run: the wrapped model and its training steps in the present world, and the state of the run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mpicomm.job.session import World
from mpicomm.training import parallel
from mpicomm.training.batches import LossFunction
from mpicomm.training.callbacks import CallbackList
from mpicomm.training.parallel import DDPModel, FSDPModel, ModelTemplate, ParallelOptions
from mpicomm.training.state import Position
from mpicomm.training.step_metrics import StepMetrics
from mpicomm.training.training_step import Precision, StepOptions, TrainingStep


class Assembly:
    """The objects of a run. Those that depend on the world are made again in each world that the run enters."""

    world: World
    wrapped: DDPModel | FSDPModel
    precision: Precision
    step: TrainingStep
    has_values: bool
    """Whether the parameters had values when they were wrapped. A sharded model that is made again has none."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        loss_fn: LossFunction | None,
        parallelism: ParallelOptions,
        options: StepOptions,
        callbacks: CallbackList | None = None,
    ) -> None:
        self.optimizer, self.scheduler, self.loss_fn = optimizer, scheduler, loss_fn
        self.position, self.callbacks = Position(), callbacks or CallbackList()
        self.metrics = StepMetrics(stops=not options.skips)
        self._names: Sequence[Sequence[str]] = parallel.names_in(optimizer, model)
        self.is_sharded = parallelism.strategy == "fsdp"
        self._template = ModelTemplate(model, copies=options.recovers and self.is_sharded)
        self.options, self._parallelism = options, parallelism
        self._is_assembled = False
        self._scaler: dict[str, Any] | None = None  # the state of the loss scale in the previous world

    def assemble(self, world: World) -> None:
        """Replicate or shard the model on the ranks of a world (collective).

        The parameters of rank 0 are broadcast, except those of a replicated model if the trainer recovers from
        failures: the ranks then agree on whose parameters they use.
        """
        options, device = self.options, world.device
        # 1. take the objects of the previous world apart
        if self._is_assembled:
            self._take_apart()
        # 2. wrap the model
        self.world, self.precision = world, Precision(options.precision, device, casts=not self.is_sharded)
        if self._scaler is not None:
            self.precision.scaler.load_state_dict(self._scaler)
        self.has_values = self._template.has_values
        self.wrapped = parallel.wrap(
            self._template.make(device),
            self.optimizer,
            self._names,
            device,
            self._parallelism,
            self.precision.dtype,
            synchronizes=self.is_sharded or not options.recovers,
        )
        # 3. prepare the training steps
        self.metrics.enter_world(device)
        self.step = TrainingStep(self, self.loss_fn)
        self._is_assembled = True

    def _take_apart(self) -> None:
        """Discard the interrupted step, and release the wrapped model."""
        self._is_assembled = False  # also if ranks fail again before the trainer is assembled in the next world
        self._scaler, self.loss_fn = self.precision.scaler.state_dict(), self.step.loss_fn
        self.step.discard()
        wrapped = weakref.ref(self.wrapped.model)
        del self.step, self.wrapped
        if self.is_sharded:
            self.optimizer.state.clear()  # of the parameters that the new ones replace
        if wrapped() is not None:
            gc.collect()  # the hooks of an old DDP module would also run in backward passes of the new one
