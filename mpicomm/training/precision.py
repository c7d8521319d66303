"""Arithmetic in 16 bits: where it is used, and how gradients that would vanish in it are scaled."""

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
    """In which arithmetic a model computes."""

    def __init__(self, name: str, device: torch.device, *, casts: bool) -> None:
        """Choose the arithmetic.

        Args:
            casts: Operations cast what they need (autocast); otherwise the model has been told.

        Raises:
            TypeError: If the name is not a str.
            ValueError: If it is unknown.
        """
        arguments.one_of(*_DTYPES).check(name, "precision")
        self.dtype = _DTYPES[name]
        self._device = device
        self._casts = casts and self.dtype is not None
        # float16 has few exponents: without a scale small gradients would be 0.
        self.scaler = torch.amp.GradScaler(device.type, enabled=self._scales)

    @property
    def _scales(self) -> bool:
        return self.dtype == torch.float16

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass."""
        (self.scaler.scale(loss) if self._scales else loss).backward()

    def step(self, optimizer: torch.optim.Optimizer, model: nn.Module, max_grad_norm: float | None) -> bool:
        """Take a step of the optimizer with clipped gradients, and tell whether it was taken.

        It is not where scaled gradients overflow; the scale is then reduced. All ranks have the same gradients, or with
        FSDP the same maximum of what they found, and so the same answer.
        """
        if max_grad_norm is not None:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        if not self._scales:
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def arithmetic(self) -> contextlib.AbstractContextManager[Any]:
        """Return the block in which the forward pass is to run."""
        if not self._casts:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self.dtype)
