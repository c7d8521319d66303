"""Arithmetic in 16 bits: where it is used, and how gradients that would vanish in it are scaled."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

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
            ValueError: If there is none of the name.
        """
        if name not in _DTYPES:
            raise ValueError(f"precision={name!r} is none.\nThere are {', '.join(map(repr, _DTYPES))}.")
        self.dtype = _DTYPES[name]
        self._device = device
        self._casts = casts and self.dtype is not None
        # float16 has few exponents: without a scale small gradients would be 0.
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)

    def arithmetic(self) -> contextlib.AbstractContextManager[Any]:
        """Return the block in which the forward pass is to run."""
        if not self._casts:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self.dtype)
