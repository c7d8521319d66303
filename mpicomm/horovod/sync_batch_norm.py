"""SyncBatchNorm: batch normalization by the mean and the variance over the batches of all ranks."""

from __future__ import annotations

import torch
from torch import nn

from mpicomm.horovod import context
from mpicomm.horovod.submission import Sum
from mpicomm.horovod.tensor_operations import allreduce


class SyncBatchNorm(nn.BatchNorm1d):
    """Batch normalization over the batches of all ranks, on CPUs and GPUs.

    The arguments are those of `torch.nn.BatchNorm2d`; the input has the shape (N, C, ...). In training, every rank must
    call the layer (collective); the batches may have different lengths N.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        """Return the normalized input."""
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or context.size() == 1:
            return super().forward(input)
        # float16 and bfloat16 are computed in float32, as torch's kernels do
        wide = input if input.dtype == torch.float64 else input.float()
        mean, variance, count = _statistics(wide)
        if self.training and self.track_running_stats:
            self._update_running_statistics(mean.detach(), variance.detach(), count)
        result = (wide - _by_channel(mean, wide)) * torch.rsqrt(_by_channel(variance, wide) + self.eps)
        if self.affine:
            result = result * _by_channel(self.weight, wide) + _by_channel(self.bias, wide)
        return result.to(input.dtype)

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(
                f"the input of SyncBatchNorm must have 2 or more dimensions, got {input.dim()}.\n"
                f"Pass a batch of the shape (N, C, ...)."
            )

    def _update_running_statistics(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / max(count - 1, 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def _statistics(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the mean and the biased variance of every channel over all ranks, and the number of values (collective).

    The variance is that of the differences from the mean: E[x^2] - E[x]^2 would cancel. The all-reduces are
    differentiable, so that the gradients of the statistics are summed over the ranks, too.
    """
    dims = [0, *range(2, batch.dim())]
    values = batch.new_tensor([batch.numel() / batch.size(1)])
    sums = allreduce(torch.cat([batch.sum(dims), values]), op=Sum, name="sync_batch_norm.sum")
    count = sums[-1].item()
    mean = sums[:-1] / count
    squares = (batch - _by_channel(mean, batch)).square().sum(dims)
    variance = allreduce(squares, op=Sum, name="sync_batch_norm.squares") / count
    return mean, variance, count


def _by_channel(values: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Return one value per channel in a shape that broadcasts over a batch of the shape (N, C, ...)."""
    return values.view(1, -1, *[1] * (batch.dim() - 2))
