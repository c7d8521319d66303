"""Tests of `standardize` on any number of ranks: `pytest --ranks 4`, or `pytest` for one rank."""

from __future__ import annotations

import pytest
import torch
from standardization import standardize

import mpicomm
from mpicomm.testing import assert_equal_on_all_ranks


@pytest.fixture
def rows() -> torch.Tensor:
    """The rows of all ranks: 10 x 3, the same on every rank."""
    return torch.arange(30, dtype=torch.float64).reshape(10, 3) ** 2


def test_equals_the_result_of_one_process(world: mpicomm.World, rows: torch.Tensor) -> None:
    expected = (rows - rows.mean(dim=0)) / rows.var(dim=0, correction=0).sqrt()
    own = standardize(rows[world.rank :: world.size])
    torch.testing.assert_close(own, expected[world.rank :: world.size])


def test_the_moments_are_equal_on_all_ranks(world: mpicomm.World, rows: torch.Tensor) -> None:
    own = standardize(rows[world.rank :: world.size])
    moments = {"mean": mpicomm.all_reduce(own.sum(dim=0)), "square": mpicomm.all_reduce((own**2).sum(dim=0))}
    assert_equal_on_all_ranks(moments)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_constant_column_becomes_zero(value: float) -> None:
    assert standardize(torch.full((2, 1), value)).eq(0).all()


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_rows(world: mpicomm.World, rows: torch.Tensor) -> None:
    own = rows if world.rank == 0 else rows[:0]
    assert standardize(own).shape == own.shape
