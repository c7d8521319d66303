"""HaloExchange in grids of 1 to 3 dimensions: every cell of the global grid has a value that its index determines."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import mpicomm
from mpicomm.errors import MismatchError, MpicommError
from mpicomm.examples import shallow_water
from mpicomm.recorder import flight_recorder

WIDTHS = [1, 2]
PERIODIC = [False, True]
UNTOUCHED = -7.0  # in the halos at a border


def grids(size: int) -> list[tuple[int, ...]]:
    """Return all grids of up to three dimensions for a number of ranks."""
    factors = range(1, size + 1)
    return [
        grid
        for dimensions in (1, 2, 3)
        for grid in itertools.product(factors, repeat=dimensions)
        if math.prod(grid) == size
    ]


def length_at(place: int, width: int) -> int:
    """Return the number of cells of the parts at a place of a dimension, without halos: the parts differ."""
    return width + 1 + place % 2


class Part:
    """This rank's part of a global grid, in each dimension of which the parts have other lengths."""

    def __init__(self, exchange: mpicomm.HaloExchange) -> None:
        self.exchange, self.width = exchange, exchange.width
        self.lengths = [[length_at(place, self.width) for place in range(ranks)] for ranks in exchange.grid]
        places = zip(exchange.coordinates, self.lengths, strict=True)
        self.starts = [sum(lengths[:place]) for place, lengths in places]
        own = zip(self.lengths, exchange.coordinates, strict=True)
        self.shape = [lengths[place] + 2 * self.width for lengths, place in own]

    def value(self, index: Sequence[int]) -> float:
        """Return the value of a cell of the global grid, which may be outside of it."""
        result = 0.0
        for place, lengths, is_periodic in zip(index, self.lengths, self.exchange.periodic, strict=True):
            if not (0 <= place < sum(lengths) or is_periodic):
                return UNTOUCHED
            result = 100 * result + place % sum(lengths)
        return result

    def expected(self) -> torch.Tensor:
        """Return this rank's part with the right halos."""
        cells = itertools.product(*[range(length) for length in self.shape])
        values = [
            self.value([start + at - self.width for start, at in zip(self.starts, cell, strict=True)]) for cell in cells
        ]
        return torch.tensor(values, dtype=torch.float64).view(self.shape)

    def without_halos(self) -> torch.Tensor:
        """Return this rank's part before the exchange."""
        part = torch.full(self.shape, UNTOUCHED, dtype=torch.float64)
        inner = tuple(slice(self.width, -self.width) for _ in self.shape)
        part[inner] = self.expected()[inner]
        return part


