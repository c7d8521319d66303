"""A training step: forward and backward passes in a precision, then the update of the parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpicomm import arguments
from mpicomm.training import batches, parallel, randomness
from mpicomm.training.batches import LossFunction, ModelArguments, OwnStep
from mpicomm.training.data import Batch, Step
from mpicomm.training.step_metrics import LOSS, StepTimer

if TYPE_CHECKING:
    from mpicomm.training.assembly import Assembly

_TOO_FEW = "Expected more than 1 value per channel"  # torch's batch normalization
_SYNCHRONIZED = contextlib.nullcontext()


_DTYPES: dict[str, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


class Precision:
    """The precision in which a model computes."""

    def __init__(self, name: str, device: torch.device, *, casts: bool) -> None:
        """Choose the precision.

        Args:
            name: "float32", "bfloat16" ("bf16") or "float16" ("fp16").
            casts: Use autocast. False if the model casts by itself, as FSDP with a mixed-precision policy does.

        Raises:
            TypeError: If the name is not a str.
            ValueError: If the name is unknown.
        """
        arguments.one_of(*_DTYPES).check(name, "precision")
        self.dtype = _DTYPES[name]
        self._device = device
        self._casts = casts and self.dtype is not None
        # The exponent range of float16 is small: without loss scaling, small gradients underflow to 0.
        # In other precisions the scaler does nothing.
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of the loss, scaled for float16."""
        self.scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer, model: nn.Module, max_grad_norm: float | None) -> bool:
        """Clip the gradients, run an optimizer step, and return whether the step was taken.

        The step is skipped where scaled gradients overflow; the scale is then reduced. The result is the same on all
        ranks: they have the same gradients or, with FSDP, the same maximum over the ranks of the overflow flags.
        """
        if max_grad_norm is not None:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def arithmetic(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which to run the forward pass."""
        if not self._casts:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self.dtype)


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Arguments of `Trainer` that concern single steps."""

    target_key: str
    max_grad_norm: float | None
    precision: str
    skips: bool
    """Whether steps whose loss is not finite are skipped."""

    recovers: bool
    """Whether training continues after a rank has failed."""

    own_step: OwnStep | None = None
    """The forward pass of the user."""


class TrainingStep:
    """A training step: `accumulate`, then `update` or `discard`."""

    def __init__(self, parts: Assembly, loss_fn: LossFunction | None) -> None:
        self.loss_fn, self._own_step, self._options = loss_fn, parts.options.own_step, parts.options
        # Without a reference cycle, a deleted trainer releases the memory of its model at once. The garbage collector
        # would run late: it counts objects, not their bytes.
        self.parts: Assembly = weakref.proxy(parts)
        self._wrapped, self._device = parts.wrapped, parts.world.device
        self._buffers: list[torch.Tensor] = []
        self._is_first = self._is_first_call = True
        self.is_taken = False
        """Whether the optimizer took the last step."""

    def forward(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Any, Any]:
        """Return the mean loss of a batch, the model's outputs and the targets.

        Args:
            model: The model, as DDP, FSDP or torch.compile wraps it.
            batch: The batch.
        """
        if self._own_step is not None and (self.loss_fn is None or self._wrapped.inner.training):
            return self._forward_own(model, batch)
        returns_loss = self.loss_fn is None
        content = batches.moved(batch.content, self._device)
        inputs = batches.model_arguments(content, None if returns_loss else self._options.target_key)
        with self.parts.precision.arithmetic():
            outputs = self._call(model, inputs)
            loss = batches.loss_in(outputs) if self.loss_fn is None else self.loss_fn(outputs, inputs.targets)
        return batches.check_loss(loss, is_of_model=returns_loss), outputs, inputs.targets

    def _forward_in_training(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Any, Any]:
        try:
            return self.forward(model, batch)
        except ValueError as error:
            if _TOO_FEW not in str(error):
                raise
            raise ValueError(
                f"{error}: batch normalization needs more than one sample, and this rank has {batch.count} in step "
                f"{self.parts.position.step}.\n"
                f"Pass DataLoader(dataset, batch_size=..., drop_last=True), or another batch_size, so that every step "
                f"has at least two samples for each rank."
            ) from error

    def _forward_own(self, model: Any, batch: Batch) -> tuple[torch.Tensor, Any, Any]:
        """Return the mean loss of a batch from the function of the user, what it returned, and the batch."""
        assert self._own_step is not None
        content = batches.moved(batch.content, self._device)
        with self.parts.precision.arithmetic():
            returned = self._own_step(model, content)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        return batches.check_loss(loss, is_of_model=False, is_of_step=True), returned, content

    def outputs(self, model: Any, batch: Batch, *, has_targets: bool) -> Any:
        """Return the model's outputs for a batch, for predictions.

        Args:
            model: The model in evaluation mode.
            batch: The batch.
            has_targets: Whether the last element of the batch, or its item `target_key`, is no input. A model that
                returns its loss takes the whole batch.
        """
        content = batches.moved(batch.content, self._device)
        returns_loss = self.loss_fn is None and self._own_step is None
        target_key = self._options.target_key if has_targets and not returns_loss else None
        inputs = batches.model_arguments_without_targets(content, target_key)
        with self.parts.precision.arithmetic():
            return self._call(model, inputs)

    def _call(self, model: Any, inputs: ModelArguments) -> Any:
        """Return the model's outputs, after checking that the first batch fits its signature."""
        if self._is_first_call:
            batches.check_arguments(self._wrapped.inner, inputs)
            self._is_first_call = False
        return model(*inputs.args, **inputs.kwargs)

    def accumulate(self, step: Step, count: int, timer: StepTimer) -> bool:
        """Accumulate the gradients of the batches, and return whether their losses are finite (collective).

        The gradients are those of the mean loss of all samples; the last backward pass reduces them over the ranks.

        Args:
            step: The batches of this rank.
            count: The number of samples of all ranks.
            timer: Measures the time of the backward passes.

        Raises:
            TrainingError: If a loss is not finite, unless such steps are skipped.
        """
        can_discard = self._options.skips or self._options.recovers
        self._buffers = self._copied_buffers() if can_discard else []
        is_first, self._is_first = self._is_first, False
        if is_first:
            self._warm_up(step.batches[0])
            timer.start()
        if not self._wrapped.broadcasts_buffers:
            parallel.share_buffers(self._wrapped.inner)
        metrics = self.parts.metrics
        is_finite = True
        for number, batch in enumerate(step.batches, start=1):
            is_last = number == len(step.batches)
            with _SYNCHRONIZED if is_last else self._wrapped.unsynchronized():
                metrics.begin_batch(batch.count)
                loss, outputs, _ = self._forward_in_training(self._wrapped.model, batch)
                if self._own_step is not None and isinstance(outputs, Mapping):
                    metrics.log({name: value for name, value in outputs.items() if name != LOSS}, "training_step")
                is_finite = metrics.end_batch(self.parts.position.step, batch, loss) and is_finite
                # DDP and FSDP average over the ranks with equal weights, so scale by this rank's share of the samples.
                weight = batch.count * self.parts.world.size / count
                self.parts.precision.backward(loss if weight == 1 else loss * weight)
            timer.add_backward(is_synchronized=is_last)
        if is_first:
            self._wrapped.check_backward()
        return is_finite

    def update(self) -> bool:
        """Update the parameters; return whether the optimizer took the step, as `Precision.step` does."""
        optimizer = self.parts.optimizer
        self._buffers = []
        self.is_taken = self.parts.precision.step(optimizer, self._wrapped.model, self._options.max_grad_norm)
        optimizer.zero_grad(set_to_none=True)
        return self.is_taken

    def discard(self) -> None:
        """Discard the gradients and the changes of the buffers since the last update, if any."""
        self.is_taken = False
        if self._buffers:
            self._restore_buffers(self._buffers)
        self._buffers = []
        self.parts.optimizer.zero_grad(set_to_none=True)

    def _warm_up(self, batch: Batch) -> None:
        """Run the model once before the first step, and restore its buffers and the generators (collective)."""
        buffers = self._copied_buffers()
        self.parts.metrics.begin_batch(0)  # the batch is run again in the step
        with randomness.preserved(self._device):
            self._wrapped.warm_up(lambda model: self._forward_in_training(model, batch)[0])
        self._restore_buffers(buffers)

    def _copied_buffers(self) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in self._wrapped.inner.buffers()]

    @torch.no_grad()
    def _restore_buffers(self, buffers: list[torch.Tensor]) -> None:
        for buffer, before in zip(self._wrapped.inner.buffers(), buffers, strict=True):
            buffer.copy_(before)
