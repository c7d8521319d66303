"""Collective operations under autograd: the gradient of an operation is the transposed operation in the backward pass.

Gradients are those of the sum of all ranks' losses. The backward pass is collective too: every rank that took part in
an operation must call `backward()`, and all ranks in the same order. `torch.autograd.grad` with respect to some inputs
skips the operations that these inputs did not pass through.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mpicomm import torch_internals

Backward = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Maps the gradients of an operation's results to the gradients of its inputs."""

_sequence = threading.local()
"""`number` is the autograd sequence number of the operation whose step the current thread runs."""


@contextlib.contextmanager
def at_number(number: int | None) -> Iterator[None]:
    """Give operations that end in the block the autograd sequence number that was reserved when they were called.

    The backward pass is ordered by sequence numbers, which autograd assigns per thread. Without this, ranks whose steps
    run on different threads would call the transposed operations in different orders.
    """
    before = getattr(_sequence, "number", None)
    _sequence.number = number
    try:
        yield
    finally:
        _sequence.number = before


def attach(
    results: list[torch.Tensor], inputs: Sequence[torch.Tensor], backward: Backward, *, is_needed: bool = True
) -> list[torch.Tensor]:
    """Return the results of an operation, connected to its inputs in the autograd graph.

    Args:
        results: The results of the operation.
        inputs: The inputs of this rank; empty if only other ranks have inputs.
        backward: Computes the gradients of the inputs.
        is_needed: Whether a rank's data requires a gradient; else the results are returned as they are.
    """
    if not (is_needed and torch.is_grad_enabled()):
        return results
    if not any(tensor.requires_grad for tensor in inputs):
        inputs = [torch.zeros((), requires_grad=True)]  # so that autograd makes a node, whose backward is collective

        def run_backward(gradients: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            backward(gradients)
            return [torch.zeros(())]

    else:
        run_backward = backward  # type: ignore[assignment]
    outputs = list(_CollectiveFunction.apply(run_backward, list(results), *inputs))
    number = getattr(_sequence, "number", None)
    if number is not None:
        torch_internals.set_sequence_number(outputs, number)
    return outputs


class _CollectiveFunction(torch.autograd.Function):
    """The autograd node of an operation that has run; its backward pass calls `run_backward`."""

    @staticmethod
    def forward(
        ctx: Any, backward: Backward, results: list[torch.Tensor], *_inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.run_backward = backward
        outputs = tuple(tensor.data for tensor in results)  # not views: autograd forbids in-place writes to those
        inexact = [tensor.dtype.is_floating_point or tensor.dtype.is_complex for tensor in outputs]
        ctx.mark_non_differentiable(*[tensor for tensor, has in zip(outputs, inexact, strict=True) if not has])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.run_backward([tensor.contiguous() for tensor in gradients]))
