"""torch.distributed.nn.functional gives the outputs and gradients of the same computation in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.nn.functional as nn_collectives

import mpicomm
from tests.features.together import Outputs, check, exchanged, numbers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")


@pytest.fixture
def inputs(world: mpicomm.World) -> list[torch.Tensor]:
    """Return the inputs of all ranks, whose rows can be split among the ranks."""
    return [numbers(rank, 2 * world.size, 3) for rank in range(world.size)]


@pytest.fixture
def root(world: mpicomm.World) -> int:
    return world.size - 1


def pieces(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    return list(tensor.chunk(size))


def at_root(output: torch.Tensor, root: int) -> Outputs:
    return [None] * root + [output]


def test_all_reduce(world: mpicomm.World, inputs: list[torch.Tensor]) -> None:
    check(world.rank, inputs, nn_collectives.all_reduce, lambda of_ranks: [sum(of_ranks)] * world.size)


def test_all_gather(world: mpicomm.World, inputs: list[torch.Tensor]) -> None:
    check(
        world.rank,
        inputs,
        lambda mine: torch.cat(nn_collectives.all_gather(mine)),
        lambda of_ranks: [torch.cat(of_ranks)] * world.size,
    )


def test_reduce_scatter(world: mpicomm.World, inputs: list[torch.Tensor]) -> None:
    check(
        world.rank,
        inputs,
        lambda mine: nn_collectives.reduce_scatter(mine.new_empty(2, 3), pieces(mine, world.size)),
        lambda of_ranks: sum(of_ranks).chunk(world.size),
    )


def test_all_to_all(world: mpicomm.World, inputs: list[torch.Tensor]) -> None:
    def collective(mine: torch.Tensor) -> torch.Tensor:
        outputs = [mine.new_empty(2, 3) for _ in range(world.size)]
        return torch.cat(nn_collectives.all_to_all(outputs, pieces(mine, world.size)))

    check(world.rank, inputs, collective, exchanged)


def test_all_to_all_single(world: mpicomm.World, inputs: list[torch.Tensor]) -> None:
    def collective(mine: torch.Tensor) -> torch.Tensor:
        return nn_collectives.all_to_all_single(torch.empty_like(mine), mine)

    check(world.rank, inputs, collective, exchanged)


def test_broadcast(world: mpicomm.World, inputs: list[torch.Tensor], root: int) -> None:
    check(
        world.rank,
        inputs,
        lambda mine: nn_collectives.broadcast(mine, root),
        lambda of_ranks: [of_ranks[root]] * world.size,
    )


def test_reduce(world: mpicomm.World, inputs: list[torch.Tensor], root: int) -> None:
    check(
        world.rank,
        inputs,
        lambda mine: nn_collectives.reduce(mine, root),
        lambda of_ranks: at_root(sum(of_ranks), root),
    )


def test_gather(world: mpicomm.World, inputs: list[torch.Tensor], root: int) -> None:
    check(
        world.rank,
        inputs,
        lambda mine: torch.cat(nn_collectives.gather(mine, root)),
        lambda of_ranks: at_root(torch.cat(of_ranks), root),
    )


def test_scatter(world: mpicomm.World, inputs: list[torch.Tensor], root: int) -> None:
    check(
        world.rank,
        inputs,
        lambda mine: nn_collectives.scatter(pieces(mine, world.size), root),
        lambda of_ranks: of_ranks[root].chunk(world.size),
    )
