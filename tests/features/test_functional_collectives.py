"""Functional collectives give the outputs and gradients of the same computation in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as funcol

from tests import torches
from tests.features.together import Outputs, check, exchanged, numbers
from tests.worlds import Group, on_groups

# torch looks up groups by name. Ranks of `parity` differ from global ranks, and `staged` has a transport of its own.
pytestmark = on_groups("world", "parity", "staged")


def inputs(group: Group) -> list[torch.Tensor]:
    """Return the inputs of all ranks of the group; both dimensions can be split among the ranks."""
    return [numbers(rank, 2 * group.size, 3 * group.size) for rank in range(group.size)]


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.flatten() for each in tensors])


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return two tensors of different shapes, whose rows can be split among the ranks."""
    columns = tensor.shape[1] // 3
    return [tensor[:, :columns].contiguous(), tensor[:, columns:].contiguous()]


@pytest.mark.parametrize("name", ["all_reduce", "all_reduce_coalesced"])
@pytest.mark.parametrize(
    ("op", "reduction"),
    [
        ("sum", torch.sum),
        ("avg", torch.mean),
        ("product", torch.prod),
        ("min", torch.amin),
        ("max", torch.amax),
    ],
)
def test_all_reduce(group: Group, name: str, op: str, reduction: Callable) -> None:
    def collective(mine: torch.Tensor) -> torch.Tensor:
        if name == "all_reduce":
            return funcol.all_reduce(mine, op, group.handle).flatten()
        return flat(funcol.all_reduce_coalesced(parts(mine), op, group.handle))

    def together(of_ranks: list[torch.Tensor]) -> Outputs:
        result = reduction(torch.stack(of_ranks), dim=0)
        return [result.flatten() if name == "all_reduce" else flat(parts(result))] * group.size

    has_gradient = op == "sum" and torches.have_gradients  # torch differentiates no other reduction
    check(group.rank, inputs(group), collective, together, has_gradient=has_gradient)


@pytest.mark.parametrize("gather", [torches.gathered, torches.gathered_autograd])
@pytest.mark.parametrize("dim", [0, 1])
def test_all_gather(group: Group, gather: Callable, dim: int) -> None:
    check(
        group.rank,
        inputs(group),
        lambda mine: gather(mine, dim, group.handle),
        lambda of_ranks: [torch.cat(of_ranks, dim)] * group.size,
        has_gradient=torches.have_gradients or gather is torches.gathered_autograd,
    )


def test_all_gather_coalesced(group: Group) -> None:
    check(
        group.rank,
        inputs(group),
        lambda mine: flat(torches.gathered_coalesced(parts(mine), group.handle)),
        lambda of_ranks: [flat(parts(torch.cat(of_ranks)))] * group.size,
        has_gradient=torches.have_gradients,
    )


@pytest.mark.parametrize("scatter", [torches.scattered, torches.scattered_autograd])
@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_scatter(group: Group, scatter: Callable, dim: int) -> None:
    check(
        group.rank,
        inputs(group),
        lambda mine: scatter(mine, "sum", dim, group.handle),
        lambda of_ranks: sum(of_ranks).chunk(group.size, dim),
        has_gradient=torches.have_gradients or scatter is torches.scattered_autograd,
    )


def test_reduce_scatter_coalesced(group: Group) -> None:
    check(
        group.rank,
        inputs(group),
        lambda mine: flat(torches.scattered_coalesced(parts(mine), "sum", [0, 0], group.handle)),
        lambda of_ranks: [flat(parts(each)) for each in sum(of_ranks).chunk(group.size)],
        has_gradient=torches.have_gradients,
    )


@pytest.mark.parametrize("exchange", [funcol.all_to_all_single, funcol.all_to_all_single_autograd])
def test_all_to_all(group: Group, exchange: Callable) -> None:
    check(
        group.rank,
        inputs(group),
        lambda mine: exchange(mine, None, None, group.handle),
        exchanged,
        has_gradient=torches.have_gradients or exchange is funcol.all_to_all_single_autograd,
    )


def test_all_to_all_of_uneven_sizes(group: Group) -> None:
    """Some pairs of ranks exchange no data."""
    rows = [[(source + 2 * target) % 3 for target in range(group.size)] for source in range(group.size)]
    sent, received = rows[group.rank], [row[group.rank] for row in rows]

    def together(of_ranks: list[torch.Tensor]) -> Outputs:
        pieces = [each.split(row) for each, row in zip(of_ranks, rows, strict=True)]
        return [torch.cat([piece[rank] for piece in pieces]) for rank in range(group.size)]

    check(
        group.rank,
        [numbers(rank, sum(row), 2) for rank, row in enumerate(rows)],
        lambda mine: funcol.all_to_all_single(mine, received, sent, group.handle),
        together,
        has_gradient=torches.have_gradients,
    )


def test_permute(group: Group) -> None:
    """Each rank sends to the next rank."""
    targets = [(rank + 1) % group.size for rank in range(group.size)]
    check(
        group.rank,
        inputs(group),
        lambda mine: funcol.permute_tensor(mine.flatten(), targets, group.handle),
        lambda of_ranks: [of_ranks[rank - 1].flatten() for rank in range(group.size)],
        has_gradient=torches.have_gradients,
    )


def test_broadcast(group: Group) -> None:
    """The root is a rank of the group, and the operation has no gradient."""
    root = group.size - 1
    check(
        group.rank,
        inputs(group),
        lambda mine: funcol.broadcast(mine, root, group.handle),
        lambda of_ranks: [of_ranks[root]] * group.size,
        has_gradient=False,
    )
