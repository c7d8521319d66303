"""Tensors of the same dtype and device as one tensor, so that they share one message or reduction."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from mpicomm.collective_ops import pytree
from mpicomm.collective_ops.pytree import Data


def by_dtype(data: Data) -> list[Sequence[int]]:
    """Return the indices of the tensors of each dtype and device; in the same order on all ranks."""
    if len(set(data.description.dtypes)) == 1 and set(data.description.devices) == {pytree.HOST}:
        return [range(len(data.tensors))]
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(data.tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(index)
    return list(groups.values())


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the content of tensors of the same dtype, concatenated."""
    with torch.no_grad():
        return torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors])


def unpacked(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return views of the result of `packed`, with the shapes of its arguments."""
    if len(shapes) == 1:
        return [flat if flat.shape == shapes[0] else flat.view(shapes[0])]
    lengths, are_flat = _lengths(tuple(shapes))
    # "Unsafe": autograd does not track the parts as views, so in-place writes to them are allowed.
    parts = torch.unsafe_split_with_sizes(flat, lengths)
    return list(parts) if are_flat else [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@functools.lru_cache(maxsize=64)
def _lengths(shapes: tuple[Sequence[int], ...]) -> tuple[list[int], bool]:
    """Return the number of elements for each shape, and whether all shapes have one dimension."""
    return [math.prod(shape) for shape in shapes], all(len(shape) == 1 for shape in shapes)
