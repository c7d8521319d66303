"""Operators that torch expects of each device itself, composed of others."""

from __future__ import annotations

import functools

import torch

_MATRIX_PRODUCTS = 0  # of `SDPBackend`: attention without a fused kernel


@functools.cache
def register() -> torch.library.Library:
    """Register the operators, and return what holds them."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("native_dropout", _dropout, "PrivateUse1")
    library.impl("_fused_sdp_choice", lambda *_arguments, **_options: _MATRIX_PRODUCTS, "PrivateUse1")
    return library


def _dropout(tensor: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or tensor.numel() == 0:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    mask = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(1 - p)
    return tensor * mask * (1 / (1 - p) if p < 1 else 0.0), mask
