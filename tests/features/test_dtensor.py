"""Distributed tensors and device meshes on the backend: redistribution changes placements, and preserves contents."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
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


@pytest.fixture
def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return numbers that are equal on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


@pytest.mark.parametrize("source", PLACEMENTS, ids=str)
def test_the_full_tensor(mesh: DeviceMesh, source: Placement) -> None:
    tensor, whole = placed(source, mesh)
    torch.testing.assert_close(tensor.full_tensor(), whole, **CLOSE if isinstance(source, Partial) else EXACT)


@pytest.mark.parametrize("placement", WHOLE, ids=str)
def test_distributed_tensors_have_the_values_of_rank_0(
    world: mpicomm.World, mesh: DeviceMesh, placement: Placement
) -> None:
    tensor = distribute_tensor(numbers(*SHAPE, seed=world.rank), mesh, [placement])
    assert_placed(tensor, numbers(*SHAPE, seed=0), [placement], EXACT)


@pytest.mark.parametrize("target", WHOLE, ids=str)
@pytest.mark.parametrize("source", WHOLE, ids=str)
def test_gradients_go_back_the_way(mesh: DeviceMesh, source: Placement, target: Placement) -> None:
    whole, weights = numbers(*SHAPE), numbers(*SHAPE, seed=1)
    tensor = distribute_tensor(whole, mesh, [source]).requires_grad_()
    product = tensor.redistribute(mesh, [target]) * distribute_tensor(weights, mesh, [target])
    product.pow(2).sum().full_tensor().backward()
    torch.testing.assert_close(tensor.grad.full_tensor(), 2 * whole * weights**2, **CLOSE)


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        (Shard(0), Replicate(), Shard(0)),
        (Replicate(), Shard(1), Shard(1)),
        (Shard(1), Shard(0), Partial("sum")),
        (Partial("sum"), Replicate(), Partial("sum")),
    ],
    ids=str,
)
def test_products_of_matrices(mesh: DeviceMesh, left: Placement, right: Placement, result: Placement) -> None:
    tensor, whole = placed(left, mesh)
    other = numbers(SHAPE[1], 6, seed=1)
    product = tensor @ distribute_tensor(other, mesh, [right])
    assert list(product.placements) == [result]
    torch.testing.assert_close(product.full_tensor(), whole @ other, **CLOSE)


def test_softmax_over_a_sharded_dimension(mesh: DeviceMesh) -> None:
    """DTensor must redistribute the data for this operation."""
    tensor, whole = placed(Shard(1), mesh)
    torch.testing.assert_close(tensor.softmax(1).full_tensor(), whole.softmax(1), **CLOSE)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("target", [[one, other] for one in WHOLE for other in WHOLE], ids=str)
def test_redistribute_over_two_dimensions(world: mpicomm.World, square: DeviceMesh, target: list[Placement]) -> None:
    if world.size != 4:
        pytest.skip("needs a mesh of 2 by 2")
    whole = numbers(*SHAPE)
    for source in ([Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Replicate()]):
        tensor = distribute_tensor(whole, square, source)
        assert_placed(tensor, whole, source, EXACT)
        assert_placed(tensor.redistribute(square, target), whole, target, EXACT)
    parts = numbers(4, *SHAPE)
    partial = DTensor.from_local(parts[world.rank], square, [Partial(), Partial()])
    assert_placed(partial.redistribute(square, target), parts.sum(0), target, CLOSE)


@pytest.mark.mpi(min_size=4)
def test_groups_of_a_mesh(world: mpicomm.World, square: DeviceMesh) -> None:
    if world.size != 4:
        pytest.skip("needs a mesh of 2 by 2")
    row, column = divmod(world.rank, 2)
    assert square.get_coordinate() == (row, column)
    assert dist.get_process_group_ranks(square.get_group("rows")) == [column, column + 2]
    assert dist.get_process_group_ranks(square["columns"].get_group()) == [2 * row, 2 * row + 1]
    for group, ranks in ((square.get_group(0), [column, column + 2]), (square.get_group(1), [2 * row, 2 * row + 1])):
        total = torch.tensor([world.rank])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(ranks)
    flat = square._flatten("everyone")
    assert dist.get_process_group_ranks(flat.get_group()) == [0, 1, 2, 3]
    total = torch.tensor([world.rank])
    dist.all_reduce(total, group=square["everyone"].get_group())
    assert total.item() == 6


def test_a_slice_has_the_groups_of_its_mesh(world: mpicomm.World) -> None:
    mesh = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("outer", "inner"))
    inner = mesh["inner"]
    assert inner.get_group() is mesh.get_group("inner")
    tensor = distribute_tensor(numbers(*SHAPE), inner, [Shard(0)])
    assert_placed(tensor.redistribute(inner, [Replicate()]), numbers(*SHAPE), [Replicate()], EXACT)


def test_a_mesh_around_a_group(world: mpicomm.World) -> None:
    copy = dist.new_group(list(range(world.size)))
    mesh = DeviceMesh.from_group(copy, "cpu")
    assert mesh.get_group() is copy
    tensor, whole = placed(Partial("avg"), mesh)
    torch.testing.assert_close(tensor.full_tensor(), whole, **CLOSE)


@pytest.mark.mpi(min_size=2)
def test_a_mesh_on_a_part_of_the_world(world: mpicomm.World) -> None:
    members = list(range(world.size - 1))
    mesh = DeviceMesh("cpu", members)
    if world.rank in members:
        tensor, whole = placed(Partial("sum"), mesh)
        assert_placed(tensor.redistribute(mesh, [Shard(0)]), whole, [Shard(0)], CLOSE)
    else:
        assert mesh.get_coordinate() is None
