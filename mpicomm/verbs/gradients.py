"""Verbs in automatic differentiation: the gradient of a verb is the transposed verb, called in the backward pass.

The loss is meant to be the sum of all ranks' losses; each rank calls `backward()` on its own, and all ranks that took
part in the verb must, in one order, since the backward pass is collective too.
`torch.autograd.grad` of some inputs leaves out the verbs that these did not go through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Backward = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""From the gradients of a verb's results to those of its inputs."""


def attach(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], backward: Backward) -> list[torch.Tensor]:
    """Return the results of a verb as functions of its inputs.

    Args:
        inputs: Those of this rank; there may be none, where others had them.
    """
    if not any(each.requires_grad for each in inputs):
        inputs = [torch.zeros((), requires_grad=True)]
        given = backward

        def backward(gradients: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            given(gradients)
            return [torch.zeros(())]

    return list(_Verb.apply(backward, len(results), *results, *inputs))


class _Verb(torch.autograd.Function):
    """A verb that has run, with what is to run backward."""

    @staticmethod
    def forward(ctx: Any, backward: Backward, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.run_backward, ctx.count = backward, count
        inexact = [each.dtype.is_floating_point or each.dtype.is_complex for each in tensors[:count]]
        results = tuple(each.detach().view_as(each) for each in tensors[:count])
        ctx.mark_non_differentiable(*[each for each, has in zip(results, inexact, strict=True) if not has])
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_inputs = ctx.run_backward([each.contiguous() for each in gradients])
        return (None, None, *[None] * ctx.count, *of_inputs)
