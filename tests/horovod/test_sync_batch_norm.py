"""hvd.SyncBatchNorm normalizes like BatchNorm on the batches of all ranks together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpicomm
import mpicomm.horovod as hvd

pytestmark = pytest.mark.usefixtures("dynamic")

CHANNELS = 3


def samples_of(rank: int, dims: int) -> torch.Tensor:
    """Return a batch whose length and mean depend on the rank."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(rank + 2, CHANNELS, *[4] * (dims - 2), generator=generator, dtype=torch.float64)
    return 100 + rank + values


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("dims", [2, 4])
def test_training_and_evaluation(world: mpicomm.World, dims: int, momentum: float | None) -> None:
    sync = hvd.SyncBatchNorm(CHANNELS, momentum=momentum).double()
    alone = (nn.BatchNorm1d if dims == 2 else nn.BatchNorm2d)(CHANNELS, momentum=momentum).double()
    for layer in (sync, alone):
        nn.init.uniform_(layer.weight.detach(), generator=torch.Generator().manual_seed(0))
    lengths = [rank + 2 for rank in range(world.size)]
    for _ in range(2):
        whole = torch.cat([samples_of(rank, dims) for rank in range(world.size)]).requires_grad_()
        mine = samples_of(world.rank, dims).requires_grad_()
        weights = torch.linspace(0, 1, whole.numel(), dtype=torch.float64).view_as(whole)
        alone.zero_grad()
        expected = alone(whole)
        (expected * weights).sum().backward()
        sync.zero_grad()
        found = sync(mine)
        (found * weights.split(lengths)[world.rank]).sum().backward()
        torch.testing.assert_close(found, expected.split(lengths)[world.rank])
        torch.testing.assert_close(mine.grad, whole.grad.split(lengths)[world.rank], rtol=1e-5, atol=1e-9)
        for name, buffer in alone.named_buffers():
            torch.testing.assert_close(getattr(sync, name), buffer)
        # the gradients of the parameters are those of this rank's samples
        torch.testing.assert_close(hvd.allreduce(sync.weight.grad, op=hvd.Sum), alone.weight.grad)
        torch.testing.assert_close(hvd.allreduce(sync.bias.grad, op=hvd.Sum), alone.bias.grad)
    sync.eval()
    alone.eval()
    torch.testing.assert_close(sync(mine), alone(mine))


def test_half_precision_is_computed_in_float32(world: mpicomm.World) -> None:
    layer = hvd.SyncBatchNorm(CHANNELS, affine=False, track_running_stats=False)
    batch = samples_of(world.rank, 2).to(torch.bfloat16)
    whole = torch.cat([samples_of(rank, 2).to(torch.bfloat16) for rank in range(world.size)]).float()
    expected = nn.BatchNorm1d(CHANNELS, affine=False, track_running_stats=False)(whole)
    result = layer(batch)
    assert result.dtype == torch.bfloat16
    lengths = [rank + 2 for rank in range(world.size)]
    torch.testing.assert_close(result, expected.to(torch.bfloat16).split(lengths)[world.rank], rtol=0.02, atol=0.02)


def test_an_input_without_channels_is_refused(world: mpicomm.World) -> None:
    with pytest.raises(ValueError, match="2 or more dimensions, got 1"):
        hvd.SyncBatchNorm(CHANNELS)(torch.ones(3))
