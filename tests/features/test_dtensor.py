"""Distributed tensors and device meshes on the backend: redistribution changes placements, and preserves contents."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from tests.features.sharding import shard_of

SHAPE = (7, 5)  # not divisible by the number of ranks; with 5 rows or columns in chunks of 2, the fourth shard is empty
PARTIALS = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
    "product": lambda parts: parts.prod(0),
}
WHOLE = [Replicate(), Shard(0), Shard(1)]  # possible targets of a redistribution
PLACEMENTS = [*WHOLE, *map(Partial, PARTIALS)]
EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def numbers(*shape: int) -> torch.Tensor:
    """Return numbers that are equal on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def placed(placement: Placement, mesh: DeviceMesh) -> tuple[DTensor, torch.Tensor]:
    """Return a tensor with this placement on a one-dimensional mesh, and its full content."""
    if not isinstance(placement, Partial):
        whole = numbers(*SHAPE)
        return distribute_tensor(whole, mesh, [placement]), whole
    parts = numbers(mesh.size(), *SHAPE)
    tensor = DTensor.from_local(parts[mesh.get_local_rank()], mesh, [placement])
    return tensor, PARTIALS[placement.reduce_op](parts)


@pytest.mark.parametrize("target", WHOLE, ids=str)
@pytest.mark.parametrize("source", PLACEMENTS, ids=str)
def test_redistribute(mesh: DeviceMesh, source: Placement, target: Placement) -> None:
    tensor, whole = placed(source, mesh)
    result = tensor.redistribute(mesh, [target])
    assert list(result.placements) == [target]
    assert result.shape == whole.shape
    if isinstance(target, Shard):
        whole = shard_of(whole, mesh.get_local_rank(), mesh.size(), target.dim)
    torch.testing.assert_close(result.to_local(), whole, **(CLOSE if isinstance(source, Partial) else EXACT))
