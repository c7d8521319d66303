"""Mixed precision: autocast to bfloat16 or float16, and loss scaling for float16."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from mpicomm import arguments

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
