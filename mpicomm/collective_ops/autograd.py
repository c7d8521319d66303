"""Collective operations under autograd: the gradient of an operation is the transposed operation in the backward pass.

The loss is meant to be the sum of all ranks' losses; each rank calls `backward()` on its own, and all ranks that took
part in the operation must, in one order, since the backward pass is collective too.
`torch.autograd.grad` of some inputs leaves out the operations that these did not go through.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mpicomm.backend import torch_internals

Backward = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""From the gradients of an operation's results to those of its inputs."""

_place = threading.local()
"""In `number`, the place among autograd's nodes of the operation whose step this thread runs."""


@contextlib.contextmanager
def at(number: int | None) -> Iterator[None]:
    """Let operations that end in the block have the place in the backward pass that was reserved when they were called.

    That pass goes by numbers which autograd gives out on each thread: without this, ranks whose steps run on other
    threads would call the transposed operations in other orders.
    """
    before = getattr(_place, "number", None)
    _place.number = number
    try:
        yield
    finally:
        _place.number = before


def attach(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], backward: Backward) -> list[torch.Tensor]:
    """Return the results of an operation as functions of its inputs.

    Args:
        inputs: Those of this rank; there may be none, where others had them.
    """
    if not any(each.requires_grad for each in inputs):
        inputs = [torch.zeros((), requires_grad=True)]
        given = backward

        def backward(gradients: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            given(gradients)
            return [torch.zeros(())]

    outputs = list(_CollectiveFunction.apply(backward, list(results), *inputs))
    number = getattr(_place, "number", None)
    if number is not None:
        torch_internals.put_node(outputs, number)
    return outputs


class _CollectiveFunction(torch.autograd.Function):
    """An operation that has run, with what is to run backward."""

    @staticmethod
    def forward(
        ctx: Any, backward: Backward, results: list[torch.Tensor], *_inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.run_backward = backward
        outputs = tuple(each.data for each in results)  # no views, or they could not be written into
        inexact = [each.dtype.is_floating_point or each.dtype.is_complex for each in outputs]
        ctx.mark_non_differentiable(*[each for each, has in zip(outputs, inexact, strict=True) if not has])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.run_backward([each.contiguous() for each in gradients]))
