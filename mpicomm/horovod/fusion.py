"""Fuses small tensors into one buffer, so that they are reduced by one operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from mpicomm.backend import torch_internals

_LONG_BYTES = 2**20  # from this size on, the two copies cost more than an operation of its own
_MOST_LAYOUTS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """The input and the output of a reduction; one tensor if it is in place."""

    source: torch.Tensor
    output: torch.Tensor


class FusionBuffer:
    """The memory in which the tensors of one dtype and device are fused."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)
        self._layouts: dict[tuple[torch.Size, ...], tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def reduce(
        self, pairs: Sequence[Pair], threshold: int, run: Callable[[torch.Tensor, Sequence[torch.Tensor]], None]
    ) -> None:
        """Reduce tensors, fused up to a threshold in bytes (collective).

        Args:
            run: Reduces its first argument in place; the second one is the list of its parts.
        """
        for batch in _batches(pairs, threshold):
            if len(batch) == 1:
                source, output = batch[0].source, batch[0].output
                if output is not source:
                    output.copy_(source)
                run(output, [output])
                continue
            whole, parts = self._layout(batch)
            torch_internals.copy_each(parts, [each.source for each in batch])
            run(whole, parts)
            torch_internals.copy_each([each.output for each in batch], parts)

    def _layout(self, batch: Sequence[Pair]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the fused tensor and its parts, in the shapes of the tensors of the batch."""
        shapes = tuple([each.source.shape for each in batch])
        layout = self._layouts.get(shapes)
        if layout is None:
            counts = [each.source.numel() for each in batch]
            if sum(counts) > self._memory.numel() or len(self._layouts) == _MOST_LAYOUTS:
                self._layouts.clear()
            if sum(counts) > self._memory.numel():
                self._memory = torch.empty(sum(counts), dtype=self._memory.dtype, device=self._memory.device)
            whole = self._memory[: sum(counts)]
            parts = [part.view(shape) for part, shape in zip(whole.split(counts), shapes, strict=True)]
            layout = self._layouts[shapes] = whole, parts
        return layout


def _batches(pairs: Sequence[Pair], threshold: int) -> Iterator[list[Pair]]:
    """Yield the tensors in batches of at most `threshold` bytes; long tensors are batches of their own."""
    limit = min(threshold, _LONG_BYTES)
    batch: list[Pair] = []
    nbytes = 0
    for each in pairs:
        if each.source.nbytes >= limit:
            yield [each]
            continue
        if nbytes + each.source.nbytes > threshold:
            yield batch
            batch, nbytes = [], 0
        batch.append(each)
        nbytes += each.source.nbytes
    if batch:
        yield batch