@pytest.fixture(params=PERIODIC, ids=["bounded", "periodic"])
def periodic(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_async", [False, True])
def test_all_cells_of_all_grids(world: mpicomm.World, periodic: bool, width: int, is_async: bool) -> None:
    for grid in grids(world.size):
        part = Part(mpicomm.HaloExchange(grid, width, periodic=periodic))
        before = part.without_halos()
        data = before.clone()
        result = part.exchange(data, async_op=is_async)
        result = result.wait() if is_async else result
        assert torch.equal(result, part.expected()), grid
        assert torch.equal(data, before)
        assert part.exchange(data, inplace=True) is data
        assert torch.equal(data, part.expected())


def test_some_dimensions_are_periodic(world: mpicomm.World) -> None:
    for periodic in itertools.product(PERIODIC, repeat=2):
        part = Part(mpicomm.HaloExchange((1, world.size), periodic=periodic))
        assert torch.equal(part.exchange(part.without_halos()), part.expected())


def test_neighbors(world: mpicomm.World) -> None:
    rank, size = world.rank, world.size
    exchange = mpicomm.HaloExchange([size, 1], 3, periodic=(False, True))
    below, above = rank - 1 if rank else None, rank + 1 if rank + 1 < size else None
    assert exchange.neighbors == ((below, above), (rank, rank))
    assert exchange.coordinates == (rank, 0)
    shown = f"HaloExchange(grid=({size}, 1), width=3, periodic=(False, True), coordinates=({rank}, 0))"
    assert repr(exchange) == shown


def test_containers_of_several_dtypes_and_leading_dimensions(world: mpicomm.World, periodic: bool) -> None:
    part = Part(mpicomm.HaloExchange((world.size, 1), periodic=periodic))
    field, expected = part.without_halos(), part.expected()
    data = {"h": field, "uv": [torch.stack([field, 2 * field]), field.float()], "n": field.numpy(), "none": None}
    result = part.exchange(data)
    assert torch.equal(result["h"], expected)
    assert torch.equal(result["uv"][0], torch.stack([expected, 2 * expected]))
    assert torch.equal(result["uv"][1], expected.float())
    assert np.array_equal(result["n"], expected.numpy())
    assert result["none"] is None


def test_strided_fields(world: mpicomm.World, periodic: bool) -> None:
    part = Part(mpicomm.HaloExchange((1, world.size), periodic=periodic))
    field = part.without_halos().t().contiguous().t()
    assert torch.equal(part.exchange(field), part.expected())
    part.exchange(field, inplace=True)
    assert torch.equal(field, part.expected())


@pytest.mark.mpi(min_size=2)
def test_one_message_for_each_neighbour_and_dtype(world: mpicomm.World) -> None:
    exchange = mpicomm.HaloExchange((world.size,))
    fields = [torch.zeros(5), torch.zeros(7), torch.zeros(5, dtype=torch.int64)]
    exchange(fields)
    before = flight_recorder.last().number
    exchange(fields)
    names = [each.name for each in flight_recorder.recorded() if each.number > before]
    neighbours = sum(neighbor is not None for neighbor in exchange.neighbors[0])
    assert names.count("send") == names.count("recv") == 2 * neighbours


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_exchanges_in_flight(comms: dict[str, Any], world: mpicomm.World, periodic: bool, backend: str) -> None:
    group = comms["gloo"] if backend == "gloo" else None
    grid = shallow_water.parts_of(world.size)
    parts = [Part(mpicomm.HaloExchange(grid, 1, periodic=periodic, group=group)) for _ in range(2)] * 20
    offsets = [1000 * number for number in range(len(parts))]
    handles = [
        part.exchange(part.without_halos() + offset, async_op=True) for part, offset in zip(parts, offsets, strict=True)
    ]
    order = 1 if world.rank % 2 else -1
    for part, handle, offset in list(zip(parts, handles, offsets, strict=True))[::order]:
        assert torch.equal(handle.wait(), part.expected() + offset)


@pytest.mark.mpi(min_size=2)
def test_a_backward_pass_beside_an_exchange_in_flight(world: mpicomm.World) -> None:
    exchange = mpicomm.HaloExchange((world.size,), periodic=True)
    field = torch.ones(5, requires_grad=True)
    result = exchange(field)
    if world.rank == 0:
        time.sleep(0.2)  # the others have called the next exchange, and wait
    handle = exchange(torch.full((5,), 100.0 + world.rank), async_op=True)
    if world.rank != 0:
        time.sleep(0.2)  # rank 0 begins its backward pass before that exchange has compared the calls
    result.sum().backward()
    low, high = exchange.neighbors[0]
    assert field.grad.tolist() == [0, 2, 1, 2, 0]
    assert handle.wait().tolist() == [100 + low, *[100 + world.rank] * 3, 100 + high]


def test_the_gradient_of_gradients(world: mpicomm.World, periodic: bool) -> None:
    part = Part(mpicomm.HaloExchange((world.size,), periodic=periodic))
    field = part.without_halos().requires_grad_()
    (gradient,) = torch.autograd.grad((part.exchange(field) ** 3).sum(), field, create_graph=True)
    gradient.sum().backward()
    # With E the exchange, E^T 3 (E x)^2 is the gradient; that of its sum is E^T (6 (E x) * (E 1)).
    ones = part.exchange(torch.ones_like(field))
    second = field.detach().clone().requires_grad_()
    (part.exchange(second) * (6 * part.exchange(field.detach()) * ones)).sum().backward()
    assert torch.equal(field.grad, second.grad)


def test_gradients_beside_leaves_without(world: mpicomm.World, periodic: bool) -> None:
    part = Part(mpicomm.HaloExchange((world.size,), periodic=periodic))
    field = part.without_halos().requires_grad_()
    counts = torch.zeros(part.shape, dtype=torch.uint16)
    part.exchange({"field": field, "counts": counts})["field"].sum().backward()
    alone = field.detach().clone().requires_grad_()
    part.exchange(alone).sum().backward()
    assert torch.equal(field.grad, alone.grad)


def test_the_halos_of_borders_along_a_border(world: mpicomm.World) -> None:
    """Cells outside of the grid are exchanged between neighbours along the border, as those within."""
    exchange = mpicomm.HaloExchange((world.size, 1))
    field = torch.full((3, 3), float(world.rank))
    low, high = exchange.neighbors[0]
    rows = [world.rank if low is None else low, world.rank, world.rank if high is None else high]
    assert exchange(field).tolist() == [[row] * 3 for row in rows]


def test_fields_under_inference_mode(world: mpicomm.World, periodic: bool) -> None:
    part = Part(mpicomm.HaloExchange((world.size,), periodic=periodic))
    with torch.inference_mode():
        field = part.without_halos()
        assert torch.equal(part.exchange(field), part.expected())
    assert torch.equal(part.exchange(field, inplace=True), part.expected())


def test_a_model_with_an_exchange_can_be_copied(world: mpicomm.World) -> None:
    exchange = mpicomm.HaloExchange((world.size,))
    assert copy.deepcopy({"exchange": exchange})["exchange"] is exchange
    with pytest.raises(TypeError, match="cannot be pickled: it belongs to a group"):
        pickle.dumps(exchange)


def test_the_adjoint(world: mpicomm.World, periodic: bool) -> None:
    """The gradient is the transposed exchange: <exchange(x), y> = <x, gradient of y>, summed over the ranks."""
    generator = torch.Generator().manual_seed(world.rank)
    for grid in grids(world.size):
        for width in WIDTHS:
            part = Part(mpicomm.HaloExchange(grid, width, periodic=periodic))
            x, y = (torch.randn(part.shape, dtype=torch.float64, generator=generator) for _ in range(2))
            x.requires_grad_()
            forward = (part.exchange(x) * y).sum()
            forward.backward()
            left, right = mpicomm.all_reduce([forward.item(), (x.detach() * x.grad).sum().item()])
            assert left == pytest.approx(right, abs=1e-12 * math.prod(part.shape) * world.size)


def test_a_border_passes_its_gradient(world: mpicomm.World) -> None:
    exchange = mpicomm.HaloExchange((world.size,))
    field = torch.zeros(4, requires_grad=True)
    exchange(field).sum().backward()
    low, high = exchange.neighbors[0]
    expected = [float(low is None), 1.0 + (low is not None), 1.0 + (high is not None), float(high is None)]
    assert field.grad.tolist() == expected


def test_a_part_of_the_job(comms: dict[str, Any], periodic: bool) -> None:
    group = comms["comm"]
    part = Part(mpicomm.HaloExchange((group.size,), periodic=periodic, group=group))
    assert torch.equal(part.exchange(part.without_halos()), part.expected())


def test_another_backend(comms: dict[str, Any], world: mpicomm.World, periodic: bool) -> None:
    part = Part(mpicomm.HaloExchange((world.size,), periodic=periodic, group=comms["gloo"]))
    assert torch.equal(part.exchange(part.without_halos()), part.expected())


def whole_sea(steps: int) -> torch.Tensor:
    """Return the height of the example's sea, computed by shifts of the whole field."""
    sea, rows = shallow_water, shallow_water.ROWS
    y, x = (torch.arange(cells, dtype=torch.float64) + 0.5 for cells in (rows, sea.COLUMNS))
    distance = ((y - rows / 2)[:, None] ** 2 + (x - sea.COLUMNS / 2) ** 2) * sea.CELL**2
    h = sea.DEPTH + sea.HILL * torch.exp(-distance / sea.RADIUS**2)
    u, v = torch.zeros_like(h), torch.zeros_like(h)

    def shift(field: torch.Tensor, rows: int = 0, columns: int = 0) -> torch.Tensor:
        shifted = field.roll((-rows, -columns), (0, 1))
        if rows:
            shifted[-1 if rows > 0 else 0] = 0  # nothing comes through the walls
        return shifted

    for _ in range(steps):
        v_beside_u = (v + shift(v, 0, 1) + shift(v, -1) + shift(v, -1, 1)) / 4
        u_beside_v = (u + shift(u, 1) + shift(u, 0, -1) + shift(u, 1, -1)) / 4
        slope_x, slope_y = (shift(h, 0, 1) - h) / sea.CELL, (shift(h, 1) - h) / sea.CELL
        u = u + sea.STEP * (sea.CORIOLIS * v_beside_u - sea.GRAVITY * slope_x)
        v = v - sea.STEP * (sea.CORIOLIS * u_beside_v + sea.GRAVITY * slope_y)
        v[-1] = 0
        flow_x, flow_y = u * (h + shift(h, 0, 1)) / 2, v * (h + shift(h, 1)) / 2
        h = h - sea.STEP / sea.CELL * (flow_x - shift(flow_x, 0, -1) + flow_y - shift(flow_y, -1))
    return h


def test_the_shallow_water_example(world: mpicomm.World) -> None:
    sea = shallow_water.Sea(world)
    for _ in range(40):
        sea.step()
    height = sea.height()
    assert (height is None) == (world.rank > 0)
    if height is not None:
        torch.testing.assert_close(height, whole_sea(40), rtol=1e-13, atol=0)


# -- errors ----------------------------------------------------------------------------------------------------------


def test_grids_that_do_not_fit(world: mpicomm.World) -> None:
    for grid in [(world.size + 1,), (), (1, 1, 1, world.size)]:
        with pytest.raises(ValueError, match=r"grid must have 1 to 3 dimensions and as many ranks as the group, \d+"):
            mpicomm.HaloExchange(grid)
    with pytest.raises(ValueError, match="periodic must be True, False, or 1 of them"):
        mpicomm.HaloExchange((world.size,), periodic=(True, False))


@pytest.mark.mpi(min_size=2)
def test_arguments_that_differ(world: mpicomm.World) -> None:
    with pytest.raises(MismatchError, match="width=2"):
        mpicomm.HaloExchange((world.size,), 1 + (world.rank == 0))
    exchange = mpicomm.HaloExchange((world.size,))
    for wrong in (torch.zeros(5, dtype=torch.float64), torch.zeros(2, 5), [torch.zeros(5)]):
        with pytest.raises(MismatchError, match="rank 0: "):
            exchange(wrong if world.rank == 0 else torch.zeros(5))
    with pytest.raises(MismatchError, match="HaloExchange in place"):
        exchange(torch.zeros(5), inplace=world.rank == 0)


@pytest.mark.mpi(min_size=2)
def test_parts_that_do_not_fit_together(world: mpicomm.World) -> None:
    exchange = mpicomm.HaloExchange((world.size, 1))
    field = torch.zeros(5, 6 if world.rank == 0 else 5)
    for _ in range(2):
        with pytest.raises(MismatchError, match=r"equally many cells in it, got\n(.|\n)*rank 0: \[5, 6\]"):
            exchange(field)
    exchange(torch.zeros(5 + world.rank, 5))


def test_parts_that_are_too_small(world: mpicomm.World) -> None:
    exchange = mpicomm.HaloExchange((world.size, 1), 2)
    for wrong in (torch.zeros(5, 6), torch.zeros(6), 1.0):
        with pytest.raises(ValueError, match=r"at least 2 dimensions, the last with at least 6 cells .*, got \["):
            exchange(wrong)


@pytest.mark.mpi(min_size=2)
def test_one_rank_has_too_small_a_part(world: mpicomm.World) -> None:
    exchange = mpicomm.HaloExchange((world.size,), 2)
    if world.rank == 0:
        with pytest.raises(ValueError, match="at least 6 cells"):
            exchange(torch.zeros(5))
    else:
        with pytest.raises(MpicommError, match="rank 0 could not send its data: HaloExchange: expected tensors"):
            exchange(torch.zeros(8))


def test_results_that_cannot_be_written(world: mpicomm.World) -> None:
    exchange = mpicomm.HaloExchange((world.size,))
    with pytest.raises(ValueError, match="requires a gradient"):
        exchange(torch.zeros(5, requires_grad=True), inplace=True)


@pytest.mark.mpi(min_size=2)
def test_one_rank_has_an_expanded_field(world: mpicomm.World) -> None:
    exchange = mpicomm.HaloExchange((1, world.size), periodic=True)
    if world.rank == 0:
        with pytest.raises(ValueError, match="is expanded: several of its elements share memory"):
            exchange(torch.zeros(1, 5, 5).expand(3, 5, 5), inplace=True)
    else:
        with pytest.raises(MpicommError, match="rank 0 could not send its data"):
            exchange(torch.zeros(3, 5, 5), inplace=True)
