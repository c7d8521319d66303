"""Compiled functions and models that contain collectives give the results of the same computation in one process."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import mpicomm
from tests import torches
from tests.features.together import check, exchanged, numbers

pytestmark = pytest.mark.usefixtures("compiler")
each_backend = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


def counting(backend: str) -> Any:
    """Return a compiler that counts the graphs that it receives."""
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend(backend)


def inputs(world: mpicomm.World) -> list[torch.Tensor]:
    return [numbers(rank, 2 * world.size, 3) for rank in range(world.size)]


# Only matrix products and collectives: inductor compiles them without a C++ compiler, which would take half a minute.


@each_backend
def test_functional_collectives(world: mpicomm.World, backend: str) -> None:
    """A single graph contains all collectives, forward and backward."""
    weight = numbers(0, 3, 3)

    def step(mine: torch.Tensor) -> torch.Tensor:
        total = funcol.all_reduce(mine @ weight, "sum", dist.group.WORLD)
        block = torches.scattered(total @ weight, "sum", 0, dist.group.WORLD)
        rows = torches.gathered(block @ weight, 0, dist.group.WORLD)
        return funcol.all_to_all_single(rows @ mine.T @ mine, None, None, dist.group.WORLD)

    def together(of_ranks: list[torch.Tensor]) -> list[torch.Tensor]:
        total = sum(each @ weight for each in of_ranks)
        rows = world.size * total @ weight @ weight
        return exchanged([rows @ each.T @ each for each in of_ranks])

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    check(world.rank, inputs(world), compiled, together, has_gradient=torches.have_gradients)


@each_backend
def test_collectives_of_torch_distributed(world: mpicomm.World, backend: str) -> None:
    """The compiler replaces them by functional collectives."""

    def step(mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = mine @ mine.T
        dist.all_reduce(total)
        everything = mine.new_empty(world.size * mine.shape[0], 3)
        dist.all_gather_into_tensor(everything, total @ mine)
        return total, everything

    counter = counting(backend)
    total, everything = torch.compile(step, backend=counter, fullgraph=True)(inputs(world)[world.rank])
    expected = sum(each @ each.T for each in inputs(world))
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(everything, torch.cat([expected @ each for each in inputs(world)]))
    assert counter.frame_count == 1


@pytest.mark.each_torch("compile")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the inductor needs a C++ compiler for this function")
def test_loops_between_functional_collectives(world: mpicomm.World) -> None:
    """The inductor compiles the operations on elements to C++."""
    from torch import _inductor

    def step(mine: torch.Tensor) -> torch.Tensor:
        total = funcol.all_reduce(mine, "sum", dist.group.WORLD)
        return torches.gathered(total * 3 - mine, 0, dist.group.WORLD)

    counter = counting("inductor")
    with torch.no_grad(), _inductor.config.patch({"cpp.simdlen": 1}):  # no compilations that probe for AVX
        result = torch.compile(step, backend=counter, fullgraph=True)(inputs(world)[world.rank])
    total = sum(inputs(world))
    torch.testing.assert_close(result, torch.cat([total * 3 - each for each in inputs(world)]))
    assert counter.frame_count == 1
