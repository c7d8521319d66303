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
    init_device_mesh,
)

import mpicomm
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


def local_part(whole: torch.Tensor, placements: list[Placement], mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's part of a tensor: each mesh dimension shards the result of the previous dimension."""
    for placement, index, count in zip(placements, mesh.get_coordinate(), mesh.shape, strict=True):
        if isinstance(placement, Shard):
            whole = shard_of(whole, index, count, placement.dim)
    return whole


def assert_placed(tensor: DTensor, whole: torch.Tensor, placements: list[Placement], close: dict) -> None:
    assert list(tensor.placements) == placements
    assert tensor.shape == whole.shape
    torch.testing.assert_close(tensor.to_local(), local_part(whole, placements, tensor.device_mesh), **close)


@pytest.mark.parametrize("target", WHOLE, ids=str)
@pytest.mark.parametrize("source", PLACEMENTS, ids=str)
def test_redistribute(mesh: DeviceMesh, source: Placement, target: Placement) -> None:
    tensor, whole = placed(source, mesh)
    close = CLOSE if isinstance(source, Partial) else EXACT
    assert_placed(tensor.redistribute(mesh, [target]), whole, [target], close)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("target", [[one, other] for one in WHOLE for other in WHOLE], ids=str)
def test_redistribute_over_two_dimensions(world: mpicomm.World, target: list[Placement]) -> None:
    if world.size != 4:
        pytest.skip("needs a mesh of 2 by 2")
    square = init_device_mesh("cpu", (2, 2))
    whole = numbers(*SHAPE)
    for source in ([Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Replicate()]):
        tensor = distribute_tensor(whole, square, source)
        assert_placed(tensor, whole, source, EXACT)
        assert_placed(tensor.redistribute(square, target), whole, target, EXACT)
    parts = numbers(4, *SHAPE)
    partial = DTensor.from_local(parts[world.rank], square, [Partial(), Partial()])
    assert_placed(partial.redistribute(square, target), parts.sum(0), target, CLOSE)
