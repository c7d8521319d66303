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
    library.impl("batch_norm_stats", _batch_statistics, "PrivateUse1")
    library.impl("batch_norm_gather_stats_with_counts", _gathered_statistics, "PrivateUse1")
    library.impl("batch_norm_elemt", _normalize, "PrivateUse1")
    library.impl("batch_norm_backward_reduce", _batch_gradients, "PrivateUse1")
    library.impl("batch_norm_backward_elemt", _input_gradient, "PrivateUse1")
    return library


def _dropout(tensor: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or tensor.numel() == 0:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    mask = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(1 - p)
    return tensor * mask * (1 / (1 - p) if p < 1 else 0.0), mask


# -- SyncBatchNorm: torch has these operators for GPUs only, with statistics in float32 --------------------------------


def _channels(values: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | float:
    """Return one value per channel in the shape of the dimensions of a batch; 1 if there are none."""
    return 1.0 if values is None else values.float().reshape(1, -1, *[1] * (like.dim() - 2))


def _others(batch: torch.Tensor) -> list[int]:
    """Return the dimensions of a batch without that of the channels."""
    return [dimension for dimension in range(batch.dim()) if dimension != 1]


def _batch_statistics(batch: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    variance, mean = torch.var_mean(batch.float(), _others(batch), correction=0)
    return mean, (variance + eps).rsqrt()


def _gathered_statistics(
    _batch: torch.Tensor,
    means: torch.Tensor,
    inverse_deviations: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = counts.float().unsqueeze(1)
    total = weights.sum()
    mean = (means * weights).sum(0) / total
    squares = ((inverse_deviations**-2 - eps + (means - mean) ** 2) * weights).sum(0)
    if running_mean is not None and running_variance is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_variance.lerp_((squares / (total - 1)).to(running_variance.dtype), momentum)
    return mean, (squares / total + eps).rsqrt()


def _normalize(
    batch: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    _eps: float,
) -> torch.Tensor:
    normalized = (batch - _channels(mean, batch)) * _channels(inverse_deviation, batch) * _channels(weight, batch)
    return (normalized if bias is None else normalized + _channels(bias, batch)).to(batch.dtype)


def _batch_gradients(
    gradient: torch.Tensor,
    batch: torch.Tensor,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    weight: torch.Tensor | None,
    _of_input: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    total = gradient.float().sum(_others(batch))
    product = (gradient * (batch - _channels(mean, batch))).sum(_others(batch))
    dtype = torch.float32 if weight is None else weight.dtype
    return (
        total,
        product,
        (product * inverse_deviation).to(dtype) if of_weight else None,
        total.to(dtype) if of_bias else None,
    )


def _input_gradient(
    gradient: torch.Tensor,
    batch: torch.Tensor,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    weight: torch.Tensor | None,
    total: torch.Tensor,
    product: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    count = counts.sum()
    slope = _channels(product * inverse_deviation**2 / count, batch) * (batch - _channels(mean, batch))
    centered = gradient - _channels(total / count, batch) - slope
    return (centered * _channels(inverse_deviation, batch) * _channels(weight, batch)).to(batch.dtype)
