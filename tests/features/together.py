"""A collective as a function in one process: from the inputs of all ranks to the outputs of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Outputs = Sequence[torch.Tensor]
"""One output per rank."""


def numbers(rank: int, *shape: int) -> torch.Tensor:
    """Return a rank's random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def exchanged(of_ranks: list[torch.Tensor]) -> Outputs:
    """Return the outputs of an all-to-all: rank r receives the r-th chunk of the rows of each rank."""
    size = len(of_ranks)
    return [torch.cat([each.chunk(size)[rank] for each in of_ranks]) for rank in range(size)]


def check(
    rank: int,
    inputs: Sequence[torch.Tensor],
    collective: Callable[[torch.Tensor], torch.Tensor],
    together: Callable[[list[torch.Tensor]], Outputs],
    *,
    has_gradient: bool = True,
) -> None:
    """Compare a collective's output, and the gradient of its input, with those of the same function in one process.

    The loss is a weighted sum of all outputs on all ranks, with different weights for each rank.
    """
    of_ranks = [each.clone().requires_grad_(has_gradient) for each in inputs]
    expected = together(of_ranks)
    mine = inputs[rank].clone().requires_grad_(has_gradient)
    output = collective(mine)
    torch.testing.assert_close(output, expected[rank])
    if has_gradient:
        _loss(rank, output).backward()
        sum(_loss(each, output) for each, output in enumerate(expected)).backward()
        torch.testing.assert_close(mine.grad, of_ranks[rank].grad)


def _loss(rank: int, output: torch.Tensor) -> torch.Tensor:
    return (numbers(100 + rank, *output.shape) * output).sum()
